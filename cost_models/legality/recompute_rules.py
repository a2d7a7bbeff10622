"""Rules of recomputation: its layers, and the options that exclude it."""

from __future__ import annotations

import numpy as np

from cost_models.legality.rule import Rule
from cost_models.partition.recomputed_layers import by_stage_error
from cost_models.plan.plan import Plan
from cost_models.plan.recompute import FULL, SHOWN, by_operator
from cost_models.scenario import Scenario


def _recompute_layers_text(scenario: Scenario, plan: Plan) -> str:
    if plan.recompute_layers or scenario.stage_recompute_layers is None:
        return str(plan.recompute_layers)
    return ",".join(map(str, scenario.stage_recompute_layers))


def _too_many_by_stage(scenario: Scenario) -> bool:
    numbers, num_layers = scenario.stage_recompute_layers or (), scenario.model.num_layers
    if len(numbers) > num_layers:
        return True
    return by_stage_error(numbers, len(numbers), num_layers, scenario.layer_ranges) is not None


RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(
        "recompute_layers_alone",
        lambda s, t: (
            ((t.recompute_layers > 0) | (s.stage_recompute_layers is not None)) & (t.recompute == 0)
        ),
        lambda s, p: (
            f"recompute_layers = {_recompute_layers_text(s, p)} selects the recomputed layers: it "
            f"needs recompute {' or '.join(SHOWN[1:])} (got none)"
        ),
    ),
    Rule(
        "recompute_offload",
        lambda s, t: by_operator(t.recompute) & t.offloads_activations,
        lambda s, p: (
            f"recompute {p.recompute} with offload {p.offload}: its kept results cannot leave the "
            "device (choose recompute none, selective or full, or offload none or optimizer)"
        ),
    ),
    Rule(
        "recompute_encoder_decoder",
        lambda s, t: (t.recompute > FULL) & s.model.is_encoder_decoder,
        lambda s, p: (
            f"recompute {p.recompute} is not supported for encoder-decoder models, whose decoder "
            "layers have cross-attention (must be none, selective or full)"
        ),
    ),
    Rule(
        "recompute_every",
        lambda s, t: (
            (t.recompute_every > 0)
            & (
                (t.recompute_layers < 1)
                | (t.recompute_layers > t.recompute_every)
                | (t.recompute_every > s.smallest_stage(t.pipeline_parallel * t.virtual_stages))
            )
        ),
        lambda s, p: (
            f"recompute {p.recompute}:{p.recompute_layers}/{p.recompute_every}: the first n of "
            "every k layers of a stage need 1 <= n <= k, and the smallest of "
            f"{p.num_stages} stages has {s.smallest_stage(p.num_stages)} layers (k must not exceed "
            "that)"
        ),
    ),
    Rule(
        "stage_recompute_layers",
        lambda s, t: (
            (t.pipeline_parallel * t.virtual_stages != len(s.stage_recompute_layers))
            | _too_many_by_stage(s)
            if s.stage_recompute_layers is not None
            else np.zeros(len(t), dtype=bool)
        ),
        lambda s, p: str(
            by_stage_error(
                s.stage_recompute_layers or (), p.num_stages, s.model.num_layers, s.layer_ranges
            )
        ),
    ),
    Rule(
        "stage_recompute_layers_alone",
        lambda s, t: (s.stage_recompute_layers is not None) & (t.recompute_layers > 0),
        lambda s, p: (
            f"recompute_layers is given for each stage and as {_recompute_layers_text(s, p)} for "
            "all of them: choose one"
        ),
    ),
    Rule(
        "recompute_layers",
        lambda s, t: t.recompute_layers > s.smallest_stage(t.pipeline_parallel * t.virtual_stages),
        lambda s, p: (
            f"recompute_layers = {p.recompute_layers}: the smallest of {p.num_stages} stages has "
            f"{s.smallest_stage(p.num_stages)} layers (must not exceed that; 0: all layers)"
        ),
    ),
)
