"""Tensors that several pipeline stages hold a copy of, whose gradients are added up once a step.

A tied embedding is on the first stage and on the last; with an encoder and a decoder also where the
decoder begins. What the layers of a stack share (``LayerKind.shared``) is on every stage that has
some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cost_models.model.spec import ModelSpec, Weight


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """One of them, under its name in the whole model."""

    weight: Weight
    stages: tuple[int, ...]  # at least two
    layers: tuple[int, ...]  # in each of these stages the first that reads it; (): none does


def shared_tensors(
    model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]
) -> tuple[SharedTensor, ...]:
    """Return the tensors that more than one stage holds, in a fixed order."""
    return tuple(shared for shared in _shared(model, layer_ranges) if len(shared.stages) > 1)


def bridge_stage(model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]) -> int | None:
    """Return the stage in which the decoder begins; None without a bridge."""
    layer = model.bridge_layer
    if layer is None:
        return None
    return next(s for s, (first, last) in enumerate(layer_ranges) if first <= layer < last)


def tied_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """Return the tensor that is both the embedding of tokens and the output projection."""
    return tuple(w for w in model.embedding if w.cut == "vocab")[:1]


def _shared(model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]) -> Iterator[SharedTensor]:
    if model.tie_embeddings:
        bridge = bridge_stage(model, layer_ranges)
        stages = {0, len(layer_ranges) - 1} | ({bridge} if bridge is not None else set())
        for weight in tied_weights(model):
            yield SharedTensor(weight, tuple(sorted(stages)), ())
    stacks = [model.kinds[kind].stack for kind in model.pattern]
    of_kinds = [kind.shared for kind in model.kinds]
    for layer, kind in enumerate(model.pattern):
        for weight in of_kinds[kind]:
            full = replace(weight, name=f"{model.layer_prefixes[layer]}.{weight.name}")
            readers = {
                stage: stacks[first:last].index(stacks[layer]) + first
                for stage, (first, last) in enumerate(layer_ranges)
                if stacks[layer] in stacks[first:last]
            }
            yield SharedTensor(full, tuple(readers), tuple(readers.values()))


def times_sent(ranks: set[int], rank: int) -> int:
    """Return how often a rank sends a shared tensor's gradient, on its way up the ranks and back.

    >>> [times_sent({0, 1, 3}, rank) for rank in range(4)]
    [1, 2, 0, 1]
    """
    if rank not in ranks or len(ranks) == 1:
        return 0
    return int(rank > min(ranks)) + int(rank < max(ranks))
