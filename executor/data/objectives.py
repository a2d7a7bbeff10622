"""Training objectives other than next-token prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from executor.data.packing import IGNORED, TokenSequence

# shares of masked language modelling (Devlin et al., arXiv:1810.04805, sec. 3.1)
CHOSEN: Final = 0.15  # of the tokens are predicted
HIDDEN: Final = 0.8  # of these are replaced by the mask token
RANDOM: Final = 0.1  # by a random token; the others are unchanged


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """Masked language modelling: predicts a random subset of the tokens (at least one)."""

    vocab_size: int
    mask_token: int

    def __call__(self, row: TokenSequence, random: np.random.Generator) -> TokenSequence:
        """Return the row with masked inputs; labels of all other tokens are ignored."""
        real = _real(row)
        chosen = real & (random.random(len(real)) < CHOSEN)
        if real.any() and not chosen.any():
            chosen[random.choice(np.flatnonzero(real))] = True
        fate = random.random(len(real))
        any_token = random.integers(0, self.vocab_size, len(real))
        inputs = np.where(chosen & (fate < HIDDEN), self.mask_token, row.inputs)
        replaced = chosen & (fate >= HIDDEN) & (fate < HIDDEN + RANDOM)
        inputs = np.where(replaced, any_token, inputs)
        return TokenSequence(inputs, np.where(chosen, row.inputs, IGNORED), row.starts)


# Raffel et al. (arXiv:1910.10683), sec. 3.1.4
CORRUPTED: Final = 0.15  # of the tokens are removed
MEAN_SPAN: Final = 3  # tokens
PAD: Final = 0  # pads the source, and is the first input of the decoder


@dataclass(frozen=True, slots=True)
class CorruptedSpans:
    """Span corruption.

    The source is the sample without some spans, the target consists of these spans.

    Sentinels count down from ``sentinel``. A sentinel replaces each span in the source and precedes
    it in the target; one more sentinel ends the target.
    """

    sentinel: int
    target_seq_len: int = field(default=0, repr=False)  # 0: the row's length

    def __call__(self, row: TokenSequence, random: np.random.Generator) -> TokenSequence:
        """Return the source as inputs and the target as labels, each padded to its length."""
        size, length = len(row.inputs), self.target_seq_len or len(row.inputs)
        tokens = row.inputs[: int(_real(row).sum())]
        inputs, labels = np.full(size, PAD, np.int64), np.full(length, IGNORED, dtype=np.int64)
        if len(tokens):
            source, target = self._split(tokens, random)
            target = target[:length]  # would be longer for samples of one or two tokens
            inputs[: len(source)], labels[: len(target)] = source, target
        return TokenSequence(inputs, labels)

    def _split(
        self, tokens: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        removed, spans = span_sizes(len(tokens))
        outs = _composition(removed, spans, random)
        # tokens that remain: before each span, and after the last one (possibly none)
        stays = _composition(len(tokens) - removed + 1, spans + 1, random)
        stays[-1] -= 1
        source, target, place = [], [], 0
        for number, (stay, out) in enumerate(zip(stays[:-1], outs, strict=True)):
            mark = np.array([self.sentinel - number])
            source += [tokens[place : place + stay], mark]
            target += [mark, tokens[place + stay : place + stay + out]]
            place += int(stay + out)
        end = np.array([self.sentinel - spans])
        return np.concatenate([*source, tokens[place:]]), np.concatenate([*target, end])


def span_sizes(length: int) -> tuple[int, int]:
    """Return the number of tokens that are removed from ``length`` tokens, and the number of spans.

    >>> span_sizes(512), span_sizes(4), span_sizes(1)
    ((77, 26), (1, 1), (1, 1))
    """
    removed = max(1, round(CORRUPTED * length))
    return removed, max(1, round(removed / MEAN_SPAN))


def _composition(total: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """Return a uniformly random composition of ``total`` into ``parts`` positive integers."""
    if parts > total:  # a sample of one token: no tokens before its span
        return np.array([0] * (parts - total) + [1] * total)
    cuts = np.sort(random.choice(total - 1, size=parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def _real(row: TokenSequence) -> np.ndarray:
    """Return which tokens belong to a document; padding follows all of them."""
    counted = np.flatnonzero(row.labels != IGNORED)
    end = counted[-1] + 2 if len(counted) else 0  # the last label is the token after it
    return np.arange(len(row.inputs)) < end
