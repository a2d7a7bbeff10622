"""Recomputation of the first layers of every stage: parity, traffic, FLOP and memory."""

from typing import Any

import pytest

from benchmarks.memory_truth.rows import rows_of
from benchmarks.memory_truth.small_models import small
from cost_models.plan.plan import Plan
from executor.model import stage as models
from executor.training.traffic import is_as_predicted
from tests.executor.tiny import assert_equal, tiny, verified

pytestmark = pytest.mark.distributed
FIRST: dict[str, Any] = {"recompute": "full", "recompute_layers": 1, "num_microbatches": 2}


@pytest.mark.slow
def test_the_first_layer_of_every_stage():
    """Five layers on two stages, each split over two ranks."""
    plan = Plan(1, 2, 2, sequence_parallel=True, **FIRST)
    assert_equal(verified(tiny(plan, num_layers=5)))


@pytest.mark.slow
def test_a_number_for_each_stage():
    plan = Plan(1, 2, 2, sequence_parallel=True, recompute="full", num_microbatches=2)
    assert_equal(verified(tiny(plan, num_layers=4, stage_recompute_layers=(2, 0))))


def keep_nothing() -> None:
    """Switch off what spares a layer."""
    models.without_recompute = lambda layer: layer  # type: ignore[assignment]


@pytest.mark.slow
def test_a_layer_that_is_recomputed_against_the_plan_is_seen():
    found = verified(tiny(Plan(1, 2, **FIRST), num_layers=3), keep_nothing)
    assert not found.traffic_is_predicted
    counted, predicted = found.flops["counted"], found.flops["predicted"]
    assert counted is not None
    assert predicted is not None
    assert counted > predicted


@pytest.mark.slow
def test_layers_of_a_stage_that_should_keep_all_are_seen():
    plan = Plan(1, 2, 2, recompute="full", num_microbatches=2)
    found = verified(tiny(plan, stage_recompute_layers=(2, 0)), keep_nothing)
    wrong = {row["rank"] // 2 for row in found.traffic if not is_as_predicted(row)}
    assert wrong == {1}  # the pipeline rank whose stage recomputes nothing


SLOW: dict[str, tuple[Plan, dict[str, Any]]] = {
    "attention cores only": (
        Plan(1, 2, recompute="selective", recompute_layers=3),
        {"num_layers": 5, "attention_kernel": "eager"},
    ),
    "virtual stages": (
        Plan(1, 1, 2, 2, "interleaved_1f1b", 0, **FIRST),
        {"num_layers": 8, "family": "gpt2"},
    ),
    "uneven stages": (
        Plan(1, 2, 2, recompute="full", recompute_layers=2, num_microbatches=2),
        {"num_layers": 6, "layer_ranges": ((0, 2), (2, 6))},
    ),
    "a number for each virtual stage": (
        Plan(2, 1, 2, 2, "interleaved_1f1b", 2, recompute="full", num_microbatches=4),
        {"num_layers": 8, "stage_recompute_layers": (0, 2, 1, 0)},
    ),
    "two of every three layers, v-shaped, split backward": (
        Plan(
            1,
            1,
            2,
            2,
            "zbv",
            recompute="full",
            recompute_layers=2,
            recompute_every=3,
            num_microbatches=4,
        ),
        {"num_layers": 12},
    ),
    "norms over all heads, adapters": (
        Plan(1, 2, sequence_parallel=True, **FIRST),
        {"family": "olmo2", "num_layers": 3, "lora": 4},
    ),
    "context by ring": (Plan(context_parallel=2, zero_stage=2, **FIRST), {"num_layers": 3}),
    "context by ulysses": (
        Plan(
            context_parallel=2,
            context_parallel_method="ulysses",
            recompute="selective",
            recompute_layers=1,
        ),
        {"num_layers": 3},
    ),
    "experts": (
        Plan(2, 2, expert_parallel=2, zero_stage=1, **FIRST),
        {"family": "mixtral", "num_layers": 3},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_parity_of_recomputation_in_parts(name: str):
    plan, options = SLOW[name]
    assert_equal(verified(tiny(plan, **options)))


@pytest.mark.slow
def test_the_peak_is_predicted():
    plan = Plan(recompute="full", recompute_layers=2, micro_batch_size=4)
    (row,) = rows_of(small("qwen3", "bf16", plan, layers=4))
    assert abs(row["error_percent"]) < 2.5, row
