"""Samples of one token file: sequences of ``seq_len`` tokens and their labels.

concat     all documents concatenated, split every seq_len tokens
documents  like concat, but each document attends only to itself, its positions start at 0, and no
           token predicts the first token of the next document
none       one document per sequence, truncated or padded to seq_len tokens (labels ignored)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from executor.data.order import Indices
from executor.data.token_file import TokenFile
from hardware_profiles.errors import InputError

IGNORED: Final = -100  # label of tokens without a loss, as in torch and transformers

Numbers = NDArray[np.int64]


@dataclass(slots=True)
class TokenSequence:
    """One sequence of a batch; the fields are those of ``batch.Batch``."""

    inputs: Numbers  # (seq_len,)
    labels: Numbers
    starts: Numbers | None = None


class Samples:
    """The sequences of one token file; a sample depends on its number only."""

    def __init__(self, file: TokenFile, seq_len: int, packing: str, vocab_size: int) -> None:
        self.file, self.seq_len, self.packing = file, seq_len, packing
        self.vocab_size = vocab_size
        header = file.header
        if header.largest >= vocab_size:
            self._refuse(header.largest)
        self.count = header.documents
        if packing != "none":
            self.count = (header.tokens - 1) // seq_len
        if not self.count:
            raise InputError(
                f"{file.name}: {header.tokens:,} tokens (seq_len = {seq_len:,} needs at least "
                f"{seq_len + 1:,}; --packing none pads sequences)"
            )

    def row(self, sample: int) -> TokenSequence:
        """Return one sample."""
        first, stop = (int(bound) for bound in self._bounds(np.array([sample]))[:, 0])
        tokens = np.asarray(self.file.tokens[first:stop]).astype(np.int64)
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            self._refuse(largest)
        inputs = np.zeros(self.seq_len, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        length = min(len(tokens), self.seq_len)
        inputs[:length] = tokens[:length]
        labels[: len(tokens) - 1] = tokens[1:]
        if self.packing != "documents":
            return TokenSequence(inputs, labels)
        ends = self._ends(first, first + self.seq_len)
        labels[ends - 1] = IGNORED
        begins = np.zeros(self.seq_len, dtype=np.int64)
        inner = ends[ends < self.seq_len]
        begins[inner] = inner
        return TokenSequence(inputs, labels, np.maximum.accumulate(begins))

    def counted(self, samples: Indices) -> int:
        """Return the number of labels that are not ignored, without reading the tokens."""
        first, stop = self._bounds(samples)
        if self.packing != "documents":
            return int(np.maximum(0, stop - first - 1).sum())
        last = first + self.seq_len
        ends = self.file.ends
        documents = np.searchsorted(ends, last, "right") - np.searchsorted(ends, first, "right")
        return int(self.seq_len * len(samples) - documents.sum())

    @property
    def cut_documents(self) -> int:
        """Number of documents that are truncated."""
        if self.packing != "none":
            return 0
        longest, before, found = self.seq_len + 1, 0, 0
        for start in range(0, len(self.file.ends), 2**20):
            ends = np.asarray(self.file.ends[start : start + 2**20]).astype(np.int64)
            found += int((np.diff(ends, prepend=before) > longest).sum())
            before = int(ends[-1])
        return found

    def _bounds(self, samples: Indices) -> Numbers:
        """Return the first token of each sample, and the first one after it; shape (2, samples)."""
        if self.packing != "none":
            first = samples * self.seq_len
            return np.stack([first, first + self.seq_len + 1])
        ends: Any = self.file.ends
        first = np.where(samples > 0, ends[np.maximum(samples - 1, 0)].astype(np.int64), 0)
        stop = ends[samples].astype(np.int64)
        return np.stack([first, np.minimum(stop, first + self.seq_len + 1)])

    def _ends(self, first: int, last: int) -> Numbers:
        """Return the document ends within tokens (first, last], relative to ``first``."""
        ends: Any = self.file.ends
        low, high = np.searchsorted(ends, [first, last], "right")
        return np.asarray(ends[low:high]).astype(np.int64) - first

    def _refuse(self, token: int) -> None:
        raise InputError(
            f"{self.file.name}: token {token:,} (the model's vocab_size = {self.vocab_size:,} "
            f"allows 0 to {self.vocab_size - 1:,})"
        )
