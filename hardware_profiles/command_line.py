"""Click commands from declarations of options: typed parameters, or dataclasses of them.

A command is a function. A parameter annotated with :class:`~hardware_profiles.options.Option` is an
option of its own; a parameter whose type is a dataclass stands for all options the dataclass
declares, and the function receives an instance. The function may be a dataclass itself: then the
command returns an instance, as :func:`parse` does. The planner and the executor share this module.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, get_type_hints

import click
from click.shell_completion import CompletionItem

from hardware_profiles.errors import InputError, ShardplanError, did_you_mean, similar
from hardware_profiles.options import (
    Declared,
    check_value,
    declare,
    declared,
    named_elsewhere,
    possible_values,
    read_count,
    spellings,
)
from hardware_profiles.shells import use_shells
from hardware_profiles.terminal import printable, say

use_shells()
HELP: Final = {"help_option_names": ["-h", "--help"]}
# titles of the first and of the last group of options
COMMON: Final = "common"
MOST_NAMED: Final = 20  # values that an error lists
OUTPUT: Final = "output"


class Interrupted(ShardplanError):
    """The user interrupted a command."""

    exit_code = 130


class Value(click.ParamType[Any]):
    """A value that is checked against the declared bounds, choices or reader."""

    def __init__(self, one: Declared) -> None:
        self.one = one
        self.name = "|".join(one.choices) or getattr(one.type, "__name__", "text")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the choices, or the type."""
        return f"[{self.name}]" if self.one.choices else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> Any:
        """Return the value of the declared type, or fail with its bounds."""
        one = self.one
        try:
            if one.option and one.option.read and isinstance(value, str):
                return one.option.read(value)
            if one.type in (int, float) and not one.choices:
                value = _number(one, value)
            return check_value(one, value, shown=False)
        except InputError as error:
            self.fail(str(error), param, ctx)


def _number(one: Declared, value: Any) -> Any:
    """Return a number of the declared type; NaN, which is in no range, for other text."""
    try:
        return read_count(value) if one.type is int and isinstance(value, str) else one.type(value)
    except (ValueError, OverflowError):
        return value


class Count(click.ParamType[int]):
    """A whole number, with ``k`` and ``M`` as in 8k tokens; its bounds are checked elsewhere."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> int:
        """Return the number."""
        try:
            return read_count(value) if isinstance(value, str) else int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number such as 4096 or 8k", param, ctx)


class Positional(click.Argument):
    """An argument without a dash, with a line of help."""

    def __init__(self, decls: list[str], help: str, **settings: Any) -> None:
        super().__init__(decls, **settings)
        self.text = help

    def make_metavar(self, ctx: click.Context) -> str:
        """Return its word in the usage, in brackets where it may be left out."""
        word = super().make_metavar(ctx)
        return word if self.required else f"[{word}]"


_WORD: Final = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)
TOGETHER: Final = "\u00a0"  # a space at which no line breaks
CONTINUED: Final = " \\"  # at the end of a line of a command that goes on
_OPTION_VALUE: Final = re.compile(r"(?<=\s)(--?[a-z][\w-]*) (?=[^\s-])")
FILES: Final = ("PATH", "DIR", "FOLDER", "FILE", "SOURCE")  # of a word for a value
_SWITCH: Final = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


class HelpFormatter(click.HelpFormatter):
    """Help whose words, such as ``hf-trainer-early``, are not broken at their hyphens."""

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 28, col_spacing: int = 2
    ) -> None:
        """Write two columns; a longer first cell has a line of its own."""
        cells = list(rows)
        first = min(max((len(term) for term, _ in cells), default=0), col_max) + col_spacing
        width = max(self.width - first - self.current_indent, 10)
        for term, text in cells:
            lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
            if len(term) + col_spacing > first:
                lines = ["", *lines]
            left = f"{'':>{self.current_indent}}{term}"
            for number, line in enumerate(lines or [""]):
                start = left if number == 0 else ""
                self.write(f"{start:<{first + self.current_indent}}{line}".rstrip() + "\n")


class HelpContext(click.Context):
    """Context of a command that formats its help with :class:`HelpFormatter`."""

    formatter_class = HelpFormatter

    def get_help(self) -> str:
        """Return the help with characters that standard output can print."""
        return printable(super().get_help())


def _help_option(option: click.Option | None) -> click.Option | None:
    if option is not None:
        option.help = "show this help"
    return option


class Command(click.Command):
    """A command whose help shows its arguments, and its options by group.

    Among its arguments, ``tp=8`` stands for the option ``--tp 8``, by its flag, name or
    abbreviation; an option that collects the fields of a dataclass takes those it names.
    """

    context_class = HelpContext
    groups: Mapping[str, str]  # of an option, the title it stands under
    fields: Sequence[Declared] = ()
    order: Sequence[str] = ()  # of titles; others follow
    examples: Sequence[str] = ()

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the same names in every context: the option is made once."""
        return list(HELP["help_option_names"])

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option ``--help`` in our words."""
        return _help_option(super().get_help_option(ctx))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read options, arguments, and the words ``name=value`` among them."""
        strict = not ctx.allow_extra_args
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, self._sorted(args) if strict else args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click's parser leaves it out
            raise
        ctx.allow_extra_args = not strict
        if not strict or ctx.resilient_parsing:
            return rest
        others = [word for word in rest if not _WORD.fullmatch(word)]
        if others and not self._replaced(ctx, others):
            many = "s" if len(others) > 1 else ""
            named = " ".join(
                one.option.flags[0] for one in self.fields if one.option and one.is_positional
            )
            known = f"; the arguments are {named}" if named else ""
            meant = [hint for word in others if (hint := self._value_of_option(word))]
            hint = f". Did you mean {' '.join(meant)}?" if meant else known
            ctx.fail(f"Got unexpected extra argument{many} ({' '.join(others)}){hint}")
        rest = [word for word in rest if word not in others]
        for word in rest:
            self._set(ctx, word)
        ctx.args = []
        return ctx.args

    def _replaced(self, ctx: click.Context, words: Sequence[str]) -> bool:
        """Whether one more word replaced the last argument, which may be replaced."""
        last = [one for one in self.fields if _positional(one)][-1:]
        if len(words) != 1 or not (last and last[0].option and last[0].option.replaceable):
            return False
        if self._value_of_option(words[0]):
            return False
        name = last[0].name
        say(f"{words[0]} instead of {ctx.params[name]}")
        ctx.params[name] = words[0]
        return True

    def _value_of_option(self, word: str) -> str | None:
        """Return the option that has a word among its values, with the word; None without one."""
        key = word.lower()
        found = (one for one in self.fields if key in one.choices or key in one.values)
        one = next((one for one in found if one.flags and not _positional(one)), None)
        return None if one is None else f"{one.flags[0]} {key}"

    def _sorted(self, args: list[str]) -> list[str]:
        """Return the words with those that name an option (``tp=8``) after the arguments."""
        with_value = {
            flag
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for flag in param.opts
        }
        kept: list[str] = []
        moved: list[str] = []
        for before, word in zip(["", *args], args, strict=False):
            found = _WORD.fullmatch(word)
            known = found is not None and self._names(found[1])
            (moved if known and before not in with_value else kept).append(word)
        return [*kept, *moved]

    def _names(self, name: str) -> bool:
        """Whether an option, or a field that an option collects, has this name."""
        options, collected = self._spelled()
        key = name.replace("-", "_")
        return key in options or key in collected

    def _spelled(self) -> tuple[dict[str, Declared], dict[str, Declared]]:
        """Return the options by their names, and the options that collect fields by theirs."""
        options = {spelling: one for one in self.fields for spelling in spellings(one)}
        collected = {
            spelling: one
            for one in self.fields
            if one.option and one.option.collects
            for part in declared(one.option.collects).values()
            for spelling in (part.short, part.name)
        }
        return options, collected

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the options that begin so, behind the arguments also as ``tp=8``."""
        if not incomplete or incomplete.startswith("-") or not self.fields:
            return super().shell_complete(ctx, incomplete)
        name, equals, start = incomplete.partition("=")
        options, collected = self._spelled()
        known = {**collected, **options}
        if not equals:
            names = [one.short for one in known.values() if one.option and one.option.short]
            names = [one for one in dict.fromkeys((*names, *known)) if one.startswith(name)]
            return [CompletionItem(f"{one}=") for one in names]
        one = known.get(name.replace("-", "_"))
        found = [] if one is None else proposals(one, start)
        return [CompletionItem(f"{name}={item.value}", item.type) for item in found]

    def _set(self, ctx: click.Context, word: str) -> None:
        """Set the option that a word ``name=value`` names."""
        name, value = word.split("=", 1)
        key = name.replace("-", "_")
        options, collected = self._spelled()
        one = options.get(key)
        if one is None and key in collected:
            target = collected[key].name
            ctx.params[target] = ",".join(filter(None, (ctx.params[target], word)))
            return
        if one is None:
            hint = did_you_mean(key, [*options, *collected])
            ctx.fail(f"{word}: no option is called {name}. {hint}".rstrip())
        param = next(param for param in self.params if param.name == one.name)
        given = ctx.get_parameter_source(one.name) is click.core.ParameterSource.COMMANDLINE
        if given and not one.many:
            ctx.fail(f"{word}: {one.flags[0]} is given twice")
        ctx.set_parameter_source(one.name, click.core.ParameterSource.COMMANDLINE)
        if one.type is bool:
            if value.lower() not in _SWITCH:
                ctx.fail(f"{word}: must be on or off")
            ctx.params[one.name] = _SWITCH[value.lower()]
            return
        read = param.type_cast_value(ctx, [value] if one.many else value)
        ctx.params[one.name] = (*(ctx.params[one.name] or ()), *read) if one.many else read

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then each group of options."""
        arguments = [p for p in self.params if isinstance(p, Positional)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(p.make_metavar(ctx), p.text) for p in arguments])
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                title = self.groups.get(param.name or "", "")
                title = self._last if title in ("", OUTPUT) else title
                sections.setdefault(title, []).append(record)
        order = (COMMON, *self.order, *(title for title in sections if title != self._last))
        for title in dict.fromkeys((*order, self._last)):
            if title in sections:
                with formatter.section(title[0].upper() + title[1:]):
                    formatter.write_dl(sections[title])

    @property
    def _last(self) -> str:
        """Title of the last group, of options without a title."""
        return OUTPUT if set(self.groups.values()) - {"", OUTPUT} else "options"

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are typed, then the text at the end."""
        if self.examples:
            with formatter.section("Examples"):
                write_examples(formatter, self.examples)
        super().format_epilog(ctx, formatter)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """Write commands as they are typed; a long one goes on in the next line, behind a backslash."""
    indent = " " * formatter.current_indent
    for example in examples:
        kept = _OPTION_VALUE.sub(rf"\1{TOGETHER}", example)
        lines = textwrap.wrap(
            kept,
            formatter.width - len(CONTINUED),
            initial_indent=indent,
            subsequent_indent=2 * indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        formatter.write(f"{CONTINUED}\n".join(lines).replace(TOGETHER, " ") + "\n")


class LazyGroup(click.Group):
    """Commands that are imported when they are called: a name, its function, a line of help."""

    context_class = HelpContext

    def __init__(
        self,
        table: Mapping[str, tuple[str, str]],
        *,
        epilog_of_commands: str | None = None,
        order: Sequence[str] = (),
        examples: Mapping[str, Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.table = table
        self.epilog_of_commands = epilog_of_commands
        self.order = order  # of the titles of options
        self.examples = examples or {}  # of every command; "": of the group

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option ``--help`` in our words."""
        return _help_option(super().get_help_option(ctx))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and build one command."""
        if cmd_name not in self.commands and cmd_name in self.table:
            where, text = self.table[cmd_name]
            module, function = where.split(":")
            made = getattr(importlib.import_module(module), function)
            if not isinstance(made, click.Command):
                made = command(made, name=cmd_name, help=text, epilog=self.epilog_of_commands)
                made.order, made.examples = self.order, self.examples.get(cmd_name, ())
            self.commands[cmd_name] = made
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; suggest a similar one."""
        name = str(args[0])
        if ctx.resilient_parsing and name not in self.table:
            return name, None, args[1:]
        if name not in self.table and not name.startswith("-"):
            ctx.fail(f"No such command '{name}'. {did_you_mean(name, self.table)}".strip())
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin so, without importing a command."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in self.table.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command: its result is the exit code; an interruption is one line of output."""
        try:
            ctx.exit(super().invoke(ctx) or 0)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are typed, then the text at the end."""
        if self.examples.get(""):
            with formatter.section("Examples"):
                write_examples(formatter, self.examples[""])
        super().format_epilog(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lines of help without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


def command(
    function: Callable[..., Any], *, name: str, help: str, epilog: str | None = None
) -> Command:
    """Return the command of a function."""
    hints = get_type_hints(function, include_extras=True)
    parts = [
        (parameter.name, hints[parameter.name], parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]
    fields = list(_fields(parts))

    def call(**given: Any) -> Any:
        values = {one.name: _given(one, given[one.name]) for one, _ in fields}
        arguments = {}
        for part, hint, _ in parts:
            if is_dataclass(hint):
                names = [one.name for one in _shown(hint)]
                arguments[part] = _made(hint, {key: values[key] for key in names})
            else:
                arguments[part] = values[part]
        return function(**arguments)

    made = Command(
        name,
        callback=call,
        params=[_parameter(one, strict=strict) for one, strict in fields],
        help=help,
        epilog=epilog,
        context_settings=HELP,
    )
    made.fields = [one for one, _ in fields]
    made.groups = {
        one.name: COMMON if one.option.common else one.option.group
        for one, _ in fields
        if one.option
    }
    return made


def proposals(one: Declared, start: str) -> list[CompletionItem]:
    """Return the words that a shell proposes for the value of an option.

    Values may be joined by commas; where none begins as typed, files are proposed for paths.
    """
    option = one.option
    if option is not None and option.complete is not None:
        words = list(option.complete(start))
    else:
        before, comma, last = start.rpartition(",")
        values = one.values or possible_values(one)
        words = [before + comma + value for value in values if value.startswith(last)]
    if not words and (_names_a_file(one) or start[:1] in (".", "/", "~") or "/" in start):
        return [CompletionItem(start, type="file")]
    return [CompletionItem(word) for word in words]


def _names_a_file(one: Declared) -> bool:
    option = one.option
    shown = "" if option is None else option.metavar or "".join(option.flags[:1])
    return one.type is Path or any(word in shown for word in FILES)


def _made(cls: Any, values: Mapping[str, Any]) -> Any:
    return cls(**values)


def _fields(parts: list[tuple[str, Any, Any]]) -> Iterator[tuple[Declared, bool]]:
    """Yield every declared option, and whether the command line checks its value itself."""
    for name, hint, default in parts:
        if is_dataclass(hint):
            strict = not getattr(hint, "CHECKS_ITSELF", False)
            yield from ((one, strict) for one in _shown(hint))
        else:
            missing = default is inspect.Parameter.empty
            yield declare(name, hint, MISSING if missing else default), True


def _shown(cls: Any) -> list[Declared]:
    return [one for one in declared(cls).values() if one.option is not None]


def _given(one: Declared, value: Any) -> Any:
    """Return the default of an option that may be repeated and was not given."""
    if not one.many:
        return value
    if not value:
        return one.default
    return value if isinstance(one.default, tuple) else list(value)


def _parameter(one: Declared, *, strict: bool) -> click.Parameter:
    option = one.option
    assert option is not None
    kind = _type(one, strict=strict)
    required = one.default is MISSING

    def complete(_: Any, __: Any, incomplete: str) -> list[CompletionItem]:
        return proposals(one, incomplete)

    if one.is_positional:
        settings = {} if required else {"default": one.default}
        return Positional(
            [one.name],
            one.help,
            metavar=option.flags[0],
            required=required,
            type=kind,
            nargs=-1 if one.many else 1,
            shell_complete=complete,
            **settings,
        )
    settings = {"required": True} if required else {"default": one.default}
    if one.many:
        settings = {"multiple": True}
    elif one.type is bool:
        settings["is_flag"] = True
    elif option.optional_value is not None:
        settings |= {"is_flag": False, "flag_value": option.optional_value}
    if one.type is not bool:
        settings |= {"type": kind, "metavar": option.metavar or _metavar(one, kind)}
    flags = option.flags or (one.flags[0],)
    return click.Option([*flags, one.name], help=one.help, shell_complete=complete, **settings)


def _metavar(one: Declared, kind: Any) -> str | None:
    """Return the word for the value in the help; None for the type's own."""
    if isinstance(kind, Value) and one.choices:
        return None
    if one.type in (int, float):
        return "N" if one.type is int else "X"
    return "NAME" if one.values else None


def _type(one: Declared, *, strict: bool) -> Any:
    option = one.option
    if one.type is Path:
        return click.Path(path_type=Path)
    if strict and (one.choices or one.type in (int, float) or (option and option.read)):
        return Value(one)
    if option is not None and option.as_text:
        return click.STRING
    return {int: Count(), float: click.FLOAT}.get(one.type, click.STRING)


# of an unknown option and its value in a command: advice beyond a similar name
Advice = Callable[[click.Context, str, str | None], str | None]


def parse(made: click.Command, words: Sequence[str], program: str) -> Any:
    """Return what a command returns for the words of a command line.

    A wrong word is an InputError; ``--help`` prints and exits.
    """
    try:
        answer = made.main(args=list(words), prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        text = usage_error(error, words, program)
        raise InputError(text.removeprefix("shardplan: ")) from None
    except click.Abort:
        raise Interrupted("interrupted") from None
    if isinstance(answer, int):
        raise SystemExit(answer)
    return answer


def usage_error(
    error: Any, words: Sequence[str], program: str, *, advice: Advice | None = None
) -> str:
    """Return an error about the words of a command line, in one line with the value in question."""
    context = getattr(error, "ctx", None)
    if context is not None and error.message == context.get_help():  # no words at all
        return str(error.message)
    names = getattr(getattr(error, "param", None), "opts", [])
    values = [value for name in names if (value := _value_of(name, words)) is not None]
    command = program if context is None else context.command_path
    message = error.format_message().rstrip(".")
    value = f" ({names[-1]} {values[-1]})" if values and values[-1] not in message else ""
    if isinstance(error, click.NoSuchOption):
        message = f"No such option: {error.option_name}{_instead(error, words, advice)}"
    elif isinstance(error, click.BadOptionUsage) and (needed := _value_needed(error)):
        message, value = needed, ""
    text = f"shardplan: {message}{value}"
    return f"{text} See {command} --help" if text[-1] == "?" else f"{text}; see {command} --help"


def _instead(error: Any, words: Sequence[str], advice: Advice | None) -> str:
    """Return a suggestion for an unknown option."""
    option = error.option_name
    if advice is not None and (text := advice(error.ctx, option, _value_of(option, words))):
        return f" ({text})"
    fields = {
        (one.option.flags if _positional(one) else one.flags)[0]: one
        for one in getattr(error.ctx.command, "fields", ())
        if _positional(one) or one.flags
    }
    if hint := named_elsewhere(option, fields):
        return f". {hint}"
    known = {
        flag.lstrip("-"): flag
        for param in error.ctx.command.params
        for flag in param.opts
        if flag.startswith("--")
    }
    close = similar(option.lstrip("-"), known)
    return f". Did you mean {' or '.join(known[name] for name in close)}?" if close else ""


def _value_needed(error: click.BadOptionUsage) -> str | None:
    """Return what an option needs that came without its value; None for another error."""
    fields = getattr(getattr(error.ctx, "command", None), "fields", ())
    one = next((one for one in fields if error.option_name in one.flags), None)
    if one is None or "requires an argument" not in error.message:
        return None
    if 0 < len(one.values) <= MOST_NAMED:
        return f"{error.option_name} needs a value: {', '.join(one.values)}"
    shown = (one.option.metavar if one.option else None) or "N"
    return f"{error.option_name} needs a value, {error.option_name} {shown}: {one.help}"


def _positional(one: Declared) -> bool:
    return one.option is not None and one.is_positional


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """Return the word that was given for an option."""
    for word, following in zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return None
