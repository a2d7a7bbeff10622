"""Documents of text, JSONL and Parquet files, each with its position in the file.

Files are read incrementally, so that memory does not grow with their size. Unusable rows are
BadRows.
"""

from __future__ import annotations

import codecs
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from executor.data.vocabulary import Tokens
from hardware_profiles.errors import InputError
from hardware_profiles.progress import advance, tracked

TEXT_SUFFIXES: Final = (".txt",)
JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")
PARQUET_SUFFIXES: Final = (".parquet",)
TOKEN_SUFFIXES: Final = (".bin", ".npy")
KNOWN: Final = TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES + TOKEN_SUFFIXES
TOKEN_IDS: Final = "input_ids"  # the field of rows that hold token numbers
MAX_LINE: Final = 2**28  # bytes of a row of JSONL
ROWS_TOLD: Final = 256  # of JSONL between two reports
CHUNK: Final = 2**20  # characters of a long text in one piece
_SPECIAL: Final[dict[Callable[[int], bool], str]] = {
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISCHR: "a character device",
    stat.S_ISBLK: "a block device",
    stat.S_ISSOCK: "a socket",
}


class BadRow(InputError):
    """A row that cannot be used: file, position, problem."""

    def __init__(self, path: Path, place: str, problem: str) -> None:
        super().__init__(f"{path}{', ' * bool(place)}{place}: {problem}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of a long document."""

    content: str | Tokens
    place: str  # in the file: "line 12"
    last: bool = True  # whether the document ends with this piece


Rows = Iterator[Piece | BadRow]  # after a BadRow the reader continues with the next row


def files_of(source: str) -> list[Path]:
    """Return the file itself, or all files of known formats under a folder, sorted by path."""
    path = Path(source)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode):
            return [_regular(path, mode)]
        found = sorted(p for p in path.rglob("*") if p.suffix in KNOWN and not p.is_dir())
        for file in found:
            _regular(file, file.stat().st_mode)
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename}: no such file (a file or folder of text, JSONL, Parquet or tokens, "
            "or the word synthetic)"
        ) from None
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror or error}") from None
    if not found:
        raise InputError(f"{source}: no file of {', '.join(KNOWN)} in this folder")
    return found


def _regular(path: Path, mode: int) -> Path:
    if stat.S_ISREG(mode):
        return path
    kind = next((name for test, name in _SPECIAL.items() if test(mode)), "special")
    raise InputError(f"{path}: is {kind} (a regular file expected)")


def rows_of(path: Path, text_field: str) -> Rows:
    """Return the documents of one file."""
    if path.suffix in JSONL_SUFFIXES:
        return _jsonl(path, text_field)
    if path.suffix in PARQUET_SUFFIXES:
        return _parquet(path, text_field)
    return _text(path)


def _text(path: Path) -> Rows:
    """Yield a text in pieces that end at line ends, if it has any."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept, line, size = "", 1, path.stat().st_size
    with path.open("rb") as file:
        while True:
            data = file.read(CHUNK)
            try:
                decoded = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += kept.count("\n") + error.object[: error.start].count(b"\n")
                yield BadRow(path, f"line {line}", f"not UTF-8 text: {error.reason}")
                return
            kept += decoded
            advance(file.tell() / max(1, size))
            if not data:
                yield Piece(kept, f"line {line}")
                return
            end = kept.rfind("\n") + 1
            if end == 0 and len(kept) >= 4 * CHUNK:  # one very long line
                end = len(kept)
            if end:
                yield Piece(kept[:end], f"line {line}", last=False)
                line += kept.count("\n", 0, end)
                kept = kept[end:]


def _jsonl(path: Path, text_field: str) -> Rows:
    with path.open("rb") as file:
        number, size = 0, path.stat().st_size
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if number % ROWS_TOLD == 0:
                advance(file.tell() / max(1, size))
            place = f"line {number}"
            if len(line) > MAX_LINE:
                raise BadRow(path, place, f"longer than {MAX_LINE:,} bytes")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _json_row(path, place, line, text_field)


def _json_row(path: Path, place: str, line: bytes, text_field: str) -> Piece | BadRow:
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(path, place, f"not UTF-8 text: {error.reason}")
    except json.JSONDecodeError as error:
        return BadRow(path, place, f"not JSON: {error.msg} (column {error.colno})")
    except (RecursionError, ValueError) as error:  # too deeply nested; too many digits
        return BadRow(path, place, f"not JSON: {str(error) or type(error).__name__}")
    if not isinstance(row, dict):
        return BadRow(path, place, f"{_kind(row)} (an object expected)")
    field = text_field if text_field in row or TOKEN_IDS not in row else TOKEN_IDS
    if field not in row:
        return BadRow(path, place, _no_field(field, "fields", list(row)))
    return _piece(path, place, field, row[field])


def _parquet(path: Path, text_field: str) -> Rows:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow: pip install 'shardplan[data]'") from None
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            field = text_field if text_field in names or TOKEN_IDS not in names else TOKEN_IDS
            if field not in names:
                raise InputError(f"{path}: {_no_field(field, 'columns', names)}")
            for group in tracked(range(file.num_row_groups)):
                row = 0
                for batch in file.iter_batches(1024, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        row += 1
                        place = f"row {row} of row group {group + 1}"
                        yield _piece(path, place, field, _python(value))
    except ArrowException as error:
        raise InputError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None


def _python(value: Any) -> Any:
    """Return a pyarrow value as a Python value, or empty bytes for text that is not UTF-8."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b""


def _piece(path: Path, place: str, field: str, value: Any) -> Piece | BadRow:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return BadRow(path, place, f"{field!r} holds half a character (a lone surrogate)")
        return Piece(value, place)
    if field == TOKEN_IDS and isinstance(value, list):
        if all(type(token) is int and 0 <= token < 2**32 for token in value):
            return Piece(np.array(value, dtype=np.int64), place)
        wrong = next(t for t in value if type(t) is not int or not 0 <= t < 2**32)
        return BadRow(path, place, f"{field!r} holds {str(wrong)[:40]!r} (token numbers expected)")
    expected = "token numbers" if field == TOKEN_IDS else "text"
    return BadRow(path, place, f"{field!r} is {_kind(value)} ({expected} expected)")


def _no_field(field: str, what: str, names: list[str]) -> str:
    shown = ", ".join(names[:8]) + ", …" * (len(names) > 8)
    return f"no field {field!r} ({what}: {shown[:200] or 'none'}; --text-field names another)"


def _kind(value: Any) -> str:
    if isinstance(value, bytes):
        return "bytes that are not UTF-8"
    kinds: dict[type, str] = {
        dict: "an object",
        list: "a list",
        bool: "true or false",
        str: "a text",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")
