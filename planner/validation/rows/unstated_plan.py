"""Micro-batch size and checkpointing of rows whose source does not give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.uncertainty import TYPICAL_MEMORY, peak_interval, verdict_spread, widened
from hardware_profiles.errors import InputError
from planner.assessment.verdict import Verdict, budget_bytes, memory_budget, verdict
from planner.validation.rows.cluster import smaller_accelerator
from planner.validation.rows.model import is_typical
from planner.validation.rows.reading import Reading
from planner.validation.rows.runs_file import Row
from planner.validation.rows.trainer import compared_trainer
from planner.validation.rows.vocabulary import ANYWHERE, terms_of
from planner.validation.rows.words import look_up, words_table

COLUMN = "micro_batch_size"
# settings that a peak hangs on, as texts of assumed ones begin. Of the known runs said to fit, 2 %
# ran out of memory with none of them assumed, 6 % with one, 9 % with two, 26 % (12 of 47, from 9
# sources) with more
DECISIVE: Final = (
    "recompute ",
    "attention ",
    "precision ",
    "optimizer ",
    "adapters of rank ",
    f"{COLUMN} ",
)
MOST_ASSUMED: Final = 2  # of them, in a row that is said to fit


def may_checkpoint(row: Row, plan: Plan) -> bool:
    """Whether layers may be computed again, of a trainer with a switch for it that is not stated.

    Of the sources of runs under Hugging Face's Trainer that state ``gradient_checkpointing``, two
    in three turn it on.
    """
    if row.recompute is not None or plan.recompute != "none":
        return False
    denied = "not recompute" in terms_of(row, ANYWHERE)
    return not denied and "hugging face" in terms_of(row, "framework")


def checkpointed_otherwise(plan: Plan) -> Plan:
    """Return a plan without recomputation with full recomputation, or the other way round."""
    return replace(plan, recompute="full" if plan.recompute == "none" else "none")


def row_verdict(
    row: Row, defaults: Sequence[str], scenario: Scenario, peak: float, typical: float
) -> Verdict:
    """Return the verdict on a row's plan, for its cautious and its typical peak in bytes.

    TIGHT where it hangs on memory of the accelerator that the row does not give, and for FITS
    where more than ``MOST_ASSUMED`` settings are assumed.
    """
    trainer = compared_trainer(row, scenario.software.name)
    experts = scenario.model.has_experts
    assumed = assumed_settings(defaults)
    spread = verdict_spread(trainer, assumed=assumed > 0, experts=experts)
    ends = peak_interval(peak, typical, spread)
    if is_typical(defaults):
        ends = widened(ends, TYPICAL_MEMORY)
    found, smaller = verdict(*ends, budget_bytes(scenario.cluster)), smaller_accelerator(row)
    if smaller is not None and verdict(*ends, memory_budget(smaller).size) != found:
        return "tight"
    return "tight" if found == "fits" and assumed > MOST_ASSUMED else found


def assumed_settings(defaults: Sequence[str]) -> int:
    """Return how many settings that a peak hangs on are assumed.

    >>> assumed_settings(["attention flash (default: not given)", "zero_stage 0 (default: none)"])
    1
    """
    assumed = [text for text in defaults if "(default: " in text]
    return sum(any(text.startswith(name) for text in assumed) for name in DECISIVE)


def with_usual_checkpointing(reading: Reading, scenario: Scenario, plan: Plan) -> Plan:
    """Return the plan with full recomputation where it does not fit without, and fits so."""
    again = checkpointed_otherwise(plan)
    return _that_fits(reading, scenario, plan, again, "recompute full")


def with_usual_sequence_parallelism(reading: Reading, scenario: Scenario, plan: Plan) -> Plan:
    """Return the plan with Megatron's sequence parallelism where it fits with it alone.

    Of rows that say nothing of it: a switch of Megatron-LM, off by default.
    """
    row, named = reading.row, terms_of(reading.row, "framework").keys()
    entry = look_up(words_table().sequence_parallelism, row)
    unsaid = row.sequence_parallel is None and entry is not None and entry.usual
    if not unsaid or not named & {"megatron", "megatron core"}:
        return plan
    if plan.tensor_parallel == 1 or plan.sequence_parallel:
        return plan
    parallel = replace(plan, sequence_parallel=True)
    return _that_fits(reading, scenario, plan, parallel, "sequence_parallel True")


def _that_fits(reading: Reading, scenario: Scenario, plan: Plan, other: Plan, setting: str) -> Plan:
    """Return the plan, or the other one where that alone fits; the plan if neither has a price."""
    try:
        priced = price(scenario, PlanTable.from_plans([plan, other]))
    except InputError:
        return plan
    kept, changed = (
        row_verdict(reading.row, reading.defaults, scenario, float(peak), float(typical))
        for peak, typical in zip(priced.peak, priced.typical_peak, strict=True)
    )
    if kept != "does_not_fit" or changed == "does_not_fit":
        return plan
    reading.defaults.append(f"{setting} (default: it does not fit without)")
    return other


def with_usual_micro_batch(reading: Reading, scenario: Scenario, plan: Plan) -> Plan:
    """Return the plan with the micro-batch size that its author most likely used.

    Without a pipeline: the largest of 1, 2, 4 ... sequences that fits, since smaller micro-batches
    only add time; of MaxText, which accumulates nothing unless told to, all sequences. With a
    pipeline: one sequence, which gives the shortest bubble, as MLPerf's LoRA has (MBS=1 of
    mlcommons/training_results_v4.0: NVIDIA/benchmarks/llama2_70b_lora, configs/config_common.sh). A
    size given in the row is kept.
    """
    if reading.row.get(COLUMN) is not None:
        return plan
    of_suite = "mlperf" in terms_of(reading.row, "framework") and reading.row.peft is not None
    alone = plan.pipeline_parallel > 1 or of_suite
    if alone or reading.row.get("global_batch_size") is None:
        reading.value(COLUMN, plan.micro_batch_size, "one sequence")
        return plan
    sequences = plan.micro_batch_size * plan.num_microbatches  # of a data rank
    if "maxtext" in terms_of(reading.row, "framework"):
        reading.value(COLUMN, sequences, "that trainer accumulates nothing")
        return replace(plan, micro_batch_size=sequences, num_microbatches=1)
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
