"""Step times of a table of plans without their memory, and lower bounds on faster machines.

The formulas are those of ``estimate.price``; a test holds both to the same seconds.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import among
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import Floats, block_time, seconds_by_pipeline
from cost_models.scenario import Scenario


def step_times(scenario: Scenario, table: PlanTable) -> tuple[Floats, Floats, Floats]:
    """Return seconds of legal plans: the step, its lower bound, what lies outside the passes.

    The bound is the part of a step that never grows on a faster machine: its value there is a lower
    bound of the step here. Outside the passes are exposed data-parallel communication and the
    optimizer. Stages: those of the scenario, else even ones.

    A faster machine shortens computation, waits and communication of every plan. It may lengthen
    the bubble of a schedule that splits the backward pass, where weight gradients become shorter
    than the gaps they fill: such bubbles are left out of the second column.
    """
    seconds, least, once = (np.empty(len(table)) for _ in range(3))
    for rows, positions, of_ranks in seconds_by_pipeline(scenario, table):
        few = table.rows(rows)
        parts, _ = block_time(scenario, few, positions, of_ranks)
        splits = among(few.pipeline_schedule, SPLIT_CODES)
        seconds[rows] = parts.step
        least[rows] = np.where(splits, parts.step - parts.bubble, parts.step)
        once[rows] = parts.data_communication + parts.optimizer
    return seconds, least, once
