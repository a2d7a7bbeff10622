"""The type of a legality rule, and the properties of a scenario that several rules read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import numpy as np
from msgspec import Struct

from cost_models.model.spec import Attention, ModelSpec
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import MIXED, Workload
from cost_models.scenario import Scenario
from hardware_profiles.software.trainer import SoftwareProfile


class Rule(Struct, frozen=True):
    """A rule: its code, the rows of a plan table that break it, and the error text of one plan."""

    code: str
    broken: Callable[[Scenario, PlanTable], Any]
    words: Callable[[Scenario, Plan], str]


def adapts_experts(scenario: Scenario) -> bool:
    """Whether adapters are requested for every matrix, including those of routed experts."""
    workload = scenario.workload
    experts = any(kind.feed_forward.num_experts for kind in scenario.model.kinds)
    return workload.adapter != "none" and experts and workload.adapter_targets == "all"


def multiplies_in_fp32(
    workload: Workload, software: SoftwareProfile, plans: Plan | PlanTable
) -> Any:
    """Whether ranks multiply fp32 weights that sharding alone would cast (``needed_to_cast``)."""
    cast = software.sharding.needed_to_cast and workload.precision in MIXED
    if not (cast and workload.master_weights):
        return np.zeros(np.shape(plans.world_size), dtype=bool)
    return (plans.data_parallel * plans.context_parallel == 1) & (plans.world_size > 1)


def freezes_autocast(scenario: Scenario) -> bool:
    """Whether autocast meets frozen weights, which it would cast again at every use."""
    workload = scenario.workload
    frozen = workload.adapter != "none" or bool(workload.freeze)
    software = scenario.software
    return software.precision.autocasts_weights and frozen and not software.frozen.in_fp32


def too_long(scenario: Scenario) -> bool:
    """Whether the sequence is longer than the table of learned positions."""
    longest = scenario.model.max_seq_len
    return (
        scenario.model.max_seq_len_is_hard
        and longest is not None
        and scenario.workload.seq_len > longest
    )


def attentions(model: ModelSpec) -> list[Attention]:
    """Return every kind of attention of a model."""
    found = [kind.attention for kind in model.kinds]
    return found + [kind.cross_attention for kind in model.kinds if kind.cross_attention]


def indivisible(sizes: list[int], ranks: Any) -> Any:
    """Return the rows at which ``ranks`` does not divide every size; none without sizes."""
    broken = [size % ranks != 0 for size in sizes]
    return any_of([np.zeros(len(ranks), dtype=bool), *broken])


def any_of(flags: Iterable[Any]) -> Any:
    """Return the rows at which at least one flag is true."""
    return reduce(np.logical_or, flags)


def query_heads(model: ModelSpec) -> list[int]:
    """Return num_heads of every kind of attention."""
    return [a.num_heads for a in attentions(model)]


def key_heads(model: ModelSpec) -> list[int]:
    """Return num_kv_heads of every kind of attention; for latent attention, those of its keys."""
    return [a.num_kv_heads for a in attentions(model)]


def divisors_text(sizes: list[int]) -> str:
    """Return the common divisors of some sizes, as text for an error.

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
    """Return the number of experts of each kind of layer that has experts."""
    counts = [kind.feed_forward.num_experts for kind in model.kinds]
    return [count for count in counts if count]


def expert_sizes(model: ModelSpec) -> list[int]:
    """Return the widths of routed experts."""
    return [k.feed_forward.ffn_hidden_size for k in model.kinds if k.feed_forward.num_experts]
