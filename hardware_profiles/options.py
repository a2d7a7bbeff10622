"""Declarations of options: dataclass fields annotated with :class:`Option` and bounds.

A field declares one option completely: its name, type, bounds or choices, default and help, the
flags of the command line, and its abbreviation in ``--fix`` and ``--require``. The command line,
the readers of JSON, the range checks, pasted commands and docs/reference/defaults.md follow::

    tensor_parallel: Annotated[Count, Option("--tp", short="tp", help="tensor parallel")] = 1

Bounds are ``msgspec.Meta`` (``ge``, ``gt``, ``le``, ``lt``); choices are a ``Literal``.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta
from msgspec.structs import asdict

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import convert, struct_of, tidied

Pasted = Literal["always", "changed", "never"]


MOST_VALUES: Final = 8  # of a number of which all are proposed


class Option:
    """Command-line form of a field: flags, help, abbreviation, and its commands.

    ``flags``: ``--name`` of the field where none is given; ``--sp/--no-sp`` for a switch; ``MODEL``
    (no dash) is a positional argument. ``help``: ``{default}`` stands for the default. ``example``:
    a value shown in error messages. ``of``: the field that this one depends on;
    ``pasted``: when a command printed for copying contains it. ``default`` and ``why``: words of
    docs/reference/defaults.md for a default that is computed. ``as_text``: a longer notation than
    the field's type is allowed, which the request reads. ``optional_value``: of a flag that is
    given without a value. ``read``: from the word of the command line to a value that bounds alone
    do not check; raises an InputError. ``collects``: a dataclass whose fields may follow the
    arguments of the command as ``tp=8``; they are added to this option. ``common``: the help lists
    it in its first group. ``values``: the values of a text, or names in it, where the type is not a
    Literal; ``{values}`` in ``help`` stands for them. ``complete``: from the beginning of a word to
    the words that a shell proposes. ``elsewhere``: its names in other tools, for suggestions; with
    the value that they stand for, such as ``gradient_checkpointing=full``. ``replaceable``: a
    second positional argument of this name replaces the first.
    """

    __slots__ = (
        "as_text",
        "collects",
        "common",
        "complete",
        "default",
        "elsewhere",
        "example",
        "flags",
        "group",
        "help",
        "metavar",
        "of",
        "optional_value",
        "pasted",
        "read",
        "replaceable",
        "short",
        "values",
        "why",
    )

    def __init__(
        self,
        *flags: str,
        help: str = "",
        metavar: str | None = None,
        short: str | None = None,
        group: str = "",
        of: str | None = None,
        pasted: Pasted = "changed",
        example: str | None = None,
        default: str = "",
        why: str = "",
        as_text: bool = False,
        optional_value: str | None = None,
        read: Callable[[str], Any] | None = None,
        collects: type | None = None,
        common: bool = False,
        values: Sequence[str] | Callable[[], Sequence[str]] = (),
        complete: Callable[[str], Sequence[str]] | None = None,
        elsewhere: Sequence[str] = (),
        replaceable: bool = False,
    ) -> None:
        self.flags = flags
        self.help = help
        self.metavar = metavar
        self.short = short
        self.group = group
        self.of = of
        self.pasted = pasted
        self.example = example
        self.default = default
        self.why = why
        self.as_text = as_text
        self.optional_value = optional_value
        self.read = read
        self.collects = collects
        self.common = common
        self.values = values
        self.complete = complete
        self.elsewhere = elsewhere
        self.replaceable = replaceable


class Declared(NamedTuple):
    """One field as its annotation declares it."""

    name: str
    type: Any  # int, float, bool, str, Path, …: without None, bounds and choices
    default: Any  # MISSING: required
    option: Option | None = None
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf  # bounds that are not allowed themselves
    below: float = math.inf
    many: bool = False  # may be repeated

    @property
    def is_positional(self) -> bool:
        """Whether it is an argument without a dash."""
        return bool(self.option and self.option.flags and self.option.flags[0][0] != "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags that set it (on), the usual one first."""
        if self.option is None or self.is_positional:
            return ()
        given = self.option.flags or (dashed(self.name),)
        return tuple(flag.split("/")[0] for flag in given)

    @property
    def off_flags(self) -> tuple[str, ...]:
        """Return the flags that switch it off."""
        given = self.option.flags if self.option else ()
        return tuple(flag.split("/")[1] for flag in given if "/" in flag)

    @property
    def short(self) -> str:
        """Return its name in ``--fix`` and ``--require``."""
        return (self.option and self.option.short) or self.name

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values, or the names in them, that the field may have; () for any."""
        if self.choices or self.option is None:
            return self.choices
        given = self.option.values
        return tuple(given() if callable(given) else given)

    @property
    def help(self) -> str:
        """Return its line of help with the default and the values filled in."""
        if self.option is None:
            return ""
        shown = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        text = self.option.help.replace("{default}", shown)
        return text.replace("{values}", ", ".join(self.values)) if "{values}" in text else text

    def as_option(self, value: Any) -> str:
        """Return the words that set a value on the command line.

        >>> Declared("sequence_parallel", bool, False, Option("--sp/--no-sp")).as_option(False)
        '--no-sp'
        """
        if isinstance(value, bool) and self.type is bool:
            return self.flags[0] if value else self.off_flags[0]
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{self.flags[0]} {shown}"


def spellings(one: Declared) -> set[str]:
    """Return the names of an option in ``name=value``: its flags, field and abbreviation."""
    if one.option is None or one.is_positional:
        return set()
    names = {one.short, one.name, *(flag.lstrip("-") for flag in one.flags if flag[:2] == "--")}
    return {name.replace("-", "_") for name in names}


def possible_values(one: Declared) -> tuple[str, ...]:
    """Return all values of a switch, of a word, or of a number that has few; () for any.

    >>> possible_values(Declared("zero", int, 0, low=0, high=3))
    ('0', '1', '2', '3')
    """
    if one.type is bool:
        return ("on", "off")
    if one.type is int and one.high - one.low < MOST_VALUES:
        return tuple(str(number) for number in range(int(one.low), int(one.high) + 1))
    return one.values


def meant(given: str, known: Iterable[Declared]) -> tuple[Declared, str] | None:
    """Return the option, and its value if any, that a name which is no option's stands for.

    The name of the field (``tensor-parallel``), a name in another tool, a value of an option
    (``bf16``), or a name and a number in one word (``zero3``).
    """
    name = given.lstrip("-").replace("-", "_").lower()
    options = [one for one in known if one.option is not None]
    elsewhere = {word: one for one in options if one.option for word in one.option.elsewhere}
    for word, one in elsewhere.items():
        if word.partition("=")[0] == name:
            return one, word.partition("=")[2]
    for one in options:
        if name in spellings(one):
            return one, ""
    for one in options:
        if name in one.values and one.type is not bool and name != "none":
            return one, name
    numbered = re.fullmatch(r"([a-z_]+?)_?(\d+)", name)
    for one in options if numbered else ():
        if numbered and one.type is int and numbered[1] in spellings(one):
            return one, numbered[2]
    return None


def named_elsewhere(given: str, known: Mapping[str, Declared]) -> str:
    """Return a hint for the name that an option has in another tool, or an empty string.

    ``known``: options by the names that the hint shows.
    """
    found = meant(given, known.values())
    for shown, one in known.items():
        if found is not None and one is found[0]:
            if one.is_positional:
                return f"{shown} gives it: {one.help}"
            value = found[1] if shown.startswith("-") or one.type is int else repr(found[1])
            joint = " " if shown.startswith("-") else "="
            return f"Did you mean {shown}{joint + value if found[1] else ''}?"
    return ""


def dashed(name: str) -> str:
    """Return the usual flag of a field.

    >>> dashed("seq_len")
    '--seq-len'
    """
    return "--" + name.replace("_", "-")


@cache
def declared(cls: type) -> Mapping[str, Declared]:
    """Return the fields of a dataclass as they are declared, in order."""
    hints = get_type_hints(cls, include_extras=True)
    return types.MappingProxyType(
        {f.name: declare(f.name, hints[f.name], _default(f)) for f in fields(cls)}
    )


def _default(field: Any) -> Any:
    if field.default is MISSING and field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def declare(name: str, hint: Any, default: Any) -> Declared:
    """Return one field or parameter from its annotation."""
    metadata: list[Any] = []
    many = False
    choices: tuple[str, ...] = ()
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            metadata += hint.__metadata__
            hint = hint.__origin__
        elif origin in (Union, types.UnionType):
            # the first type of a union is the one of the command line
            hint = next(kind for kind in get_args(hint) if kind is not type(None))
        elif origin in (list, tuple, Sequence):
            many, hint = True, get_args(hint)[0]
        elif origin is Literal:
            choices, hint = get_args(hint), str
        else:
            break
    option = next((m for m in metadata if isinstance(m, Option)), None)
    low, high, above, below = -math.inf, math.inf, -math.inf, math.inf
    for bounds in (m for m in metadata if isinstance(m, Meta)):
        low = low if bounds.ge is None else float(bounds.ge)
        high = high if bounds.le is None else float(bounds.le)
        above = above if bounds.gt is None else float(bounds.gt)
        below = below if bounds.lt is None else float(bounds.lt)
    return Declared(name, hint, default, option, choices, low, high, above, below, many)


NUMBER: Final = 1e30  # largest number where no bound is declared


@cache
def bounded_struct(cls: type) -> Any:
    """Return a Struct with the fields of a dataclass and the bounds that they declare."""
    bounded: dict[str, Any] = {
        name: Annotated[float, Meta(ge=max(one.low, -NUMBER), le=min(one.high, NUMBER))]
        for name, one in declared(cls).items()
        if one.type is float and not one.choices
    }
    return struct_of(cls, **bounded)


def read_fields(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read and check the single values of a dataclass; an unknown name is an error.

    ``where``: the file, and the path inside it, for errors.
    """
    return asdict(convert(tidied(values), bounded_struct(cls), where))


def check_value(one: Declared, value: Any, *, shown: bool = True) -> Any:
    """Return a value that is within the bounds or among the choices, or raise.

    ``shown``: the message begins with the name of the field.
    """
    if one.choices:
        if value in one.choices:
            return value
        hint = did_you_mean(str(value), one.choices)
        allowed = f"one of {', '.join(one.choices)}"
    elif one.type is int:
        if isinstance(value, int) and not isinstance(value, bool) and one.low <= value <= one.high:
            return value
        hint, allowed = "", f"a whole number {_range(one)}"
    elif one.type is float:
        if isinstance(value, (int, float)) and math.isfinite(value) and _inside(one, value):
            return float(value)
        hint, allowed = "", f"a number {_range(one)}"
    else:
        return value
    name = f"{one.name} = " if shown else ""
    raise InputError(f"{name}{value!r} (must be {allowed}){'. ' * bool(hint)}{hint}")


_COUNT: Final = re.compile(r"([+-]?\d[\d_]*(?:,\d{3})*(?:\.\d+)?)([kKmM]?)")
_SUFFIXES: Final = {"": 1, "k": 2**10, "m": 2**20}


def read_count(text: str) -> int:
    """Return a whole number; ``k`` is 1,024 and ``M`` 1,048,576 as in "a context of 8k".

    Source: context lengths named so are powers of two (Llama 3.1: "128k" is
    ``max_position_embeddings`` 131072). A ValueError for other text.

    >>> read_count("8k"), read_count("1M"), read_count("1.5k"), read_count("4,096")
    (8192, 1048576, 1536, 4096)
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None or len(text) > 40:
        raise ValueError(text)
    digits = found[1].replace(",", "").replace("_", "")
    if "." not in digits:
        return int(digits) * _SUFFIXES[found[2].lower()]
    value = float(digits) * _SUFFIXES[found[2].lower()]
    if not found[2] or not value.is_integer():
        raise ValueError(text)
    return int(value)


def read_texts(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which whole numbers may be texts, as on the command line (``"8k"``)."""
    known = declared(cls)
    return {name: _from_text(known[name], value) for name, value in values.items()}


def _from_text(one: Declared, value: Any) -> Any:
    if not isinstance(value, str) or one.type is not int or one.option is None:
        return value
    if one.option.as_text or one.choices or one.option.read is not None:
        return value
    try:
        return read_count(value)
    except ValueError:
        return check_value(one, value)


def _inside(one: Declared, value: float) -> bool:
    return one.low <= value <= one.high and one.above < value < one.below


def _range(one: Declared) -> str:
    low = f"above {one.above:g}" if one.above > one.low else f"from {one.low:,.15g}"
    if one.high < math.inf:
        return f"{low} to {one.high:,.15g}"
    return f"{low} to below {one.below:g}" if one.below < math.inf else low


def optional(cls: type, name: str, doc: str) -> type:
    """Return a dataclass of the same fields of which each may be left out (None).

    It has the declarations of ``cls``; a request inherits from it where every field has a default
    elsewhere.
    """
    hints = get_type_hints(cls, include_extras=True)
    annotations = {f.name: Union[hints[f.name], None] for f in fields(cls)}  # noqa: UP007
    from dataclasses import dataclass

    body = {"__annotations__": annotations, "__doc__": doc, **dict.fromkeys(annotations)}
    declares = dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
    return declares(type(name, (), body))
