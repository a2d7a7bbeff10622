"""Techniques that shardplan prices: the part of the search space that each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cost_models.plan.plan import SCHEDULES
from cost_models.scenario import Scenario
from planner.request.divisors import divisors
from planner.search.space import MIN_TOKENS

ALONE: Final = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}
DATA: Final = {**ALONE, "expert_parallel": 1}


class Technique(NamedTuple):
    """A technique, as pins and constraints of a search."""

    name: str
    title: str
    fixed: Mapping[str, Any]
    require: str = ""
    searched: bool = True  # ``plan`` tries it without being asked to
    variants: tuple[Mapping[str, Any], ...] = ({},)  # further pins, each of a search of its own
    note: str = ""


SCHEDULE_TITLES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zero_bubble": "zero bubble ZB-H1",
    "interleaved_zero_bubble": "interleaved ZB",
    "zbv": "zero bubble ZB-V",
    "dualpipev": "DualPipe-V",
}
NOTES: Final = {"1f1b": "as PipeDream-Flush"}


def techniques_of(scenario: Scenario) -> list[Technique]:
    """Return the techniques to price for a scenario, each alone or with data parallelism."""
    plain = {"offload": "none"}
    return [
        Technique("all", "all together (plan)", {}),
        Technique("ddp", "data parallel (DDP)", {**DATA, **plain, "zero_stage": 0}),
        *(
            Technique(f"zero{stage}", title, {**DATA, **plain, "zero_stage": stage})
            for stage, title in ((1, "ZeRO-1"), (2, "ZeRO-2"), (3, "ZeRO-3, FSDP"))
        ),
        Technique("hsdp", "HSDP", {**DATA, **plain, "zero_stage": 3}, "dp_replicate>=2"),
        _zero_plus_plus(scenario),
        _offloaded("zero_offload", "ZeRO-Offload", 2, "optimizer", "cpu"),
        _offloaded("zero_infinity", "ZeRO-Infinity (NVMe)", 3, "weights", "nvme"),
        *(
            Technique(name, title, {**without(DATA, "tensor_parallel"), **on}, "tp>=2")
            for name, title, on in (
                ("tensor", "tensor parallel (1D)", {"sequence_parallel": False}),
                ("tensor_sequence", "tensor + sequence", {"sequence_parallel": True}),
            )
        ),
        Technique(
            "context",
            "context parallel",
            without(DATA, "context_parallel"),
            "cp>=2",
            variants=tuple({"context_parallel": ranks} for ranks in _contexts(scenario)),
        ),
        *(
            Technique(
                name,
                SCHEDULE_TITLES[name],
                {**without(DATA, "pipeline_parallel"), "pipeline_schedule": name},
                "pp>=2",
                note=NOTES.get(name, ""),
            )
            for name in SCHEDULES
        ),
        Technique("experts", "expert parallel", ALONE, "ep>=2"),
    ]


def without(fixed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return pins without one of them."""
    return {key: value for key, value in fixed.items() if key != name}


def _contexts(scenario: Scenario) -> list[int]:
    """Return context-parallel degrees: the smallest, and those that ``plan`` would try."""
    several = [number for number in divisors(scenario.world_size) if number > 1]
    long = [ranks for ranks in several if scenario.workload.seq_len >= ranks * MIN_TOKENS]
    return long or several[:1]


def _zero_plus_plus(scenario: Scenario) -> Technique:
    """Return ZeRO++ with its three parts, the secondary copy in a node."""
    cluster = scenario.cluster
    several = cluster.num_nodes > 1 and cluster.gpus_per_node > 1
    fixed = {
        **DATA,
        "zero_stage": 3,
        "quantised_weights": True,
        "quantised_gradients": True,
        "secondary_ranks": cluster.gpus_per_node if several else 1,
    }
    return Technique("zero_plus_plus", "ZeRO++", fixed, searched=False)


def _offloaded(name: str, title: str, stage: int, what: str, device: str) -> Technique:
    fixed = {**DATA, "zero_stage": stage, "offload": what, "offload_device": device}
    return Technique(name, title, fixed, searched=False)
