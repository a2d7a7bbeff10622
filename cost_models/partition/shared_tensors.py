"""Tensors of which several pipeline stages have a copy, and whose gradients they sum once a step.

A tied embedding is on the first and the last stage, and with an encoder and a decoder also where
the decoder begins. The tables that layers of a stack share (``LayerKind.shared_tables``) are on
every stage with layers of that stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import Struct

from cost_models.model.spec import ModelSpec, Weight


class SharedTensor(Struct, frozen=True):
    """A tensor on several stages, under its name in the whole model."""

    weight: Weight
    stages: tuple[int, ...]  # at least two
    layers: tuple[
        int, ...
    ]  # the first layer of each of these stages that reads it; () if no layer does


def shared_tensors(
    model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]
) -> tuple[SharedTensor, ...]:
    """Return the tensors of which more than one stage has a copy, in a fixed order."""
    return tuple(shared for shared in _shared(model, layer_ranges) if len(shared.stages) > 1)


def bridge_stage(model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]) -> int | None:
    """Return the stage in which the decoder begins; None without a decoder."""
    layer = model.bridge_layer
    if layer is None:
        return None
    return next(s for s, (first, last) in enumerate(layer_ranges) if first <= layer < last)


def tied_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """Return the tensor that is both token embedding and output projection."""
    return tuple(w for w in model.embedding if w.sharding == "vocab")[:1]


def _shared(model: ModelSpec, layer_ranges: Sequence[tuple[int, int]]) -> Iterator[SharedTensor]:
    if model.tie_embeddings:
        bridge = bridge_stage(model, layer_ranges)
        stages = {0, len(layer_ranges) - 1} | ({bridge} if bridge is not None else set())
        for weight in tied_weights(model):
            yield SharedTensor(weight, tuple(sorted(stages)), ())
    if not any(kind.stack for kind in model.kinds):
        return
    stacks = [model.kinds[kind].stack for kind in model.pattern]
    of_kinds = [kind.shared_tables for kind in model.kinds]
    for layer, kind in enumerate(model.pattern):
        for weight in of_kinds[kind]:
            full = replace(weight, name=f"{model.layer_prefixes[layer]}.{weight.name}")
            readers = {
                stage: stacks[first:last].index(stacks[layer]) + first
                for stage, (first, last) in enumerate(layer_ranges)
                if stacks[layer] in stacks[first:last]
            }
            yield SharedTensor(full, tuple(readers), tuple(readers.values()))


def gradient_sends(ranks: set[int], rank: int) -> int:
    """Return how often a rank sends a shared tensor's gradient: along the ranks and back.

    >>> [gradient_sends({0, 1, 3}, rank) for rank in range(4)]
    [1, 2, 0, 1]
    """
    if rank not in ranks or len(ranks) == 1:
        return 0
    return int(rank > min(ranks)) + int(rank < max(ranks))
