"""LoRA over a frozen base: trained as by one process, its traffic and work as predicted."""

from dataclasses import replace
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from executor.model import parameter_layout
from tests.executor.tiny import assert_equal, tiny, verified

pytestmark = pytest.mark.distributed

CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "one process": (Plan(num_microbatches=2), {"family": "qwen3"}),
    "sequence parallel, attention alone": (
        Plan(1, 2, sequence_parallel=True, recompute="full", num_microbatches=2),
        {"adapter_targets": "attention"},
    ),
    "tied, sharded": (Plan(2, zero_stage=3, num_microbatches=2), {"family": "gpt2", "tied": True}),
    "beside experts, shared out": (
        Plan(2, expert_parallel=2, zero_stage=3, num_microbatches=2),
        {"family": "qwen3_moe", "adapter_targets": "attention"},
    ),
    "beside shared experts": (
        Plan(1, 2, sequence_parallel=True, recompute="full"),
        {"family": "deepseek_v3", "adapter_targets": "attention"},
    ),
    "tied over stages": (Plan(1, 1, 2, num_microbatches=2), {"family": "gpt2", "tied": True}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_adapters_are_trained_as_by_one_process(name: str) -> None:
    plan, options = CASES[name]
    found = verified(tiny(plan, lora=4, num_layers=2, **options))
    assert_equal(found)
    assert ".lora_" in found.worst_gradient


@pytest.mark.slow
def test_adapters_beside_experts_over_a_quantised_attention() -> None:
    plan = Plan(2, 2, expert_parallel=2, num_microbatches=2)
    file = tiny(plan, "mixtral", qlora=4, num_layers=2, adapter_targets="attention")
    found = verified(file, memory=True)
    assert_equal(found)
    for rank in found.memory:
        assert rank["predicted_bytes"] == pytest.approx(rank["counted_bytes"], rel=0.1)


def _without_sums() -> None:
    original = parameter_layout._layout

    def whole(*arguments: Any) -> Any:
        return replace(original(*arguments), partial_gradient=False)

    parameter_layout._layout = whole


@pytest.mark.slow
def test_a_summand_that_is_not_added_up_is_seen() -> None:
    found = verified(tiny(Plan(1, 2), lora=4, num_layers=2), _without_sums)
    assert found.gradient_difference > 1e-3
    assert not found.passed
