"""Conversion of document files to one token file, for ``tokenize`` and for the data of a run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from executor.data.sources import CHUNK, TOKEN_SUFFIXES, BadRow, Piece, files_of, rows_of
from executor.data.token_file import (
    VERSION,
    Header,
    TokenFile,
    TokenFileWriter,
    new_token_file,
    open_token_file,
    smallest_dtype,
)
from executor.data.vocabulary import Tokens, Vocabulary, open_vocabulary
from hardware_profiles.cluster.measurement import cache_folder
from hardware_profiles.errors import InputError
from hardware_profiles.progress import is_shown, report, tracked
from hardware_profiles.terminal import say

MAX_BYTES: Final = 2**32  # largest size of documents that a run tokenizes
KEPT_SECONDS: Final = 30 * 24 * 3600.0  # age in the cache since the last use
QUIET_SECONDS: Final = 3.0  # between progress messages
PIECES: Final = 1024  # tokenized in one call, at most
_NO_TOKENS: Final = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TokenizationOptions:
    """Options of the conversion of documents to tokens."""

    vocabulary: Vocabulary
    vocab_size: int  # tokens are 0 to vocab_size - 1
    text_field: str = "text"
    skip_bad_rows: bool = False


def build(
    files: Sequence[Path], tokenization: TokenizationOptions, path: Path, *, force: bool = False
) -> Header:
    """Tokenize the documents of files and write them to a token file."""
    progress = _Progress()
    dtype = smallest_dtype(tokenization.vocab_size)
    with new_token_file(path, dtype, force=force) as writer:
        for file in tracked(files, "file {number} of {total}", size=lambda one: one.stat().st_size):
            report(f"tokenizing {file}")
            try:
                _add_file(file, tokenization, writer, progress)
            except OSError as error:
                raise InputError(f"{file}: cannot be read: {error.strerror or error}") from None
        if not writer.documents:
            names = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
            skipped = f" ({writer.skipped:,} rows were skipped)" if writer.skipped else ""
            raise InputError(f"{names}: is empty{skipped}: no document with text")
        return writer.finish(tokenization.vocabulary)


def cached(files: Sequence[Path], tokenization: TokenizationOptions) -> TokenFile:
    """Return the tokens of files from the user's cache; the first call fills it.

    All processes of a machine share the cache: one process tokenizes while the others wait.
    """
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise InputError(
            f"{files[0]}{' and others' * (len(files) > 1)}: {size:,} bytes of documents (a run "
            f"tokenizes at most {MAX_BYTES:,}; tokenize them in advance: shardplan tokenize)"
        )
    path = cache_folder() / "tokens" / f"{_key(files, tokenization)}.bin"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                with contextlib.suppress(InputError):  # damaged: tokenized again
                    found = open_token_file(path)
                    os.utime(path)
                    return found
            _drop_unused(path.parent)
            build(files, tokenization, path, force=True)
    except OSError as error:
        raise InputError(
            f"{path.parent}: tokens cannot be cached there: {error.strerror or error}. "
            "Set SHARDPLAN_CACHE to a writable folder"
        ) from None
    return open_token_file(path)


def _drop_unused(folder: Path) -> None:
    """Delete token files unused for KEPT_SECONDS; runs that mapped one keep its pages."""
    for file in folder.glob("*.bin"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > KEPT_SECONDS:
                file.unlink()
                file.with_suffix(".lock").unlink(missing_ok=True)


def _key(files: Sequence[Path], tokenization: TokenizationOptions) -> str:
    """Return a hash of the files' current state and of the tokenization options."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    parts = [
        VERSION,
        [[name, found.st_size, found.st_mtime_ns, found.st_ino] for name, found in stats],
        tokenization.vocabulary.fingerprint,
        tokenization.vocab_size,
        tokenization.text_field,
        tokenization.skip_bad_rows,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _add_file(
    file: Path, tokenization: TokenizationOptions, writer: TokenFileWriter, progress: _Progress
) -> None:
    """Add the documents of one file; bad rows are skipped, or raise."""
    spoilt = False  # whether the current document is skipped
    for piece, tokens in _tokenized(file, tokenization):
        progress(file, writer.count)
        if isinstance(piece, BadRow):
            problem: BadRow | None = piece
        else:
            problem = None if spoilt else _unknown_token(file, piece, tokens, tokenization)
        if problem is not None:
            if not tokenization.skip_bad_rows:
                raise problem
            writer.take_back()
            spoilt = isinstance(piece, Piece) and not piece.last
            continue
        assert isinstance(piece, Piece)
        if not spoilt:
            writer.add(tokens)
            if piece.last:
                writer.end(_end(piece, tokens, tokenization.vocabulary))
        spoilt = spoilt and not piece.last


def _tokenized(
    file: Path, tokenization: TokenizationOptions
) -> Iterator[tuple[Piece | BadRow, Tokens]]:
    """Yield the rows of a file with their tokens; texts are tokenized in groups."""
    waiting: list[Piece | BadRow] = []
    characters = 0

    def flush() -> Iterator[tuple[Piece | BadRow, Tokens]]:
        texts = [row.content for row in waiting if isinstance(row, Piece)]
        encoded = iter(tokenization.vocabulary.encode([t for t in texts if isinstance(t, str)]))
        for row in waiting:
            if isinstance(row, BadRow):
                yield row, _NO_TOKENS
            else:
                yield row, next(encoded) if isinstance(row.content, str) else row.content
        waiting.clear()

    for row in rows_of(file, tokenization.text_field):
        if isinstance(row, BadRow) and not tokenization.skip_bad_rows:
            yield from flush()  # an earlier bad row is reported first
            raise row
        waiting.append(row)
        characters += len(row.content) if isinstance(row, Piece) else 0
        if characters >= CHUNK or len(waiting) >= PIECES:
            yield from flush()
            characters = 0
    yield from flush()


def _unknown_token(
    file: Path, piece: Piece, tokens: Tokens, tokenization: TokenizationOptions
) -> BadRow | None:
    if not len(tokens) or (largest := int(tokens.max())) < tokenization.vocab_size:
        return None
    problem = f"token {largest:,} (vocab_size = {tokenization.vocab_size:,} allows 0 to "
    return BadRow(file, piece.place, f"{problem}{tokenization.vocab_size - 1:,})")


def _end(piece: Piece, tokens: Tokens, vocabulary: Vocabulary) -> int | None:
    """Return the token that ends a document, None if its tokens already end with it."""
    if isinstance(piece.content, str):
        return vocabulary.end
    has_end = len(tokens) and int(tokens[-1]) == vocabulary.end
    return None if has_end or vocabulary.fingerprint == "bytes" else vocabulary.end


class _Progress:
    """Prints the progress of a long tokenization on stderr, where no status line shows it."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, file: Path, tokens: int) -> None:
        if time.monotonic() - self._told > QUIET_SECONDS and not is_shown():
            self._told = time.monotonic()
            say(f"tokenizing {file}: {tokens:,} tokens")


def tokenize(
    sources: Sequence[str],
    output: Path,
    *,
    tokenizer: str | None = None,
    text_field: str = "text",
    skip_bad_rows: bool = False,
    vocab_size: int | None = None,
    force: bool = False,
) -> Header:
    """Write the documents of all sources to one token file; return its header."""
    if output.suffix != ".bin":
        raise InputError(f"{output}: must end in .bin, the suffix of token files")
    if output.exists() and not force:
        raise InputError(f"{output}: exists already (--force replaces it)")
    if not output.parent.is_dir():
        raise InputError(f"{output}: no such folder: {output.parent}")
    files = [file for source in sources for file in files_of(source)]
    for file in files:
        if file.suffix in TOKEN_SUFFIXES:
            raise InputError(f"{file}: is already tokenized (text, JSONL or Parquet expected)")
    vocabulary = open_vocabulary(tokenizer)
    allowed = vocabulary.size if vocab_size is None else vocab_size
    tokenization = TokenizationOptions(vocabulary, allowed, text_field, skip_bad_rows)
    return build(files, tokenization, output, force=force)
