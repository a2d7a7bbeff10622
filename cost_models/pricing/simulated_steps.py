"""Seconds of steps whose pipelines are simulated action by action.

All else is as in the closed form (``estimate.price``), of which the bubble is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from cost_models.partition.schedules import stages_of_rank
from cost_models.plan.plan import Plan, PlanTable, Schedule
from cost_models.pricing.estimate import (
    PipelineSeconds,
    PredictionTable,
    block_time,
    seconds_by_pipeline,
)
from cost_models.scenario import Scenario
from cost_models.step_time.pipeline_bound import owners
from cost_models.step_time.pipeline_simulation import StageSeconds, makespan

Floats = NDArray[np.float64]
PASSES = ("forward_pass", "backward_pass", "weights")
ROUNDING: Final = 1e-12  # within which a simulated step is its bound


def with_simulated_steps(
    scenario: Scenario,
    table: PlanTable,
    priced: PredictionTable,
    seconds: Sequence[PipelineSeconds] | None = None,
) -> PredictionTable:
    """Return predictions with simulated bubbles in place of their lower bounds.

    ``seconds``: those of all ranks, where they are known (``price_with_ranks``).
    """
    piped = np.flatnonzero(table.pipeline_parallel > 1)
    if len(piped) == 0:
        return priced
    least = priced.step[piped]
    if seconds is None:
        steps = simulated_steps(scenario, table.rows(piped))
    else:
        steps = _simulated_steps(scenario, table, seconds)[piped]
    found = above(least, steps)
    bubble = np.array(priced.time.bubble, dtype=float)
    bubble[piped] += found - least
    return replace(priced, time=replace(priced.time, bubble=bubble))


def above(least: Floats, found: Floats) -> Floats:
    """Return simulated steps, or their lower bounds where both are equal within rounding."""
    steps: Floats = np.where(found <= (1.0 + ROUNDING) * least, least, found)
    return steps


def simulated_steps(scenario: Scenario, table: PlanTable) -> Floats:
    """Return the seconds of a step of every plan.

    Stages of one rank take equal shares of its time.
    """
    return _simulated_steps(scenario, table, seconds_by_pipeline(scenario, table))


def _simulated_steps(
    scenario: Scenario, table: PlanTable, by_pipeline: Iterable[PipelineSeconds]
) -> Floats:
    steps = np.empty(len(table))
    for rows, positions, seconds in by_pipeline:
        few = table.rows(rows)
        passes = np.stack(
            [
                [np.broadcast_to(getattr(each, name), len(rows)) for each in seconds]
                for name in PASSES
            ]
        )
        owner = owners(positions)
        bound = np.array([_pipeline(few.plan(i), passes[:, owner, i]) for i in range(len(rows))])
        time, _ = block_time(scenario, few, positions, seconds, bound)
        steps[rows] = time.step
    return steps


def _pipeline(plan: Plan, passes: Floats) -> float:
    """Return the seconds of a pipeline; ``passes``: (kinds, ranks)."""
    shape = plan.pipeline_schedule, plan.pipeline_parallel, plan.virtual_stages
    return _simulated(*shape, plan.num_microbatches, passes.tobytes())


@lru_cache(maxsize=8192)  # plans that share a pipeline's times
def _simulated(
    schedule: Schedule, pipeline: int, virtual: int, microbatches: int, passes: bytes
) -> float:
    plan = Plan(
        pipeline_parallel=pipeline,
        virtual_stages=virtual,
        pipeline_schedule=schedule,
        num_microbatches=microbatches,
    )
    return makespan(plan, *stage_seconds(plan, np.frombuffer(passes).reshape(-1, pipeline)))


def stage_seconds(plan: Plan, passes: Floats) -> StageSeconds:
    """Return the seconds of every stage: equal shares of its rank's; ``passes``: (kinds, ranks)."""
    by_stage = np.zeros((len(PASSES), plan.num_stages))
    for rank in range(plan.pipeline_parallel):
        for stage in stages_of_rank(plan, rank):
            by_stage[:, stage] = passes[:, rank] / plan.virtual_stages
    return StageSeconds(*by_stage.tolist())
