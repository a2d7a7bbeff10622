"""Click commands from declarations of options: typed parameters, or dataclasses of them.

A command is a function. A parameter annotated with :class:`~hardware_profiles.options.Option` is an
option of its own; a parameter whose type is a dataclass stands for all options the dataclass
declares, and the function receives an instance. The planner and the executor share this module.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

import click

from hardware_profiles.errors import InputError, ShardplanError, did_you_mean
from hardware_profiles.options import Declared, check_value, declare, declared

HELP: Final = {"help_option_names": ["-h", "--help"]}


class Interrupted(ShardplanError):
    """The user interrupted a command."""

    exit_code = 130


class Value(click.ParamType[Any]):
    """Click type that checks values against declared bounds, choices or a parser."""

    def __init__(self, one: Declared) -> None:
        self.one = one
        self.name = "|".join(one.choices) or getattr(one.type, "__name__", "text")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the choices, or the type."""
        return f"[{self.name}]" if self.one.choices else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> Any:
        """Return the value in the declared type, or fail with the allowed values."""
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
    """Return a number of the declared type; other text unchanged, which the check rejects."""
    try:
        return one.type(value)
    except (ValueError, OverflowError):
        return value


class Positional(click.Argument):
    """A positional argument with a line of help."""

    def __init__(self, decls: list[str], help: str, **settings: Any) -> None:
        super().__init__(decls, **settings)
        self.text = help


class Command(click.Command):
    """A command whose help lists its arguments, and its options by group."""

    groups: Mapping[str, str]  # help section of each option

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
                title = self.groups.get(param.name or "", "") or "options"
                sections.setdefault(title, []).append(record)
        for title in sorted(sections, key=lambda title: title == "options"):
            with formatter.section(title[0].upper() + title[1:]):
                formatter.write_dl(sections[title])


class LazyGroup(click.Group):
    """Commands imported on demand, from a table of names, functions and lines of help."""

    def __init__(self, table: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self.table = table

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
                made = command(made, name=cmd_name, help=text)
            self.commands[cmd_name] = made
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; suggest a similar one."""
        name = str(args[0])
        if name not in self.table and not name.startswith("-"):
            ctx.fail(f"No such command '{name}'. {did_you_mean(name, self.table)}".strip())
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an interruption prints one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


def command(
    function: Callable[..., Any], *, name: str, help: str, epilog: str | None = None
) -> click.Command:
    """Return a click command that calls a function."""
    hints = get_type_hints(function, include_extras=True)
    parts = [
        (parameter.name, hints[parameter.name], parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]
    fields = list(_fields(parts))

    def call(**given: Any) -> Any:
        values = {key: _given(value) for key, value in given.items()}
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
    made.groups = {one.name: one.option.group for one, _ in fields if one.option}
    return made


def _made(cls: Any, values: Mapping[str, Any]) -> Any:
    return cls(**values)


def _fields(parts: list[tuple[str, Any, Any]]) -> Iterator[tuple[Declared, bool]]:
    """Yield every declared option, and whether its own type checks the value."""
    for name, hint, default in parts:
        if is_dataclass(hint):
            strict = not getattr(hint, "CHECKS_ITSELF", False)
            yield from ((one, strict) for one in _shown(hint))
        else:
            missing = default is inspect.Parameter.empty
            yield declare(name, hint, MISSING if missing else default), True


def _shown(cls: Any) -> list[Declared]:
    return [one for one in declared(cls).values() if one.option is not None]


def _given(value: Any) -> Any:
    """Return None for a repeatable option that is not given."""
    return (list(value) or None) if isinstance(value, tuple) else value


def _parameter(one: Declared, *, strict: bool) -> click.Parameter:
    option = one.option
    assert option is not None
    kind = _type(one, strict=strict)
    required = one.default is MISSING
    if one.is_positional:
        settings = {} if required else {"default": one.default}
        return Positional(
            [one.name],
            option.help,
            metavar=option.flags[0],
            required=required,
            type=kind,
            nargs=-1 if one.many else 1,
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
        settings |= {"type": kind, "metavar": option.metavar}
    flags = option.flags or ((f"{one.flags[0]}"),)
    return click.Option([*flags, one.name], help=option.help, **settings)


def _type(one: Declared, *, strict: bool) -> Any:
    option = one.option
    if one.type is Path:
        return click.Path(path_type=Path)
    if strict and (one.choices or one.type in (int, float) or (option and option.read)):
        return Value(one)
    if option is not None and option.as_text:
        return click.STRING
    return {int: click.INT, float: click.FLOAT}.get(one.type, click.STRING)
