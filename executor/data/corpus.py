"""Batches as a function of the data, the seed and the step only.

Every parallel layout, and the single process that a run is compared with, therefore trains on the
same tokens; each rank reads only its own rows; and a resumed run continues with the next sample.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from executor.config.data_options import SYNTHETIC
from executor.data.order import Indices, Mixture, epochs, key_of
from executor.data.packing import IGNORED, Samples, TokenSequence
from hardware_profiles.errors import InputError

if TYPE_CHECKING:
    from executor.data.batch import Batch

# Transition probabilities of the Markov chain; each token has four successors. Its entropy (the
# lowest possible loss) is 1.06 nats, far below the logarithm of the vocabulary size.
SUCCESSORS: Final = (0.6, 0.2, 0.15, 0.05)
SYNTHETIC_VOCABULARY: Final = 512  # largest vocabulary that a model learns in a few steps

# An objective other than next-token prediction transforms the row of a sample; the generator's
# state depends on the seed and the position of the sample only.
Objective = Callable[[TokenSequence, np.random.Generator], TokenSequence]


class Corpus(ABC):
    """A source of batches."""

    skipped_rows = 0
    notes: tuple[str, ...] = ()  # caveats for readers of the results
    objective: Objective | None = None
    target_seq_len = 0  # of the labels; 0: seq_len

    def __init__(self, name: str, seq_len: int, seed: int) -> None:
        self.name = name
        self.seq_len = seq_len
        self.seed = seed

    def batch(self, step: int, global_batch_size: int, rows: range | None = None) -> Batch:
        """Return the global batch of a step, or a range of its rows."""
        first = step * global_batch_size
        places = np.arange(first, first + global_batch_size, dtype=np.int64)
        return self._batch(places, rows or range(global_batch_size), shuffled=True)

    def evaluation(
        self, global_batch_size: int, rows: range | None = None, *, batches: int | None = None
    ) -> Iterator[Batch]:
        """Yield every sample once, in the order of the data; every call yields the same batches.

        The last batch is padded with rows of ignored labels. ``batches``: the largest number to
        yield.
        """
        whole = -(-self.count // global_batch_size)
        for number in range(whole if batches is None else min(whole, batches)):
            first = number * global_batch_size
            places = np.arange(first, min(self.count, first + global_batch_size), dtype=np.int64)
            yield self._batch(places, rows or range(global_batch_size), shuffled=False)

    def identity(self) -> dict[str, Any]:
        """Return everything that the batches depend on, as JSON values; excludes paths."""
        found = {**self._identity(), "seq_len": self.seq_len, "seed": self.seed}
        if self.target_seq_len:
            found["target_seq_len"] = self.target_seq_len
        return found if self.objective is None else {**found, "objective": str(self.objective)}

    def fingerprint(self) -> str:
        """Return a short hash of the identity."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def summary(self) -> dict[str, Any]:
        """Return the description of the data in run.json."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint(),
            "samples": self.count,
            "skipped_rows": self.skipped_rows,
            "identity": self.identity(),
        }

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of samples in an epoch, and in an evaluation."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]: ...

    @abstractmethod
    def _samples(self, places: Indices, *, shuffled: bool) -> Any:
        """Return the samples at positions of the training or evaluation order."""

    @abstractmethod
    def _rows(self, samples: Any, here: slice) -> list[TokenSequence]:
        """Return the rows of a slice of the samples."""

    @abstractmethod
    def _counted(self, samples: Any) -> int:
        """Return the number of labels of all samples that are not ignored."""

    def _batch(self, places: Indices, rows: range, *, shuffled: bool) -> Batch:
        import torch

        from executor.data.batch import Batch

        samples = self._samples(places, shuffled=shuffled)
        here = slice(rows.start, min(rows.stop, len(places)))
        if self.objective is None:
            made, tokens = self._rows(samples, here), self._counted(samples)
        else:
            every = self._rows(samples, slice(None))
            every = [self._with_objective(r, int(p)) for r, p in zip(every, places, strict=True)]
            made, tokens = every[here], sum(int((r.labels != IGNORED).sum()) for r in every)
        shape, targets = (len(rows), self.seq_len), (len(rows), self.target_seq_len or self.seq_len)
        inputs, labels = np.zeros(shape, np.int64), np.full(targets, IGNORED, dtype=np.int64)
        starts = None
        if any(row.starts is not None for row in made):
            starts = np.zeros(shape, np.int64)
        for number, row in enumerate(made):
            inputs[number], labels[number] = row.inputs, row.labels
            if starts is not None and row.starts is not None:
                starts[number] = row.starts
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(labels),
            tokens,
            None if starts is None else torch.from_numpy(starts),
            rows.start,
        )

    def _with_objective(self, row: TokenSequence, place: int) -> TokenSequence:
        assert self.objective is not None
        return self.objective(row, np.random.default_rng(key_of("objective", self.seed, place)))


class TokenCorpus(Corpus):
    """Samples of token files: of all files, or a weighted mixture of groups of files."""

    def __init__(
        self,
        name: str,
        groups: Sequence[Sequence[Samples]],
        seed: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(name, groups[0][0].seq_len, seed)
        self.parts = [samples for group in groups for samples in group]
        self.skipped_rows = sum(part.file.header.skipped_rows for part in self.parts)
        self.notes = tuple(_notes(self.parts, self.skipped_rows))
        self._bounds = np.cumsum([0, *(part.count for part in self.parts)])
        ends = np.cumsum([len(group) for group in groups])
        self._groups = np.stack([[0, *self._bounds[ends[:-1]]], self._bounds[ends]])
        self._mixture = None if weights is None else Mixture.of(tuple(weights), seed)

    @property
    def count(self) -> int:
        """Number of samples in all files."""
        return int(self._bounds[-1])

    def _identity(self) -> dict[str, Any]:
        mixture = None if self._mixture is None else list(self._mixture.counts)
        return {
            "packing": self.parts[0].packing,
            "files": [
                {
                    "sha256": part.file.header.sha256,
                    "tokens": part.file.header.tokens,
                    "documents": part.file.header.documents,
                    "vocabulary": part.file.header.vocabulary_fingerprint,
                }
                for part in self.parts
            ],
            "mixture": mixture,
        }

    def _samples(self, places: Indices, *, shuffled: bool) -> Indices:
        if not shuffled:
            return places
        if self._mixture is None:
            return epochs(places, self.count, self.seed)
        found = np.empty_like(places)
        sources, inner = self._mixture(places)
        for source, (first, end) in enumerate(self._groups.T):
            here = sources == source
            seed = key_of(self.seed, source)
            found[here] = first + epochs(inner[here], int(end - first), seed)
        return found

    def _rows(self, samples: Indices, here: slice) -> list[TokenSequence]:
        return [self.parts[part].row(int(sample)) for part, sample in self._located(samples[here])]

    def _counted(self, samples: Indices) -> int:
        parts = self._part(samples)
        return sum(
            self.parts[part].counted(samples[parts == part] - self._bounds[part])
            for part in np.unique(parts)
        )

    def _part(self, samples: Indices) -> Indices:
        return np.searchsorted(self._bounds, samples, "right") - 1

    def _located(self, samples: Indices) -> Iterator[tuple[int, int]]:
        parts = self._part(samples)
        return zip(parts, samples - self._bounds[parts], strict=True)


class MarkovCorpus(Corpus):
    """Synthetic text: a first-order Markov chain over the tokens."""

    count = 1024  # samples of an evaluation; training data is unlimited

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        super().__init__(SYNTHETIC, seq_len, seed)
        self.vocab_size = min(vocab_size, SYNTHETIC_VOCABULARY)
        shape = (self.vocab_size, len(SUCCESSORS))
        self.successors = np.random.default_rng(seed).integers(0, self.vocab_size, size=shape)

    def _identity(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "files": []}

    def _samples(self, places: Indices, *, shuffled: bool) -> list[int]:
        kind = "train" if shuffled else "evaluation"
        return [key_of(kind, self.seed, int(place)) for place in places]

    def _rows(self, samples: list[int], here: slice) -> list[TokenSequence]:
        return [self._row(np.random.default_rng(key)) for key in samples[here]]

    def _row(self, random: np.random.Generator) -> TokenSequence:
        choices = random.choice(len(SUCCESSORS), size=self.seq_len + 1, p=SUCCESSORS).tolist()
        token = int(random.integers(0, self.vocab_size))
        successors, tokens = self.successors.tolist(), [token]
        for choice in choices[1:]:
            token = successors[token][choice]
            tokens.append(token)
        found = np.array(tokens, dtype=np.int64)
        return TokenSequence(found[:-1], found[1:])

    def _counted(self, samples: list[int]) -> int:
        return len(samples) * self.seq_len


def require_same(saved: Mapping[str, Any], corpus: Corpus) -> None:
    """Raise an InputError if a resumed run would continue with different data."""
    own = corpus.identity()
    for name in dict.fromkeys([*saved, *own]):
        before, now = saved.get(name), own.get(name)
        if json.dumps(before, sort_keys=True) != json.dumps(now, sort_keys=True):
            raise InputError(
                f"{corpus.name}: differs from the data at the start of the run: {name} was "
                f"{_short(before)}, is {_short(now)}"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= 60:
        return text
    return f"{text[:48]}… (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _notes(parts: Sequence[Samples], skipped_rows: int) -> Iterator[str]:
    if skipped_rows:
        yield f"{skipped_rows:,} bad rows of the data were skipped"
    if cut := sum(part.cut_documents for part in parts):
        documents = sum(part.file.header.documents for part in parts)
        yield (
            f"{cut:,} of {documents:,} documents are longer than seq_len + 1 tokens: only their "
            "beginnings are used (--packing none)"
        )
