"""Stages of a user's own: how many layers each one has, in the order of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from cost_models.model.spec import ModelSpec
from hardware_profiles.errors import InputError

Ranges = tuple[tuple[int, int], ...]


def stage_ranges(layers: str | Sequence[int], model: ModelSpec) -> Ranges:
    """Read ``3,5,5,3`` into the layers [first, last) of each stage; every layer is in one."""
    counts = _counts(layers)
    text = ",".join(str(count) for count in counts)
    if sum(counts) != model.num_layers:
        raise InputError(
            f"layers = {text}: {sum(counts)} in all, but {model.name} has {model.num_layers} "
            f"(must add up to {model.num_layers})"
        )
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def layers_option(ranges: Ranges) -> str:
    """Return the option that gives such stages.

    >>> layers_option(((0, 3), (3, 8)))
    '--layers 3,5'
    """
    return "--layers " + ",".join(str(last - first) for first, last in ranges)


def _counts(layers: str | Sequence[int]) -> list[int]:
    words: Sequence[Any] = layers.split(",") if isinstance(layers, str) else layers
    shown = layers if isinstance(layers, str) else ",".join(map(str, words))
    wrong = InputError(
        f"layers = {shown[:60]} (must be the layers of every stage, each a whole number from 1, "
        "such as 3,5,5,3)"
    )
    try:
        counts = [int(word) if isinstance(word, str) else word for word in words]
    except ValueError:
        raise wrong from None
    if not counts or any(type(n) is not int or n < 1 for n in counts):
        raise wrong
    return counts
