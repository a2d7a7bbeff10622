"""Gradients at the moments of a step: which of them are whole under an interleaved pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from tests.samples import llama, make_scenario

PLAN = Plan(
    data_parallel=2,
    pipeline_parallel=4,
    pipeline_schedule="interleaved_1f1b",
    virtual_stages=4,
    num_microbatches=4,
    zero_stage=1,
    recompute="full",
)


def gradients(plan: Plan) -> float:
    """Bytes at the peak, of a model whose embedding is small."""
    model = llama(hidden_size=512, intermediate_size=2048, vocab_size=512, num_hidden_layers=16)
    scenario = make_scenario(
        model, "8xH100-SXM", seq_len=256, global_batch_size=plan.global_batch_size
    )
    return float(price(scenario, PlanTable.from_plans([plan])).memory.gradients[0])


def test_one_round_of_microbatches_leaves_the_gradients_of_one_stage_whole() -> None:
    rounds = {m: gradients(replace(PLAN, num_microbatches=m)) for m in (4, 8, 12)}
    assert rounds[8] == rounds[12]
    one, ranks = 1.0 / PLAN.virtual_stages, PLAN.data_parallel
    assert rounds[4] == pytest.approx((one + (1.0 - one) / ranks) * rounds[8], rel=0.05)
