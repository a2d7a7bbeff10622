"""What ranks counted, in the words of predictions."""

from typing import Any

import pytest

from cost_models.plan.plan import Plan
from cost_models.pricing.observed import other_machine, peak_bytes, with_predicted_names
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


def test_the_allocator_counts_on_a_gpu() -> None:
    memory = {"peak_bytes": 496, "allocated_bytes": 512}
    assert peak_bytes({"memory": memory}) == 512
    assert peak_bytes({"memory": {**memory, "allocated_bytes": None}}) == 496


def test_a_run_on_other_devices_is_called_so() -> None:
    file = tiny(Plan(data_parallel=2))
    planned = file.cluster.accelerator
    assert planned.device != "cpu"
    assert other_machine(file, planned.name, 2) is None
    for device, processes, used in (
        ("cpu", 1, "1 CPU process"),
        ("cpu", 2, "2 CPU processes"),
        ("Tesla T4", 2, "2 T4"),
    ):
        said = other_machine(file, device, processes)
        assert said == f"the plan was priced for 2 {planned.name}, the run used {used}"
