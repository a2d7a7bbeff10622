"""Frozen parts of a full model: trained as by one process, its traffic and work as predicted."""

from dataclasses import replace
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from executor.model import stage as models
from tests.executor.tiny import assert_equal, tiny, verified

pytestmark = pytest.mark.distributed

CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "one process, norms and what comes first": (
        Plan(num_microbatches=2),
        {"freeze": "embedding,layers:0-0,norms", "family": "qwen3"},
    ),
    "sharded, first layers": (
        Plan(2, zero_stage=3, num_microbatches=2),
        {"freeze": "embedding,layers:0-1"},
    ),
    "sharded gradients, a layer in between, computed again": (
        Plan(2, zero_stage=2, recompute="full", num_microbatches=2),
        {"freeze": "layers:1-1"},
    ),
    "replicas, all but the head": (Plan(2), {"freeze": "all-but-head"}),
    "tied, embedding and head": (
        Plan(2, zero_stage=1),
        {"freeze": "embedding,head", "family": "gpt2", "tied": True},
    ),
    "experts": (Plan(), {"freeze": "layers:0-0", "family": "mixtral"}),
    "cut matrices, nothing but the projection": (
        Plan(tensor_parallel=2, sequence_parallel=True),
        {"freeze": "all-but-head,norms"},
    ),
    "a ring, first layers": (Plan(context_parallel=2), {"freeze": "embedding,layers:0-0"}),
    "cut experts apart, first layers and norms": (
        Plan(2, tensor_parallel=2, expert_parallel=2, zero_stage=1),
        {"freeze": "embedding,layers:0-0,norms", "family": "qwen3_moe", "num_layers": 2},
    ),
    "stages, first layers, computed again": (
        Plan(2, pipeline_parallel=2, num_microbatches=2, recompute="full", zero_stage=2),
        {"freeze": "embedding,layers:0-0", "num_layers": 4},
    ),
    "stages of cut matrices, weight gradients later": (
        Plan(
            tensor_parallel=2,
            pipeline_parallel=2,
            num_microbatches=2,
            pipeline_schedule="zero_bubble",
        ),
        {"freeze": "layers:1-1,norms", "num_layers": 4},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_trained_as_by_one_process(name: str) -> None:
    plan, options = CASES[name]
    found = verified(tiny(plan, **{"num_layers": 3, **options}), memory=True)
    assert_equal(found)
    for rank in found.memory:
        # tiny: a few kernels' temporaries count, and of a stack with a frozen layer in front of a
        # trained one the gradient of a layer is left out
        assert rank["predicted_bytes"] == pytest.approx(rank["counted_bytes"], rel=0.13)


def _thawed() -> None:
    original = models.parameter_layouts

    def trained(*arguments: Any) -> Any:
        return {k: replace(v, frozen=False) for k, v in original(*arguments).items()}

    models.parameter_layouts = trained


def test_a_frozen_weight_that_is_trained_is_seen() -> None:
    found = verified(tiny(Plan(), num_layers=2, freeze="layers:0-0"), _thawed)
    assert not found.passed
    assert found.weight_difference > 1e-3
