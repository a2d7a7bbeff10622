"""Micro-batch size and checkpointing of rows whose source does not give them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.uncertainty import peak_interval, verdict_spread
from planner.assessment.verdict import budget_bytes, verdict
from planner.validation.reading import Reading

COLUMN = "micro_batch_size"


def with_usual_checkpointing(reading: Reading, scenario: Scenario, plan: Plan) -> Plan:
    """Return the plan with full recomputation where it does not fit without, and fits so.

    For trainers that recompute by a switch which the row does not state. "Does not fit" is the
    verdict: the whole interval lies above the budget.
    """
    again = replace(plan, recompute="full")
    priced = price(scenario, PlanTable.from_plans([plan, again]))
    spread = verdict_spread(scenario.software.name, scenario.cluster.num_gpus)
    kept, computed = (
        verdict(*peak_interval(float(peak), float(typical), spread), budget_bytes(scenario.cluster))
        for peak, typical in zip(priced.peak, priced.typical_peak, strict=True)
    )
    if kept != "does_not_fit" or computed == "does_not_fit":
        return plan
    reading.defaults.append("recompute full (default: it does not fit without)")
    return again


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
