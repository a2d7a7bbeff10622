"""What a sample asks for, where that is not the next token."""

from __future__ import annotations

from typing import Final

import numpy as np

from executor.data.corpus import Objective
from executor.data.packing import IGNORED, Row

# of the tokens that are to be predicted (Devlin et al., arXiv:1810.04805, sec. 3.1)
CHOSEN: Final = 0.15
HIDDEN: Final = 0.8  # become the mask token
RANDOM: Final = 0.1  # become any token; the others stay as they are


def masked_tokens(vocab_size: int, mask_token: int) -> Objective:
    """Hide some tokens of a sample, which are to be predicted; at least one where there are any."""

    def hide(row: Row, random: np.random.Generator) -> Row:
        counts = np.ones(len(row.inputs), dtype=bool)
        # what fills a sequence up follows its last label that counts (the last token's own label
        # is the first token behind the sequence)
        counted = np.flatnonzero(row.labels != IGNORED)
        if len(counted):
            counts[counted[-1] + 2 :] = False
        chosen = counts & (random.random(len(counts)) < CHOSEN)
        if counts.any() and not chosen.any():
            chosen[random.choice(np.flatnonzero(counts))] = True
        fate = random.random(len(counts))
        inputs = np.where(chosen & (fate < HIDDEN), mask_token, row.inputs)
        others = random.integers(0, vocab_size, len(counts))
        replaced = chosen & (fate >= HIDDEN) & (fate < HIDDEN + RANDOM)
        inputs = np.where(replaced, others, inputs)
        return Row(inputs, np.where(chosen, row.inputs, IGNORED), row.starts)

    return hide
