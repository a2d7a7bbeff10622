"""Micro-batch size of rows whose source does not give it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from planner.assessment.verdict import budget_bytes
from planner.validation.reading import Reading

COLUMN = "micro_batch_size"


def with_usual_micro_batch(reading: Reading, scenario: Scenario, plan: Plan) -> Plan:
    """Return the plan with the micro-batch size that its author most likely used.

    Without a pipeline: the largest of 1, 2, 4 ... sequences that fits, since smaller micro-batches
    only add time. With a pipeline: one sequence, which gives the shortest bubble. A size given in
    the row is kept.
    """
    if reading.row.get(COLUMN) is not None:
        return plan
    if plan.pipeline_parallel > 1 or reading.row.get("global_batch_size") is None:
        reading.value(COLUMN, plan.micro_batch_size, "one sequence")
        return plan
    sequences = plan.micro_batch_size * plan.num_microbatches  # of a data rank
    sizes = [1]
    while sequences % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    plans = [
        replace(plan, micro_batch_size=size, num_microbatches=sequences // size) for size in sizes
    ]
    fits = price(scenario, PlanTable.from_plans(plans)).peak <= budget_bytes(scenario.cluster)
    largest = int(np.flatnonzero(fits)[-1]) if np.any(fits) else 0
    reading.value(COLUMN, sizes[largest], "the largest that fits, without a pipeline")
    return plans[largest]
