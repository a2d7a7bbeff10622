"""Masked samples: which tokens are hidden, and that they are the same for every rank."""

from __future__ import annotations

import numpy as np
import torch

from executor.data import DataOptions, open_corpus
from executor.data.objectives import masked_tokens
from executor.data.packing import IGNORED, Row
from executor.families import FAMILIES
from executor.support import MASKED_FAMILIES

VOCAB, MASK = 1000, 999


def _row(length: int, filled: int = 0) -> Row:
    random = np.random.default_rng(0)
    tokens = random.integers(0, MASK, length + 1)
    labels = tokens[1:].copy()
    if filled:
        labels[-filled - 1 :] = IGNORED
    return Row(tokens[:-1], labels)


def test_shares_are_those_of_bert():
    row = _row(100_000)
    made = masked_tokens(VOCAB, MASK)(row, np.random.default_rng(1))
    chosen = made.labels != IGNORED
    assert abs(chosen.mean() - 0.15) < 0.005
    assert (made.labels[chosen] == row.inputs[chosen]).all()
    assert (made.inputs[~chosen] == row.inputs[~chosen]).all()
    assert abs((made.inputs[chosen] == MASK).mean() - 0.8) < 0.01
    assert abs((made.inputs[chosen] == row.inputs[chosen]).mean() - 0.1) < 0.01


def test_filling_is_never_asked_for_and_one_token_always_is():
    for seed in range(50):
        made = masked_tokens(VOCAB, MASK)(_row(6, filled=3), np.random.default_rng(seed))
        chosen = np.flatnonzero(made.labels != IGNORED)
        assert len(chosen) >= 1
        assert chosen.max() <= 3
    nothing = Row(np.zeros(4, np.int64), np.full(4, IGNORED))
    assert (masked_tokens(VOCAB, MASK)(nothing, np.random.default_rng(0)).labels == IGNORED).all()


def test_ranks_see_the_same_samples_and_the_data_has_another_identity():
    def corpus(masked: bool):
        options = DataOptions(sources=("synthetic",))
        return open_corpus(options, vocab_size=64, seq_len=32, seed=3, masked=masked)

    whole = corpus(True).batch(5, 4)
    part = corpus(True).batch(5, 4, range(2, 4))
    assert torch.equal(whole.inputs[2:], part.inputs)
    assert torch.equal(whole.labels[2:], part.labels)
    assert part.tokens == whole.tokens == int((whole.labels != IGNORED).sum())
    assert (whole.inputs == 63).any()
    assert corpus(True).fingerprint() == corpus(True).fingerprint() != corpus(False).fingerprint()


def test_the_families_are_those_of_the_descriptions():
    assert sorted(MASKED_FAMILIES) == [name for name, f in sorted(FAMILIES.items()) if f.masked]
