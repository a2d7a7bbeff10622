"""What ranks counted, in the words of predictions."""

from typing import Any

import pytest

from cost_models.plan.plan import Plan
from cost_models.pricing.observed import with_predicted_names
from tests.executor.tiny import tiny

PARTS = {"weights": 70, "optimizer": 140, "activations": 211, "buffers": 75}


def rank(gathered: int) -> dict[str, Any]:
    return {"stage": 0, "memory": {"peak_bytes": 496, "parts": PARTS, "gathered_bytes": gathered}}


@pytest.mark.parametrize(
    ("zero_stage", "gathered", "expected"),
    [
        (0, 0, {}),  # one precision: the weights are what the optimizer updates
        (0, 72, {"weights": 142, "buffers": 3}),
        (2, 72, {"weights": 142, "buffers": 3}),
        (3, 72, {}),  # the shards are the weights
    ],
)
def test_gathered_weights_are_the_weights_below_zero_3(
    zero_stage: int, gathered: int, expected: dict[str, int]
) -> None:
    file = tiny(Plan(data_parallel=2, zero_stage=zero_stage))
    found = with_predicted_names(rank(gathered), file)["memory"]["parts"]
    assert found == {**PARTS, **expected}
    assert sum(found.values()) == 496


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_that_no_other_rank_holds_stay_weights(precision: str) -> None:
    plan = Plan(data_parallel=2, expert_parallel=2, zero_stage=2)
    apart = {"weights": 10**7, "optimizer": 0, "buffers": 80}
    ranks = {"stage": 0, "memory": {"parts": apart, "gathered_bytes": 72}}
    found = with_predicted_names(ranks, tiny(plan, "mixtral", precision=precision))
    assert found["memory"]["parts"] == {"weights": 10**7 + 72, "optimizer": 0, "buffers": 8}
