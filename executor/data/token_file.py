"""Token files, which runs map into memory instead of reading them.

    one line of JSON, padded with spaces to HEADER_BYTES     the header
    tokens, little-endian unsigned                           1, 2 or 4 bytes each
    zeros up to a multiple of 8
    ends of the documents, uint64                            in tokens from the start

A one-dimensional .npy file of unsigned integers is also accepted: one document, no vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Final, Literal, cast

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from executor.data.vocabulary import Tokens, Vocabulary
from hardware_profiles.errors import InputError, RunError
from hardware_profiles.fields import convert, parse_json, struct_of

PIECES: Final = 64  # of a long array, which stand for all of it in its hash
PIECE: Final = 2**14  # tokens
CHECKED_ENDS: Final = 2**20  # at a time
FORMAT: Final = "shardplan tokens"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
DTYPES: Final = {"uint8": 1, "uint16": 2, "uint32": 4}
ALIGNMENT: Final = 8

Count = Annotated[int, Meta(ge=0, le=10**15)]
Dtype = Literal["uint8", "uint16", "uint32"]


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a token file."""

    dtype: Dtype
    tokens: Count
    documents: Annotated[int, Meta(ge=1, le=10**15)]
    largest: Count  # largest token
    vocabulary: str  # "bytes", or the folder of the tokenizer
    vocabulary_fingerprint: str
    end: Count | None  # token after every document
    sha256: str  # of the tokens and the document ends
    skipped_rows: Count
    format: str = FORMAT
    version: int = VERSION

    @property
    def ends_offset(self) -> int:
        """Offset of the document ends, in bytes."""
        size = HEADER_BYTES + self.tokens * DTYPES[self.dtype]
        return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TokenFile:
    """An open token file."""

    path: Path
    header: Header
    tokens: Tokens
    ends: NDArray[np.uint64]  # of the documents, ascending; the last equals the number of tokens
    source: str = ""  # the path that the user gave, if it differs

    @property
    def name(self) -> str:
        """Name of the file in messages."""
        return self.source or str(self.path)


def smallest_dtype(size: int) -> str:
    """Return the smallest dtype that represents tokens 0 to ``size - 1``."""
    return next(name for name, width in DTYPES.items() if size <= 2 ** (8 * width))


class TokenFileWriter:
    """Writes a token file document by document, in constant memory.

    A document can be removed until the next one begins.
    """

    def __init__(self, tokens: IO[bytes], ends: IO[bytes], dtype: str) -> None:
        self._tokens, self._ends, self._dtype = tokens, ends, np.dtype(dtype).newbyteorder("<")
        self._hash = hashlib.sha256()
        self.count = self.documents = self.largest = self.skipped = 0
        self._tokens.write(b" " * HEADER_BYTES)
        self.begin()

    def begin(self) -> None:
        """Begin a document."""
        self._mark = (self.count, self.largest, self._hash.copy())

    def add(self, tokens: Tokens) -> None:
        """Append tokens to the document."""
        if len(tokens):
            self.largest = max(self.largest, int(tokens.max()))
            data = tokens.astype(self._dtype).tobytes()
            self._hash.update(data)
            self._tokens.write(data)
            self.count += len(tokens)

    def end(self, end: int | None) -> None:
        """End the document, with an end token if there is one; empty documents are dropped."""
        if self.count == self._mark[0]:
            return
        if end is not None:
            self.add(np.array([end]))
        self._ends.write(np.array([self.count], dtype="<u8").tobytes())
        self.documents += 1
        self.begin()

    def take_back(self) -> None:
        """Remove the document that was begun last, and count it as skipped."""
        self.count, self.largest, self._hash = self._mark
        self._tokens.seek(HEADER_BYTES + self.count * self._dtype.itemsize)
        self._tokens.truncate()
        self.skipped += 1
        self.begin()

    def finish(self, vocabulary: Vocabulary | None) -> Header:
        """Append the document ends and write the header."""
        data = self._tokens
        data.write(bytes(-data.tell() % ALIGNMENT))
        self._ends.seek(0)
        while chunk := self._ends.read(2**20):
            self._hash.update(chunk)
            data.write(chunk)
        header = Header(
            dtype=cast(Dtype, self._dtype.name),
            tokens=self.count,
            documents=self.documents,
            largest=self.largest,
            vocabulary="none" if vocabulary is None else vocabulary.name,
            vocabulary_fingerprint="none" if vocabulary is None else vocabulary.fingerprint,
            end=None if vocabulary is None else vocabulary.end,
            sha256=self._hash.hexdigest(),
            skipped_rows=self.skipped,
        )
        line = json.dumps(asdict(header)).encode()
        if len(line) >= HEADER_BYTES:
            raise InputError(f"{header.vocabulary[:200]}…: the tokenizer's name is too long")
        data.seek(0)
        data.write(line.ljust(HEADER_BYTES - 1) + b"\n")
        return header


@contextlib.contextmanager
def new_token_file(path: Path, dtype: str, *, force: bool = False) -> Iterator[TokenFileWriter]:
    """Yield a writer of a file that appears complete when the context ends.

    On an error, not at all.
    """
    if path.exists() and not force:
        raise InputError(f"{path}: exists already (--force replaces it)")
    try:
        with (
            tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tokens-", delete=False) as data,
            tempfile.TemporaryFile(dir=path.parent) as ends,
        ):
            try:
                yield TokenFileWriter(data, ends, dtype)
                data.flush()
                os.fsync(data.fileno())
                os.umask(umask := os.umask(0))
                os.chmod(data.name, 0o666 & ~umask)  # temporary files are private to their owner
                os.replace(data.name, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(data.name)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def open_token_file(path: Path) -> TokenFile:
    """Map a token file into memory; raises an InputError if it is invalid or incomplete."""
    try:
        return _open_array(path) if path.suffix == ".npy" else _open(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> TokenFile:
    with path.open("rb") as file:
        line = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    header = _header(path, line)
    expected = header.ends_offset + 8 * header.documents
    if size != expected:
        raise InputError(
            f"{path}: {size:,} bytes (expected from its header: {expected:,}): incomplete"
        )
    if not header.tokens:
        raise InputError(f"{path}: contains no tokens")
    dtype = np.dtype(header.dtype).newbyteorder("<")
    tokens = np.memmap(path, dtype, "r", HEADER_BYTES, (header.tokens,))
    ends = np.memmap(path, np.dtype("<u8"), "r", header.ends_offset, (header.documents,))
    if int(ends[-1]) != header.tokens:
        raise InputError(
            f"{path}: its last document ends at {int(ends[-1]):,}, not at its number of tokens"
        )
    if not _ascend(ends):
        raise InputError(f"{path}: the ends of its documents do not ascend from above 0: damaged")
    return TokenFile(path, header, tokens, ends)


def _ascend(ends: NDArray[np.uint64]) -> bool:
    """Return whether every document has tokens."""
    for first in range(0, len(ends), CHECKED_ENDS):
        part = ends[max(0, first - 1) : first + CHECKED_ENDS]
        if not part[0] or not (part[1:] > part[:-1]).all():
            return False
    return True


def _header(path: Path, line: bytes) -> Header:
    try:
        values = parse_json(line.decode(), str(path))
    except (UnicodeDecodeError, InputError):
        values = {}
    if values.get("format") != FORMAT:
        raise InputError(f"{path}: not a token file (made with: shardplan tokenize)")
    if values.get("version") != VERSION:
        raise InputError(
            f"{path}: version {json.dumps(values.get('version'))[:20]} (supported: {VERSION})"
        )
    convert(values, struct_of(Header), f"{path}: invalid header")
    return Header(**values)


def _open_array(path: Path) -> TokenFile:
    try:
        with warnings.catch_warnings(action="ignore"):  # of headers that Python 2 wrote
            tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # of numpy's reader of headers: ValueError, TypeError, MemoryError
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{path}: not a .npy file of numbers: {reason}") from None
    if tokens.ndim != 1 or tokens.dtype.name not in DTYPES or not len(tokens):
        raise InputError(
            f"{path}: {tokens.dtype.name} of shape {tokens.shape} (one dimension of "
            f"{', '.join(DTYPES)} expected)"
        )
    header = Header(
        dtype=cast(Dtype, tokens.dtype.name),
        tokens=len(tokens),
        documents=1,
        largest=0,  # unknown: every batch is checked
        vocabulary="none",
        vocabulary_fingerprint="none",
        end=None,
        sha256=_sampled_hash(tokens),
        skipped_rows=0,
    )
    return TokenFile(path, header, tokens, np.array([len(tokens)], dtype=np.uint64))


def _sampled_hash(tokens: Tokens) -> str:
    """Hash the length and evenly spaced pieces of an array that is too large to read in full."""
    digest = hashlib.sha256(f"{len(tokens)} {tokens.dtype}".encode())
    for start in np.linspace(0, max(0, len(tokens) - PIECE), PIECES).astype(int):
        digest.update(tokens[start : start + PIECE].tobytes())
    return digest.hexdigest()
