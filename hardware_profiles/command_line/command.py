"""A command: its words, those that are ``name=value`` among them, and its help by group."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from hardware_profiles.command_line.help import (
    COMMON,
    HELP,
    OUTPUT,
    HelpContext,
    help_option,
    write_examples,
)
from hardware_profiles.command_line.values import proposals
from hardware_profiles.errors import did_you_mean
from hardware_profiles.options import Declared, declared, spellings
from hardware_profiles.terminal import say

_WORD: Final = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)
_SWITCH: Final = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


class Positional(click.Argument):
    """An argument without a dash, with a line of help."""

    def __init__(self, decls: list[str], help: str, **settings: Any) -> None:
        super().__init__(decls, **settings)
        self.text = help

    def make_metavar(self, ctx: click.Context) -> str:
        """Return its word in the usage, in brackets where it may be left out."""
        word = super().make_metavar(ctx)
        return word if self.required else f"[{word}]"


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
        return help_option(super().get_help_option(ctx))

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
        last = [one for one in self.fields if one.is_positional][-1:]
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
        one = next((one for one in found if one.flags and not one.is_positional), None)
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
