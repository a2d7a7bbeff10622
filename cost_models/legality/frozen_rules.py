"""Rules of frozen parts: every stage of a pipeline needs trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cost_models.arrays import Count
from cost_models.columnar.columns import on_distinct_rows
from cost_models.legality.rule import Rule
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan, split_layers
from cost_models.scenario import Scenario

Ranges = Sequence[tuple[int, int]]


def _ranges(scenario: Scenario, num_stages: int) -> Ranges | None:
    """Return the layers of each stage; None where there are fewer layers than stages."""
    if scenario.layer_ranges is not None:
        return scenario.layer_ranges
    if num_stages > scenario.model.num_layers:
        return None  # reported by the rule num_layers
    return split_layers(scenario.model.num_layers, num_stages)


def untrained_stage(model: ModelSpec, ranges: Ranges) -> int | None:
    """Return the first stage without trained weights, or None."""
    for stage, (first, stop) in enumerate(ranges):
        weights = [w for kind in set(model.pattern[first:stop]) for w in model.kinds[kind].weights]
        weights += model.embedding if stage == 0 else ()
        if stage == len(ranges) - 1:
            weights += (*model.head, *(model.embedding if model.tie_embeddings else ()))
        if all(weight.frozen for weight in weights):
            return stage
    return None


@on_distinct_rows
def _has_untrained_stage(scenario: Scenario, stages: Count) -> Any:
    broken = np.zeros(np.shape(stages), dtype=bool)
    for number in np.unique(stages):
        ranges = _ranges(scenario, int(number)) if number > 1 else None
        if ranges is not None and untrained_stage(scenario.model, ranges) is not None:
            broken |= np.equal(stages, number)
    return broken


def _untrained_text(scenario: Scenario, plan: Plan) -> str:
    ranges = _ranges(scenario, plan.num_stages) or ()
    stage = untrained_stage(scenario.model, ranges) or 0
    first, stop = ranges[stage]
    return (
        f"freeze = {scenario.workload.freeze}: stage {stage} of {len(ranges)} (layers {first} to "
        f"{stop - 1}) has no trained weights; choose fewer stages (pipeline_parallel "
        f"{plan.pipeline_parallel} x virtual_stages {plan.virtual_stages}) or other parts"
    )


FROZEN_RULES: tuple[Rule, ...] = (
    Rule(
        "freeze",
        lambda s, t: bool(s.workload.freeze) & t.offloads_weights,
        lambda s, p: (
            f"freeze = {s.workload.freeze}: frozen parts stay on the device (offload {p.offload} "
            "must not be weights)"
        ),
    ),
    Rule(
        "freeze_stages",
        lambda s, t: (
            s.workload.freeze != ""
            and _has_untrained_stage(s, t.pipeline_parallel * t.virtual_stages)
        ),
        _untrained_text,
    ),
)
