"""A rule that says which plans cannot exist, and what rules ask of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from cost_models.model.spec import Attention, ModelSpec
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Question:
    """What the rules need beside the plan."""

    model: ModelSpec
    workload: Workload
    num_gpus: int
    largest_zero_stage: int = 3  # of the trainer
    splits_backward: bool = True  # the trainer does
    layer_ranges: tuple[tuple[int, int], ...] | None = None  # stages that are pinned
    stage_recompute_layers: tuple[int, ...] | None = None  # of each stage, instead of the plan's
    fp8_whole_matrices: bool = True  # the trainer multiplies in 8 bits only what is not cut
    short_pipelines: bool = False  # the trainer runs 1F1B with fewer micro-batches than ranks
    autocasts_weights: bool = False  # the trainer has fp32 weights, all of which it trains

    @property
    def in_fp8(self) -> bool:
        """Whether matmuls are in 8 bits, of a trainer that knows no others."""
        return self.workload.precision == "fp8" and self.fp8_whole_matrices

    def smallest_stage(self, num_stages: Any) -> Any:
        """Layers of the smallest stage: of the pinned ones, else of even ones."""
        if self.layer_ranges is not None:
            return min(last - first for first, last in self.layer_ranges)
        return self.model.num_layers // num_stages


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its code, when a row breaks it, and the words with the values of one plan."""

    code: str
    broken: Callable[[Question, PlanTable], Any]
    words: Callable[[Question, Plan], str]


def adapts_experts(question: Question) -> bool:
    """Whether adapters are asked for beside every matrix, those of routed experts among them."""
    workload = question.workload
    experts = any(kind.feed_forward.num_experts for kind in question.model.kinds)
    return workload.adapter != "none" and experts and workload.adapter_targets == "all"


def freezes_autocast(question: Question) -> bool:
    """Whether weights stand still that autocast would cast anew at every use."""
    workload = question.workload
    return question.autocasts_weights and (workload.adapter != "none" or bool(workload.freeze))


def too_long(question: Question) -> bool:
    """Whether the sequence is longer than the learned positions."""
    longest = question.model.max_seq_len
    return (
        question.model.max_seq_len_is_hard
        and longest is not None
        and question.workload.seq_len > longest
    )


def attentions(model: ModelSpec) -> list[Attention]:
    """Return every kind of attention of a model."""
    found = [kind.attention for kind in model.kinds]
    return found + [kind.cross_attention for kind in model.kinds if kind.cross_attention]


def indivisible(sizes: list[int], ranks: Any) -> Any:
    """Return where some size does not divide evenly; without sizes: nowhere."""
    broken = [size % ranks != 0 for size in sizes]
    return any_of([np.zeros(len(ranks), dtype=bool), *broken])


def any_of(flags: Iterable[Any]) -> Any:
    """Return where some of the flags is true."""
    return reduce(np.logical_or, flags)


def query_heads(model: ModelSpec) -> list[int]:
    """Return num_heads of every kind of attention."""
    return [a.num_heads for a in attentions(model)]


def key_heads(model: ModelSpec) -> list[int]:
    """Return num_kv_heads of every kind of attention; of latent attention those of its keys."""
    return [a.num_kv_heads for a in attentions(model)]


def divisors_text(sizes: list[int]) -> str:
    """Return the common divisors of some sizes, as words of an error.

    >>> divisors_text([12, 8])
    '1, 2, 4'
    """
    common = int(np.gcd.reduce(sizes))
    legal = [d for d in range(1, min(common, 1024) + 1) if common % d == 0]
    return ", ".join(str(d) for d in legal)


def ffn_sizes(model: ModelSpec) -> list[int]:
    """Return the widths of dense MLPs and of shared experts."""
    dense = [kind for kind in model.kinds if not kind.feed_forward.num_experts]
    sizes = [kind.feed_forward.ffn_hidden_size for kind in dense]
    sizes += [kind.feed_forward.shared_ffn_hidden_size for kind in model.kinds]
    return [size for size in sizes if size]


def num_experts(model: ModelSpec) -> list[int]:
    """Return how many experts each kind of layer has, where it has any."""
    counts = [kind.feed_forward.num_experts for kind in model.kinds]
    return [count for count in counts if count]


def expert_sizes(model: ModelSpec) -> list[int]:
    """Return the widths of routed experts."""
    return [k.feed_forward.ffn_hidden_size for k in model.kinds if k.feed_forward.num_experts]
