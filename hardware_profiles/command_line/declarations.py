"""Click commands from declarations of options: typed parameters, or dataclasses of them.

A command is a function. A parameter annotated with :class:`~hardware_profiles.options.Option` is an
option of its own; a parameter whose type is a dataclass stands for all options the dataclass
declares, and the function receives an instance. The function may be a dataclass itself: then the
command returns an instance, as ``usage.parse`` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import click
from click.shell_completion import CompletionItem

from hardware_profiles.command_line.command import Command, Positional
from hardware_profiles.command_line.help import COMMON, HELP
from hardware_profiles.command_line.values import Count, Value, proposals
from hardware_profiles.options import Declared, declare, declared


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
