"""Reading of files made by people and by other programs.

``convert`` checks the values of a file against a type (msgspec) whose numbers have bounds. Every
error names the file, the path inside it, the value and the allowed ones. Numbers are finite; sizes
have upper bounds, so that a broken file is refused before it reaches a formula.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.message import on_one_line

MAX_FILE_BYTES: Final = 4_000_000
MAX_DEPTH: Final = 16
Amount = Annotated[float, Meta(ge=0.0, le=1e30)]
Positive = Annotated[float, Meta(ge=1e-12, le=1e30)]
# a name or a source: with a line break it could pass for a line of ours
Line = Annotated[str, Meta(pattern=r"^(?![\s\S]*[\r\n])")]

T = TypeVar("T")


def read_text(path: Path, what: str, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file, or raise an InputError with the reason."""
    shown = on_one_line(str(path))
    try:
        if not path.exists():
            raise InputError(f"{shown}: no such file ({what} expected)")
        if path.is_dir():
            raise InputError(f"{shown}: is a folder ({what} expected)")
        if not path.is_file():  # a pipe or a device: reading it might never end
            raise InputError(f"{shown}: is not a regular file ({what} expected)")
        if path.stat().st_size > max_bytes:
            raise InputError(
                f"{shown}: {path.stat().st_size:,} bytes is too large for {what} "
                f"(at most {max_bytes:,})"
            )
        return path.read_text(encoding="utf-8-sig")  # some editors begin with a mark
    except UnicodeDecodeError as error:
        raise InputError(f"{shown}: not text ({what} expected): {error.reason}") from None
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path with a NUL character
        raise InputError(f"{str(path)!r}: not a usable path: {error}") from None


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of a text, which white space separates.

    >>> names_in("seq_len  micro_batch_size")
    ('seq_len', 'micro_batch_size')
    """
    return tuple(text.split())


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object; NaN, infinities and anything deeper than MAX_DEPTH are refused."""

    def refuse(constant: str) -> float:
        raise InputError(f"{where}: {constant} is not a number that JSON allows")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = next(key for key in values if [k for k, _ in pairs].count(key) > 1)
            raise InputError(f"{where}: the key {twice[:60]!r} stands twice in one object")
        return values

    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply (at most {MAX_DEPTH} levels)") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: a JSON object is expected, got {type(value).__name__}")
    if nesting(value) > MAX_DEPTH:
        raise InputError(f"{where}: nested too deeply (at most {MAX_DEPTH} levels)")
    return value


def nesting(value: object, level: int = 1) -> int:
    """Return the levels of nested objects and lists, counted to MAX_DEPTH + 1."""
    if level > MAX_DEPTH or not isinstance(value, (dict, list)):
        return level
    inner: Iterable[object] = value.values() if isinstance(value, dict) else value
    return max((nesting(item, level + 1) for item in inner), default=level)


def read_json(path: Path, what: str, *, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file."""
    return parse_json(read_text(path, what, max_bytes=max_bytes), str(path))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file."""
    return parse_toml(read_text(path, what), path)


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Parse TOML of a file, or of a part of it."""
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise InputError(f"{path}: not TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply (at most {MAX_DEPTH} levels)") from None
    if nesting(values) > MAX_DEPTH:
        raise InputError(f"{path}: nested too deeply (at most {MAX_DEPTH} levels)")
    return values


def convert(data: object, kind: type[T], where: str) -> T:
    """Return plain values as a type, or raise an InputError that names the invalid value.

    ``where`` names the file (and the path inside it). Structs that forbid unknown fields refuse
    them with the nearest known name.

    >>> convert({"x": -1}, dict[str, Amount], "a.toml")
    Traceback (most recent call last):
    hardware_profiles.errors.InputError: a.toml: x = -1 (must be a number from 0 to 1e+30)
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), data, kind, where) from None
    except UnicodeEncodeError as error:  # JSON may hold \ud800 alone
        half = ascii(error.object[error.start])
        raise InputError(f"{where}: {half} is half of a character, not text") from None


def tidied(data: Any) -> Any:
    """Return plain values without keys that are null, and with 8.0 as 8.

    For files of other programs, to which both notations are equal.

    >>> tidied({"nodes": 2.0, "price": None, "tiers": [{"latency": 0.5}]})
    {'nodes': 2, 'tiers': [{'latency': 0.5}]}
    """
    if isinstance(data, Mapping):
        return {key: tidied(value) for key, value in data.items() if value is not None}
    if isinstance(data, (list, tuple)):
        return [tidied(value) for value in data]
    if isinstance(data, float) and abs(data) < 2**53 and data.is_integer():
        return int(data)
    return data


def struct_of(cls: type, *, without: Iterable[str] = (), **types: Any) -> Any:
    """Return a Struct with the fields of a dataclass that refuses unknown ones.

    ``types``: of fields whose values are checked against another type than the dataclass has, and
    of further fields; a pair is a type and a default.
    """
    hints = get_type_hints(cls, include_extras=True)
    declared: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(cls):
        if field.name not in without:
            default = () if field.default is dataclasses.MISSING else (field.default,)
            if field.default_factory is not dataclasses.MISSING:
                default = (field.default_factory(),)
            declared[field.name] = (hints[field.name], *default)
    for name, kind in types.items():
        if isinstance(kind, tuple):
            declared[name] = kind
        else:
            declared[name] = (kind, *declared.get(name, ())[1:])
    return msgspec.defstruct(
        cls.__name__,
        [(name, *rest) for name, rest in declared.items()],
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def wrong_value(where: str, key: str, value: object, allowed: str) -> InputError:
    """Return the error for a value that is not allowed."""
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InputError(f"{where}: {key} = {shown} (must be {allowed})")


_ERROR: Final = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.S)
_STEP: Final = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def _explained(message: str, data: Any, kind: Any, where: str) -> InputError:
    """Return msgspec's error in our words, with the value and the type that its path leads to."""
    found = _ERROR.fullmatch(message)
    assert found is not None
    what = found["what"]
    names: list[str] = []
    for step in _STEP.finditer(found["path"] or ""):
        data, kind, name = _stepped(data, _bare(kind, data), step["key"], step["index"])
        if step["index"] is not None and names:
            names[-1] += name
        else:
            names.append(name)
    if "`key` in" in message:  # the first key of a mapping that its type refuses
        known = [str(word) for word in get_args(get_args(_bare(kind))[0])]
        key = next(str(name) for name in data if str(name) not in known)
        hint = did_you_mean(key, known) or f"Known keys: {', '.join(known)}"
        return InputError(f"{': '.join([where, *names])}: unknown key {key[:60]!r}. {hint}")
    quoted = re.search(r"`([^`]*)`", what)
    if what.startswith("Object missing") and quoted:
        return InputError(f"{': '.join([where, *names])}: {quoted[1]} is missing")
    if what.startswith("Object contains unknown") and quoted:
        known = list(_bare(kind).__struct_fields__)
        hint = did_you_mean(quoted[1], known) or f"Known keys: {', '.join(known)}"
        return InputError(f"{': '.join([where, *names])}: unknown key {quoted[1][:60]!r}. {hint}")
    if not names:
        return InputError(f"{where}: must be {_allowed(kind, data)}")
    return wrong_value(": ".join([where, *names[:-1]]), names[-1], data, _allowed(kind, data))


def _bare(kind: Any, data: object = None) -> Any:
    """Return a type without bounds and without None; of several types, the one that ``data`` is."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in (Union, types.UnionType):
            kinds = _alternatives(kind)
            lists = [inner for inner in kinds if get_origin(inner) in (list, tuple)]
            objects = [inner for inner in kinds if get_origin(inner) is dict or _is_struct(inner)]
            fitting = lists if isinstance(data, list) else objects if isinstance(data, dict) else []
            kind = (fitting or kinds)[0]
        else:
            return kind


def _alternatives(kind: Any) -> list[Any]:
    return [inner for inner in get_args(kind) if inner is not types.NoneType]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _stepped(data: Any, kind: Any, key: str | None, index: str | None) -> tuple[Any, Any, str]:
    """Return the value, its type and its name one step further on a path."""
    arguments = get_args(kind)
    if index is not None:
        fixed = get_origin(kind) is tuple and Ellipsis not in arguments
        inner = arguments[int(index) if fixed else 0] if arguments else Any
        return data[int(index)], inner, f"[{index}]"
    if key is not None:
        inner = next(f.type for f in msgspec.structs.fields(kind) if f.encode_name == key)
        return data[key], inner, key
    inner = arguments[1] if len(arguments) == 2 else Any
    for name, value in data.items():  # msgspec names no key of a mapping: the first that fails
        try:
            msgspec.convert(value, inner)
        except msgspec.ValidationError:
            return value, inner, str(name)
    return data, inner, "..."


def _allowed(kind: Any, value: object) -> str:
    """Return the words for the values that a type allows."""
    if get_origin(kind) in (Union, types.UnionType):
        if not isinstance(value, (list, dict)):
            return " or ".join(_allowed(inner, value) for inner in _alternatives(kind))
        kind = _bare(kind, value)
    low, high = None, None
    if kind == Line and isinstance(value, str):
        return "one line"
    while get_origin(kind) is Annotated:
        kind, *marks = get_args(kind)
        for mark in marks:
            low, high = getattr(mark, "ge", low), getattr(mark, "le", high)
    if get_origin(kind) is Literal:
        known = [str(word) for word in get_args(kind)]
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        only_words = all(isinstance(word, str) for word in get_args(kind))
        string = "a string, " if only_words and not isinstance(value, str) else ""
        return f"{string}one of " + ", ".join(known) + (f". {hint}" if hint else "")
    if kind is int:
        bounds = "" if low is None or high is None else f" from {low:,} to {high:,}"
        return f"a whole number{bounds}"
    if kind is float:
        bounds = "" if low is None or high is None else f" from {low:g} to {high:g}"
        return f"a number{bounds}"
    words = {bool: "true or false", str: "a string"}
    if kind in words:
        return words[kind]
    return "a list" if get_origin(kind) in (list, tuple) else "an object with keys"


def write_text_atomically(
    path: Path,
    text: str,
    *,
    force: bool = False,
) -> None:
    """Write a file all at once; an existing one is kept unless ``force``."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file to write")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; choose another name or add --force")
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
