"""Reading files made by people and by other programs, field by field.

Every error names the file, the key, the value and what is allowed. Numbers are finite; sizes have
upper bounds, so that a broken file is refused before it meets a formula.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError, did_you_mean

MAX_FILE_BYTES: Final = 4_000_000
MAX_DEPTH: Final = 16


class _Required:
    """Marks a field that has no default."""


REQUIRED: Final = _Required()


def read_text(path: Path, what: str) -> str:
    """Return the text of a file, or raise an InputError that says what is wrong with it."""
    try:
        if not path.exists():
            raise InputError(f"{path}: no such file ({what} expected)")
        if path.is_dir():
            raise InputError(f"{path}: is a folder ({what} expected)")
        if not path.is_file():  # a pipe or a device: reading it might never end
            raise InputError(f"{path}: is not a regular file ({what} expected)")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(
                f"{path}: {path.stat().st_size:,} bytes is too large for {what} "
                f"(at most {MAX_FILE_BYTES:,})"
            )
        return path.read_text(encoding="utf-8-sig")  # some editors begin with a mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text ({what} expected): {error.reason}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path with a NUL character
        raise InputError(f"{str(path)!r}: not a usable path: {error}") from None


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
    if _depth(value) > MAX_DEPTH:
        raise InputError(f"{where}: nested too deeply (at most {MAX_DEPTH} levels)")
    return value


def _depth(value: object, level: int = 1) -> int:
    if level > MAX_DEPTH or not isinstance(value, (dict, list)):
        return level
    inner: Iterable[object] = value.values() if isinstance(value, dict) else value
    return max((_depth(item, level + 1) for item in inner), default=level)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object from a file."""
    return parse_json(read_text(path, what), str(path))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_text(path, what))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from None


def write_text_atomically(
    path: Path,
    text: str,
    *,
    force: bool = False,
    else_do: str = "choose another name or add --force",
) -> None:
    """Write a file all at once; an existing one is kept unless ``force``.

    ``else_do``: what the user can do then.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file to write")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; {else_do}")
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


class Fields:
    """A mapping read field by field.

    ``where`` names the file (and the path inside it) in every error.

    >>> Fields({"n": 0}, "config.json").integer("n", low=1, high=9)
    Traceback (most recent call last):
    hardware_profiles.errors.InputError: config.json: n = 0 (must be a whole number from 1 to 9)
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if isinstance(default, _Required):
                raise InputError(f"{self.where}: {key} is missing")
            return default
        return value

    def wrong(self, key: str, value: object, allowed: str) -> InputError:
        """Return the error for a value that is not allowed."""
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return InputError(f"{self.where}: {key} = {shown} (must be {allowed})")

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 0, high: int = 10**9) -> Any:
        """Return a whole number between ``low`` and ``high`` (both included)."""
        value = self._get(key, default)
        if value is default and not isinstance(default, _Required):
            return value
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            raise self.wrong(key, value, f"a whole number from {low:,} to {high:,}")
        return int(value)

    def number(
        self, key: str, default: Any = REQUIRED, *, low: float = 0.0, high: float = 1e30
    ) -> Any:
        """Return a finite number between ``low`` and ``high`` (both included)."""
        value = self._get(key, default)
        if value is default and not isinstance(default, _Required):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, value, f"a number from {low:g} to {high:g}")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool) and value is not default:
            raise self.wrong(key, value, "true or false")
        return value

    def text(
        self, key: str, default: Any = REQUIRED, *, choices: Iterable[str] | None = None
    ) -> Any:
        """Return a string, one of ``choices`` where they are given."""
        value = self._get(key, default)
        if value is default and not isinstance(default, _Required):
            return value
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        if choices is not None and value not in (known := list(choices)):
            hint = did_you_mean(value, known)
            raise self.wrong(
                key, value, "one of " + ", ".join(known) + (f". {hint}" if hint else "")
            )
        return value

    def items(self, key: str, default: Any = REQUIRED) -> Any:
        """Return a list."""
        value = self._get(key, default)
        if not isinstance(value, (list, tuple)) and value is not default:
            raise self.wrong(key, value, "a list")
        return value

    def sub(self, key: str, default: Any = REQUIRED) -> Fields:
        """Return a nested mapping as Fields."""
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object with keys")
        return Fields(value, f"{self.where}: {key}")

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise for the first key that is not ``known``."""
        names = list(known)
        for key in self.values:
            if key not in names:
                hint = did_you_mean(str(key), names)
                raise InputError(
                    f"{self.where}: unknown key {key!r}. "
                    + (hint or f"Known keys: {', '.join(names)}")
                )
