"""What a sample asks for, where that is not the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from executor.data.corpus import Objective
from executor.data.packing import IGNORED, Row

# of the tokens that are to be predicted (Devlin et al., arXiv:1810.04805, sec. 3.1)
CHOSEN: Final = 0.15
HIDDEN: Final = 0.8  # become the mask token
RANDOM: Final = 0.1  # become any token; the others stay as they are


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """Hides some tokens of a sample, which are to be predicted; at least one."""

    vocab_size: int
    mask_token: int

    def __call__(self, row: Row, random: np.random.Generator) -> Row:
        """Return the row with hidden tokens."""
        real = _real(row)
        chosen = real & (random.random(len(real)) < CHOSEN)
        if real.any() and not chosen.any():
            chosen[random.choice(np.flatnonzero(real))] = True
        fate = random.random(len(real))
        any_token = random.integers(0, self.vocab_size, len(real))
        inputs = np.where(chosen & (fate < HIDDEN), self.mask_token, row.inputs)
        replaced = chosen & (fate >= HIDDEN) & (fate < HIDDEN + RANDOM)
        inputs = np.where(replaced, any_token, inputs)
        return Row(inputs, np.where(chosen, row.inputs, IGNORED), row.starts)


def masked_tokens(vocab_size: int, mask_token: int) -> Objective:
    """Return the objective of masked language models."""
    return MaskedTokens(vocab_size, mask_token)


def _real(row: Row) -> np.ndarray:
    """Return which tokens belong to a document: what fills a sequence up follows them all."""
    counted = np.flatnonzero(row.labels != IGNORED)
    end = counted[-1] + 2 if len(counted) else 0  # the last label is the token behind it
    return np.arange(len(row.inputs)) < end
