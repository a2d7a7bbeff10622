"""What failures and checkpoints make of a whole run, as plain JSON values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cost_models.memory.optimizer_states import RULES
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
from hardware_profiles.software.failures import FailureProfile, failure_profile
from planner.assessment.assess import Assessment
from planner.run_cost.prices import ABOUT_COST, ABOUT_ENERGY, Prices, tariff
from planner.run_cost.training_run import DAY, RunRequest, StepCost, job_document


def writers_of(scenario: Scenario, plan: Plan) -> tuple[int, int]:
    """Return how many ranks write a part of a checkpoint, and on how many nodes they are.

    Without ZeRO one replica writes what all of them hold.
    """
    shards = plan.world_size // plan.dp_replicate
    ranks = plan.tensor_parallel * plan.pipeline_parallel
    writers = shards if plan.zero_stage >= 1 else ranks
    nodes = min(scenario.cluster.num_nodes, -(-writers // scenario.cluster.gpus_per_node))
    return writers, max(1, nodes)


def failing_document(
    scenario: Scenario, plan: Plan, failures: FailureProfile, step: float
) -> dict[str, Any]:
    """Return how often a job fails, when it saves, and which share of its time is progress.

    ``step``: seconds of a step, of which a checkpoint follows a whole number.
    """
    workload, accelerator = scenario.workload, scenario.cluster.accelerator
    states = RULES[workload.optimizer].states * workload.state_bytes
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
    # whole steps; none is due before the last one is on the disk
    best = float(checkpoint_interval(stall, between))
    steps = max(1, round(best / step), math.ceil(written / step) if behind else 1)
    interval = steps * step
    # what a checkpoint that is not yet on the disk would have saved is computed again
    restart = failures.restart_seconds.value + (written if behind else 0.0)
    share = float(np.asarray(goodput(interval, stall, between, restart)))
    return {
        "seconds_between_failures": between,
        "restart_seconds": failures.restart_seconds.value,
        "checkpoint_bytes": size,
        "checkpoint_stall_seconds": stall,
        "checkpoint_write_seconds": written,
        "checkpoint_interval_seconds": interval,
        "checkpoint_every_steps": steps,
        "goodput": share,
        "sources": {
            "hours_between_failures": failures.hours_between_failures.source,
            "restart_seconds": failures.restart_seconds.source,
            "storage_bytes_per_second_per_node": failures.storage_bytes_per_second_per_node.source,
            "stall_seconds": failures.stall_seconds.source,
        },
    }


def with_failures(
    job: dict[str, Any], failing: dict[str, Any], asked: RunRequest
) -> dict[str, Any]:
    """Return a whole run's figures divided by its goodput: what it takes by the clock."""
    share = failing["goodput"]
    seconds = job["seconds"] / share

    def more(name: str) -> float | None:
        return None if job[name] is None else job[name] / share

    dollars = more("dollars")
    in_budget = None if asked.budget is None or dollars is None else dollars <= asked.budget
    return {
        **failing,
        "within_budget": in_budget,
        "within_days": None if asked.days is None else seconds <= asked.days * DAY,
        "seconds": seconds,
        "failures": seconds / failing["seconds_between_failures"],
        "gpu_hours": job["gpu_hours"] / share,
        "dollars": dollars,
        "joules": more("joules"),
        "co2_kg": more("co2_kg"),
    }


def whole_run(
    scenario: Scenario, plan: Plan, job: RunRequest, step: StepCost
) -> dict[str, Any] | None:
    """Return what a whole run takes without failures, and under ``with_failures`` by the clock."""
    if not job.is_asked:
        return None
    failing = failing_document(scenario, plan, job.failures or failure_profile(), step.seconds)
    assessment = job_document(job, step, failing["goodput"])
    if assessment is None:
        return None
    return {**assessment, "with_failures": with_failures(assessment, failing, job)}


def failure_notes(job: RunRequest) -> list[str]:
    """Say what the figures of failures stand on."""
    profile = job.failures or failure_profile()
    return [
        f"{profile.hours_between_failures.value:,.0f} hours between failures of one accelerator "
        f"({profile.hours_between_failures.source})",
        f"{profile.restart_seconds.value / 60:g} minutes to start again "
        f"({profile.restart_seconds.source})",
        f"{profile.stall_seconds.value:g} seconds that a checkpoint stops training beside the copy "
        f"to the host ({profile.stall_seconds.kind})",
        f"{profile.storage_bytes_per_second_per_node.value / 1e9:g} GB/s to storage from every "
        f"node ({profile.storage_bytes_per_second_per_node.source})",
        "checkpoints as often as loses least (Daly), copied to the host, written behind training",
    ]


def run_of(
    scenario: Scenario, plan: Plan, assessment: Assessment, job: RunRequest, prices: Prices
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a whole run of one plan, and what it stands on; nothing where none was asked for."""
    if not job.is_asked:
        return None, []
    rate = tariff(scenario.cluster, prices)
    seconds = assessment.time.step_seconds
    step = StepCost(seconds, scenario.workload.tokens_per_step, plan.world_size, rate)
    said = [*rate.notes, *([ABOUT_COST] if rate.notes else [])]
    said += [ABOUT_ENERGY] if rate.watts is not None else []
    return whole_run(scenario, plan, job, step), [*said, *failure_notes(job)]
