"""Scenario of a traced module of unknown layers: legal plans and their assessment.

Plans consist of data parallelism, ZeRO, replicas, recomputation and the micro-batch size; all other
options are errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from cost_models.memory.allocator import untypical_bytes
from cost_models.memory.outside_torch import outside_bytes
from cost_models.memory.parts import MemoryParts
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import RECOMPUTE
from cost_models.plan.workload import Workload
from cost_models.pricing.prediction import MEMORY_PARTS, TIME_PARTS
from cost_models.step_time.parts import TimeParts
from cost_models.traced.memory import OPTIMIZER_STEP, traced_memory
from cost_models.traced.module import OUTSIDE, TracedModule
from cost_models.traced.time import pass_flops, traced_time
from cost_models.uncertainty import MEMORY, peak_interval
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from hardware_profiles.record import Record, to_json
from hardware_profiles.software.trainer import SoftwareProfile
from planner.assessment.assess import MemoryAssessment, amounts
from planner.assessment.verdict import memory_budget, verdict
from planner.request.divisors import divisors

VARIED: Final = names_in("""
    data_parallel dp_replicate zero_stage recompute micro_batch_size num_microbatches
""")


@dataclass(frozen=True, slots=True)
class TracedScenario:
    """Traced module, cluster, software and workload."""

    module: TracedModule
    cluster: Cluster
    software: SoftwareProfile
    workload: Workload  # seq_len is not used

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step."""
        return self.workload.global_batch_size

    @property
    def on_gpu(self) -> bool:
        """Whether the cluster has accelerators other than CPU processes."""
        return self.cluster.accelerator.device != "cpu"

    def workload_document(self) -> dict[str, Any]:
        """Return the workload as plain JSON values."""
        return {
            "global_batch_size": self.global_batch_size,
            "precision": self.module.precision,
            "optimizer": self.workload.optimizer,
            "inputs": dict(self.module.inputs),
        }


def with_batch(scenario: TracedScenario, batch: int) -> TracedScenario:
    """Return the scenario with another global batch."""
    return replace(scenario, workload=replace(scenario.workload, global_batch_size=batch))


def refuse_structure(options: Mapping[str, Any], name: str) -> None:
    """Raise an InputError for the first option that needs known layers."""
    default = Plan()
    for option, value in options.items():
        if option in VARIED or value == getattr(default, option):
            continue
        raise InputError(
            f"{option} = {value}: what is inside {name} is not known, so it is laid out over data "
            f"ranks only (must be {getattr(default, option)})"
        )
    recompute = options.get("recompute", "none")
    if recompute not in ("none", "full"):
        raise InputError(
            f"recompute = {recompute}: what {name} computes is not known (must be none or full)"
        )


def why_illegal(scenario: TracedScenario, plan: Plan) -> str | None:
    """Return why a plan is illegal, in words; None if it is legal."""
    ranks, batch = scenario.cluster.num_gpus, scenario.global_batch_size
    if plan.data_parallel != ranks:
        return f"data_parallel = {plan.data_parallel}, but there are {ranks} ranks"
    if plan.global_batch_size != batch:
        return (
            f"micro_batch_size {plan.micro_batch_size} x num_microbatches {plan.num_microbatches} "
            f"x data_parallel {plan.data_parallel} = {plan.global_batch_size}, but "
            f"global_batch_size is {batch}"
        )
    if plan.zero_stage and ranks == 1:
        return f"zero_stage = {plan.zero_stage} shards over data ranks: it needs at least 2"
    if plan.data_parallel % plan.dp_replicate:
        return f"dp_replicate = {plan.dp_replicate} does not divide data_parallel = {ranks}"
    if plan.dp_replicate > 1 and not plan.zero_stage:
        return (
            f"dp_replicate = {plan.dp_replicate} makes copies of shards: it needs zero_stage >= 1"
        )
    if plan.recompute not in scenario.module.passes:
        return f"recompute = {plan.recompute}: {scenario.module.name} has no lists of blocks"
    return None


def candidates(scenario: TracedScenario, fixed: Mapping[str, Any]) -> list[Plan]:
    """Return all legal plans with the pinned fields."""
    ranks = scenario.cluster.num_gpus
    share = scenario.global_batch_size // ranks
    node = scenario.cluster.tiers[0].domain_size
    copies = [1, ranks // node] if 1 < node < ranks and ranks % node == 0 else [1]

    def wanted(name: str, values: list[Any]) -> list[Any]:
        return [fixed[name]] if name in fixed else values

    grid = itertools.product(
        wanted("zero_stage", [0] if ranks == 1 else [0, 1, 2, 3]),
        wanted("dp_replicate", copies),
        wanted("recompute", [name for name in RECOMPUTE if name in scenario.module.passes]),
        wanted("micro_batch_size", divisors(share) if share else []),
    )
    found = []
    for zero, replicas, recompute, micro in grid:
        plan = Plan(
            data_parallel=fixed.get("data_parallel", ranks),
            zero_stage=zero,
            dp_replicate=replicas,
            recompute=recompute,
            micro_batch_size=micro,
            num_microbatches=fixed.get("num_microbatches", max(1, share // micro)),
        )
        if why_illegal(scenario, plan) is None:
            found.append(plan)
    return found


@dataclass(frozen=True, slots=True)
class TracedMemory:
    """Peak memory of one accelerator with its interval and its parts, in bytes."""

    peak_bytes: float
    low_bytes: float
    high_bytes: float
    moment: str  # part of the step with the peak
    parts: MemoryParts


@dataclass(frozen=True, slots=True)
class TracedTime:
    """Step time in seconds and rates; without an interval, since it is not validated by runs."""

    step_seconds: float
    parts: TimeParts
    rows_per_second_per_gpu: float
    mfu: float | None  # model FLOP utilisation; None: peak unknown

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "step_seconds": self.step_seconds,
            "low_seconds": None,
            "high_seconds": None,
            "parts": amounts(self.parts),
            "rows_per_second_per_gpu": self.rows_per_second_per_gpu,
            "tokens_per_second_per_gpu": None,
            "mfu": self.mfu,
        }


@dataclass(frozen=True, slots=True)
class TracedAssessment(MemoryAssessment[TracedMemory]):
    """Predicted memory and time of one legal plan of a traced module, and whether it fits."""

    time: TracedTime

    def row(self) -> dict[str, Any]:
        """Return the plan and its figures as one row of a table, in SI units."""
        return {
            **only_varied(self.plan),
            **self.memory_row,
            "step_seconds": self.time.step_seconds,
            "rows_per_second_per_gpu": self.time.rows_per_second_per_gpu,
            "mfu": self.time.mfu,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON values of plan, memory and time."""
        return {
            "plan": self.plan.to_dict(),
            "memory": {**self.verdict_document(), **to_json(self.memory)},
            "time": self.time.to_dict(),
        }


def assess_traced(scenario: TracedScenario, plans: list[Plan]) -> list[TracedAssessment]:
    """Return the assessments of legal plans."""
    if not plans:
        return []
    table = PlanTable.from_plans(plans)
    parts, moments = traced_memory(
        scenario.module, scenario.workload, scenario.software, table, scenario.cluster
    )
    times = traced_time(
        scenario.module, scenario.workload, scenario.cluster, scenario.software, table
    )
    peaks, steps = np.asarray(parts.peak), np.asarray(times.step)
    budget = memory_budget(scenario.cluster.accelerator)
    typical = peaks
    if scenario.cluster.accelerator.device != "cpu":
        free = parts.runtime - outside_bytes(scenario.software, scenario.cluster, table)
        typical = peaks - untypical_bytes(scenario.software, table, free)
    found = []
    for row, plan in enumerate(plans):
        peak = float(peaks[row])
        low, high = peak_interval(peak, float(typical[row]), MEMORY)
        memory = TracedMemory(
            peak_bytes=peak,
            low_bytes=low,
            high_bytes=high,
            moment=_moment(scenario.module, plan, int(moments[row])),
            parts=MemoryParts(**{name: float(getattr(parts, name)[row]) for name in MEMORY_PARTS}),
        )
        seconds = TimeParts(**{name: float(getattr(times, name)[row]) for name in TIME_PARTS})
        time = _time(scenario, plan, float(steps[row]), seconds)
        found.append(TracedAssessment(plan, verdict(low, high, budget.size), budget, memory, time))
    return found


def _moment(module: TracedModule, plan: Plan, place: int) -> str:
    """Return the name of the part of the step with the peak."""
    if place == OPTIMIZER_STEP:
        return "optimizer"
    segment = module.passes[plan.recompute].segments[place]
    where = "outside of blocks" if segment.block == OUTSIDE else module.block_names[segment.block]
    return f"{segment.phase}: {where}"


def _time(scenario: TracedScenario, plan: Plan, step: float, parts: TimeParts) -> TracedTime:
    """Return step time and rates."""
    plain = scenario.module.passes["none"]
    flops = sum(
        pass_flops(one, plan.micro_batch_size) * plan.num_microbatches
        for one in (plain.forward, plain.backward)
    )
    peak = scenario.cluster.accelerator.peak_flops.get(scenario.module.precision)
    return TracedTime(
        step_seconds=step,
        parts=parts,
        rows_per_second_per_gpu=plan.micro_batch_size * plan.num_microbatches / step,
        mfu=None if peak is None else float(flops / (step * peak.value)),
    )


class TracedCounts(Record, frozen=True):
    """Numbers of plans in a search, by verdict."""

    enumerated: int
    too_large: int
    tight: int
    fitting: int


def only_varied(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that vary for traced modules."""
    return {f.name: getattr(plan, f.name) for f in fields(plan) if f.name in VARIED}
