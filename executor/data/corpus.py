"""Training data: text as bytes or through a local tokenizer, or a synthetic language.

A batch depends on the seed and the number of the step alone, so that every layout of ranks, and the
single process that a run is compared with, sees the same tokens.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.errors import InputError

if TYPE_CHECKING:
    from executor.data.batch import Batch

SYNTHETIC: Final = "synthetic"
BYTE_VALUES: Final = 256
MAX_BYTES: Final = 2**30  # of a text: it is held in memory on every rank
CHUNK: Final = 2**20

# The synthetic language: every token has four successors with these probabilities, so that its
# entropy (the lowest possible loss) is 1.06 nats, far below the log of the vocabulary.
SUCCESSORS: Final = (0.6, 0.2, 0.15, 0.05)
SYNTHETIC_VOCABULARY: Final = 512  # tokens that it uses at most: more are not learnt in few steps

Tokens = NDArray[Any]


class Corpus(ABC):
    """A source of batches."""

    def __init__(self, name: str, seq_len: int, seed: int) -> None:
        self.name = name
        self.seq_len = seq_len
        self.seed = seed

    def batch(self, step: int, global_batch_size: int, rows: range | None = None) -> Batch:
        """Return the batch of a step, or only some consecutive rows of it."""
        import torch

        from executor.data.batch import Batch

        random = np.random.default_rng((self.seed, step))
        sequences = torch.from_numpy(self._sequences(random, global_batch_size).astype(np.int64))
        whole = Batch.whole(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())
        return whole if rows is None else whole.rows(rows.start, rows.stop)

    @abstractmethod
    def _sequences(self, random: np.random.Generator, count: int) -> Tokens:
        """Return tokens, shape (count, seq_len + 1)."""


class TextCorpus(Corpus):
    """Windows at random places of one long text."""

    def __init__(self, name: str, tokens: Tokens, seq_len: int, seed: int) -> None:
        super().__init__(name, seq_len, seed)
        if len(tokens) <= seq_len:
            raise InputError(
                f"{name}: {len(tokens):,} tokens (seq_len = {seq_len:,} needs at least "
                f"{seq_len + 1:,})"
            )
        self.tokens = tokens

    def _sequences(self, random: np.random.Generator, count: int) -> Tokens:
        starts = random.integers(0, len(self.tokens) - self.seq_len, size=count)
        windows: Tokens = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)]
        return windows


class MarkovCorpus(Corpus):
    """A made-up language in which the next token depends on the last one."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        super().__init__(SYNTHETIC, seq_len, seed)
        self.vocab_size = min(vocab_size, SYNTHETIC_VOCABULARY)
        shape = (self.vocab_size, len(SUCCESSORS))
        self.successors = np.random.default_rng(seed).integers(0, self.vocab_size, size=shape)

    def _sequences(self, random: np.random.Generator, count: int) -> Tokens:
        shape = (self.seq_len + 1, count)
        choices = random.choice(len(SUCCESSORS), size=shape, p=SUCCESSORS)
        tokens = np.empty(shape, dtype=np.int64)
        tokens[0] = random.integers(0, self.vocab_size, size=count)
        for position in range(1, len(tokens)):
            tokens[position] = self.successors[tokens[position - 1], choices[position]]
        return tokens.T


def open_corpus(
    source: str, *, vocab_size: int, seq_len: int, seed: int, tokenizer: str | None = None
) -> Corpus:
    """Open ``synthetic``, a text file, or a folder of .txt files (joined in order of their names).

    Without ``tokenizer`` (a local folder) every byte is a token. Raises an InputError for what
    cannot be used.
    """
    if source == SYNTHETIC:
        if tokenizer is not None:
            raise InputError(f"tokenizer = {tokenizer}: synthetic data has no text to tokenize")
        return MarkovCorpus(vocab_size, seq_len, seed)
    if tokenizer is None and vocab_size < BYTE_VALUES:
        raise InputError(
            f"vocab_size = {vocab_size} (byte tokens need at least {BYTE_VALUES}; name a "
            f"tokenizer, or use {SYNTHETIC} data)"
        )
    text = _read(source)
    if tokenizer is None:
        return TextCorpus(source, np.frombuffer(text, dtype=np.uint8), seq_len, seed)
    tokens = _tokenize(text.decode("utf-8"), tokenizer)
    if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise InputError(
            f"{tokenizer}: gives the token {largest:,} (the model's vocab_size = {vocab_size:,} "
            f"allows 0 to {vocab_size - 1:,})"
        )
    return TextCorpus(source, tokens, seq_len, seed)


def _read(source: str) -> bytes:
    """Return the checked bytes of a file, or of all .txt files of a folder."""
    path = Path(source)
    try:
        if path.is_dir():
            files = sorted(path.rglob("*.txt"))
            if not files:
                raise InputError(f"{source}: no .txt file in this folder")
        elif path.exists():
            files = [path]
        else:
            raise InputError(
                f"{source}: no such file (a text file, a folder of .txt files, or the word "
                f"{SYNTHETIC} expected)"
            )
        size = sum(file.stat().st_size for file in files)
        if size > MAX_BYTES:
            raise InputError(f"{source}: {size:,} bytes of text (at most {MAX_BYTES:,})")
        text = b"\n".join(_read_text(file) for file in files)
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror or error}") from None
    if not text:
        raise InputError(f"{source}: is empty (a text is expected)")
    return text


def _read_text(file: Path) -> bytes:
    """Return the bytes of one file that must be UTF-8."""
    content = file.read_bytes()
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), CHUNK):
            decoder.decode(content[start : start + CHUNK])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text: {error.reason}") from None
    return content


def _tokenize(text: str, folder: str) -> Tokens:
    """Return the tokens of a text; code that comes with a tokenizer is never run."""
    if not Path(folder).is_dir():
        raise InputError(f"{folder}: no such folder (a local tokenizer is expected)")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... alike
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{folder}: no tokenizer that can be loaded: {reason}") from None
    pieces = [
        np.array(tokenizer.encode(part, add_special_tokens=False, verbose=False), dtype=np.int64)
        for part in _parts(text)
    ]
    return np.concatenate(pieces)


def _parts(text: str) -> list[str]:
    """Cut a text at line ends into parts of about CHUNK characters (long ones are slow)."""
    parts, start = [], 0
    while start < len(text):
        end = text.find("\n", start + CHUNK) + 1 or len(text)
        parts.append(text[start:end])
        start = end
    return parts
