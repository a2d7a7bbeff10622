"""Order of samples: shuffled epochs and weighted mixtures, computed without state.

The sample at every position follows from the seed alone. A run that resumes at step N reads the
same samples as an uninterrupted one, and every rank can compute its own rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
ROUNDS: Final = 6  # of the Feistel network; 4 give a pseudorandom permutation (Luby, Rackoff 1988)
BLOCK: Final = 1000  # samples in which the shares of a mixture are exact


def key_of(*parts: Any) -> int:
    """Return a 63-bit hash of the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def permuted(places: Indices, count: int, key: int) -> Indices:
    """Return the samples at ``places`` of a pseudorandom permutation of ``count`` samples.

    A Feistel network permutes the next power of four. Results >= ``count`` are permuted again until
    they are smaller (cycle walking), at most four times on average.
    """
    half = max(1, (max(1, count - 1).bit_length() + 1) // 2)
    found = _feistel(places.astype(np.uint64), half, key)
    outside = found >= count
    while outside.any():
        found[outside] = _feistel(found[outside], half, key)
        outside = found >= count
    return found.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, key: int) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (_mixed(right, key_of(key, turn)) & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Hash numbers with the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).

    It overflows.
    """
    z = values + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def epochs(places: Indices, count: int, seed: int) -> Indices:
    """Return the samples at places of consecutive epochs; each epoch has its own shuffle."""
    found = np.empty_like(places)
    rounds = places // count
    for epoch in np.unique(rounds):
        here = rounds == epoch
        found[here] = permuted(places[here] % count, count, key_of("epoch", seed, int(epoch)))
    return found


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws from several sources; every block of BLOCK samples has exactly the same shares."""

    counts: tuple[int, ...]  # of each source in a block of BLOCK samples
    seed: int

    @classmethod
    def of(cls, weights: tuple[float, ...], seed: int) -> Mixture:
        """Round weights to whole samples of a block (largest remainders), at least one each."""
        exact = np.array(weights) / sum(weights) * BLOCK
        counts = np.maximum(1, np.floor(exact)).astype(int)
        while (missing := BLOCK - counts.sum()) != 0:
            step = 1 if missing > 0 else -1
            gain = np.where((counts > 1) | (step > 0), step * (exact - counts), -np.inf)
            counts[int(gain.argmax())] += step
        return cls(tuple(int(count) for count in counts), seed)

    def __call__(self, places: Indices) -> tuple[Indices, Indices]:
        """Return the source of every place, and the index among the samples of that source."""
        sources, inner = np.empty_like(places), np.empty_like(places)
        blocks = places // BLOCK
        for block in np.unique(blocks):
            here = blocks == block
            key = key_of("mixture", self.seed, int(block))
            order = permuted(np.arange(BLOCK), BLOCK, key)
            of_place = np.repeat(np.arange(len(self.counts)), self.counts)[order]
            rank = np.empty(BLOCK, dtype=np.int64)
            for source, count in enumerate(self.counts):
                rank[of_place == source] = int(block) * count + np.arange(count)
            sources[here] = of_place[places[here] % BLOCK]
            inner[here] = rank[places[here] % BLOCK]
        return sources, inner
