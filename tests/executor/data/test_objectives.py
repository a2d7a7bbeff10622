"""Masked samples: which tokens are hidden, and that they are the same for every rank."""

import numpy as np
import pytest
import torch

from executor.data import DataOptions, open_corpus
from executor.data.objectives import PAD, CorruptedSpans, MaskedTokens, span_sizes
from executor.data.packing import IGNORED, TokenSequence
from executor.model.families import FAMILIES
from executor.support import MASKED_FAMILIES, SPAN_FAMILIES
from hardware_profiles.errors import InputError

VOCAB, MASK = 1000, 999


def _row(length: int, filled: int = 0) -> TokenSequence:
    random = np.random.default_rng(0)
    tokens = random.integers(0, MASK, length + 1)
    labels = tokens[1:].copy()
    if filled:
        labels[-filled - 1 :] = IGNORED
    return TokenSequence(tokens[:-1], labels)


def test_shares_are_those_of_bert():
    row = _row(100_000)
    made = MaskedTokens(VOCAB, MASK)(row, np.random.default_rng(1))
    chosen = made.labels != IGNORED
    assert abs(chosen.mean() - 0.15) < 0.005
    assert (made.labels[chosen] == row.inputs[chosen]).all()
    assert (made.inputs[~chosen] == row.inputs[~chosen]).all()
    assert abs((made.inputs[chosen] == MASK).mean() - 0.8) < 0.01
    assert abs((made.inputs[chosen] == row.inputs[chosen]).mean() - 0.1) < 0.01


def test_filling_is_never_asked_for_and_one_token_always_is():
    for seed in range(50):
        made = MaskedTokens(VOCAB, MASK)(_row(6, filled=3), np.random.default_rng(seed))
        chosen = np.flatnonzero(made.labels != IGNORED)
        assert len(chosen) >= 1
        assert chosen.max() <= 3
    nothing = TokenSequence(np.zeros(4, np.int64), np.full(4, IGNORED))
    assert (MaskedTokens(VOCAB, MASK)(nothing, np.random.default_rng(0)).labels == IGNORED).all()


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
    found = [name for name, f in sorted(FAMILIES.items()) if f.encoder_decoder]
    assert sorted(SPAN_FAMILIES) == found


def _put_back(made: TokenSequence) -> list[int]:
    """Return the tokens that source and target together hold."""
    spans: dict[int, list[int]] = {}
    for token in made.labels[made.labels != IGNORED].tolist():
        if token > 1000:
            spans[token] = current = []
        else:
            current.append(token)
    found = []
    for token in made.inputs[made.inputs != PAD].tolist():
        found += spans[token] if token > 1000 else [token]
    return found


@pytest.mark.parametrize(("length", "filled"), [(3, 0), (5, 3), (20, 7), (512, 0)])
def test_source_and_target_hold_every_token_once(length: int, filled: int):
    row = _row(length, filled)
    row.inputs[:] = row.inputs.clip(1)
    real = length if not filled else length - filled
    for seed in range(20):
        made = CorruptedSpans(2000)(row, np.random.default_rng(seed))
        assert made.inputs.shape == made.labels.shape == row.inputs.shape
        assert _put_back(made) == row.inputs[:real].tolist()
        removed, spans = span_sizes(real)
        target = made.labels[made.labels != IGNORED]
        assert len(target) == min(length, removed + spans + 1)
        marks = [t for t in target.tolist() if t > 1000]
        assert marks == [2000 - n for n in range(len(marks))]


def test_shares_are_those_of_t5():
    removed, spans = span_sizes(100_000)
    assert removed == 15_000
    assert spans == 5_000
    nothing = TokenSequence(np.zeros(4, np.int64), np.full(4, IGNORED))
    made = CorruptedSpans(2000)(nothing, np.random.default_rng(0))
    assert (made.labels == IGNORED).all()


def _spans(**options: object):
    sizes = {"vocab_size": 64, "seq_len": 32, "seed": 3, **options}
    return open_corpus(DataOptions(sources=("synthetic",)), **sizes, spans=True)  # type: ignore[arg-type]


def test_every_rank_takes_the_same_spans_out():
    whole, part = _spans().batch(5, 4), _spans().batch(5, 4, range(2, 4))
    assert torch.equal(whole.inputs[2:], part.inputs)
    assert torch.equal(whole.labels[2:], part.labels)
    assert part.tokens == whole.tokens == int((whole.labels != IGNORED).sum())
    assert (whole.labels[:, 0] == 63).all()


def test_what_spans_cannot_be_taken_out_of():
    with pytest.raises(InputError, match=r"64 sentinels \(seq_len = 2,048 needs 103"):
        _spans(seq_len=2048)
    options = DataOptions(sources=("nowhere",), packing="documents")
    with pytest.raises(InputError, match="span corruption does not support"):
        open_corpus(options, vocab_size=300, seq_len=32, seed=0, spans=True)
