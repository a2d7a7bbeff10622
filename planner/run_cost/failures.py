"""Failures, checkpoints and goodput of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct, structs

from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.step_time.goodput import (
    checkpoint_bytes,
    checkpoint_interval,
    checkpoint_stall,
    goodput,
    seconds_between_failures,
    write_seconds,
)
from hardware_profiles.record import Record
from hardware_profiles.software.failures import FailureProfile, failure_profile
from planner.assessment.assess import Assessment
from planner.run_cost.prices import ABOUT_COST, ABOUT_ENERGY, Prices, accelerator_cost
from planner.run_cost.training_run import DAY, RunCost, RunRequest, StepCost, cost_of_run


def writers_of(scenario: Scenario, plan: Plan) -> tuple[int, int]:
    """Return the number of ranks that write a checkpoint, and the number of their nodes.

    Without ZeRO one replica writes the optimizer states, which all replicas have.
    """
    shards = plan.world_size // plan.dp_replicate
    ranks = plan.tensor_parallel * plan.pipeline_parallel
    writers = shards if plan.zero_stage >= 1 else ranks
    nodes = min(scenario.cluster.num_nodes, -(-writers // scenario.cluster.gpus_per_node))
    return writers, max(1, nodes)


class FailureEstimate(Record, frozen=True):
    """Failure rate, checkpoints and goodput of a plan; times in seconds."""

    seconds_between_failures: float
    restart_seconds: float
    checkpoint_bytes: float
    checkpoint_stall_seconds: float
    checkpoint_write_seconds: float
    checkpoint_interval_seconds: float
    checkpoint_every_steps: int
    goodput: float  # share of the time that is progress
    sources: Mapping[str, str]


class RunCostWithFailures(FailureEstimate, frozen=True):
    """Wall-clock time and cost of a training run with failures and checkpoints."""

    within_budget: bool | None  # None: no budget, or no price
    within_days: bool | None
    seconds: float
    failures: float  # expected number
    gpu_hours: float
    dollars: float | None
    joules: float | None
    co2_kg: float | None


class TrainingRun(Struct, frozen=True):
    """Cost of a training run without failures and with them."""

    cost: RunCost
    with_failures: RunCostWithFailures

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self.cost.to_dict(), "with_failures": self.with_failures.to_dict()}


def failure_estimate(
    scenario: Scenario, plan: Plan, failures: FailureProfile, step: float
) -> FailureEstimate:
    """Return failure rate, checkpoint interval and goodput of a plan.

    ``step``: seconds of a step; checkpoints follow a whole number of steps.
    """
    workload, accelerator = scenario.workload, scenario.cluster.accelerator
    states = OPTIMIZER_TRAITS[workload.optimizer].states * workload.state_bytes
    size = float(
        checkpoint_bytes(scenario.model.num_trainable_parameters, workload.master_bytes, states)
    )
    writers, nodes = writers_of(scenario, plan)
    storage = failures.storage_bytes_per_second_per_node.value
    written = float(write_seconds(size, nodes, storage))
    link = accelerator.host_bandwidth
    behind = link is not None and accelerator.device != "cpu"
    stall = failures.stall_seconds.value + written
    if behind and link is not None:
        copied = float(checkpoint_stall(size, writers, link.value))
        stall = failures.stall_seconds.value + min(written, copied)
    between = float(
        seconds_between_failures(failures.hours_between_failures.value, plan.world_size)
    )
    # a whole number of steps, at least until the previous checkpoint is written
    best = float(checkpoint_interval(stall, between))
    steps = max(1, round(best / step), math.ceil(written / step) if behind else 1)
    interval = steps * step
    # steps after the last completely written checkpoint are repeated
    restart = failures.restart_seconds.value + (written if behind else 0.0)
    share = float(np.asarray(goodput(interval, stall, between, restart)))
    return FailureEstimate(
        seconds_between_failures=between,
        restart_seconds=failures.restart_seconds.value,
        checkpoint_bytes=size,
        checkpoint_stall_seconds=stall,
        checkpoint_write_seconds=written,
        checkpoint_interval_seconds=interval,
        checkpoint_every_steps=steps,
        goodput=share,
        sources={
            "hours_between_failures": failures.hours_between_failures.source,
            "restart_seconds": failures.restart_seconds.source,
            "storage_bytes_per_second_per_node": failures.storage_bytes_per_second_per_node.source,
            "stall_seconds": failures.stall_seconds.source,
        },
    )


def with_failures(
    cost: RunCost, estimate: FailureEstimate, request: RunRequest
) -> RunCostWithFailures:
    """Return the cost of a run divided by its goodput."""
    share = estimate.goodput
    seconds = cost.seconds / share

    def more(value: float | None) -> float | None:
        return None if value is None else value / share

    dollars = more(cost.dollars)
    in_budget = None if request.budget is None or dollars is None else dollars <= request.budget
    return RunCostWithFailures(
        **structs.asdict(estimate),
        within_budget=in_budget,
        within_days=None if request.days is None else seconds <= request.days * DAY,
        seconds=seconds,
        failures=seconds / estimate.seconds_between_failures,
        gpu_hours=cost.gpu_hours / share,
        dollars=dollars,
        joules=more(cost.joules),
        co2_kg=more(cost.co2_kg),
    )


def training_run(
    scenario: Scenario, plan: Plan, request: RunRequest, step: StepCost
) -> TrainingRun | None:
    """Return the cost of a training run without and with failures; None if none is requested."""
    if not request.is_given:
        return None
    profile = request.failures or failure_profile()
    estimate = failure_estimate(scenario, plan, profile, step.seconds)
    cost = cost_of_run(request, step, estimate.goodput)
    return None if cost is None else TrainingRun(cost, with_failures(cost, estimate, request))


def failure_notes(request: RunRequest) -> list[str]:
    """Return the assumptions about failures and checkpoints, with their sources."""
    profile = request.failures or failure_profile()
    return [
        f"{profile.hours_between_failures.value:,.0f} hours between failures of one accelerator "
        f"({profile.hours_between_failures.source})",
        f"{profile.restart_seconds.value / 60:g} minutes to start again "
        f"({profile.restart_seconds.source})",
        f"{profile.stall_seconds.value:g} seconds that a checkpoint stops training, in addition to "
        f"the copy to the host ({profile.stall_seconds.kind})",
        f"{profile.storage_bytes_per_second_per_node.value / 1e9:g} GB/s to storage from every "
        f"node ({profile.storage_bytes_per_second_per_node.source})",
        "checkpoints at the optimal interval (Daly), copied to the host, written during training",
    ]


def training_run_with_notes(
    scenario: Scenario, plan: Plan, assessment: Assessment, request: RunRequest, prices: Prices
) -> tuple[TrainingRun | None, list[str]]:
    """Return the training run of one plan and its assumptions; nothing if none is requested."""
    if not request.is_given:
        return None, []
    rate = accelerator_cost(scenario.cluster, prices)
    seconds = assessment.time.step_seconds
    step = StepCost(seconds, scenario.workload.tokens_per_step, plan.world_size, rate)
    notes = [*rate.notes, *([ABOUT_COST] if rate.notes else [])]
    notes += [ABOUT_ENERGY] if rate.watts is not None else []
    return training_run(scenario, plan, request, step), [*notes, *failure_notes(request)]
