"""Weight gradients that come later: the schedules that need them, under every ZeRO stage."""

from typing import Any

import pytest

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.counters.collectives_and_flops import FlopCounter
from executor.ops import deferred_weight_gradients as weight_gradients
from executor.parallel import pipeline
from executor.processes.fork import run_forked
from executor.training import trainer as train
from executor.training.trainer import Trainer
from executor.verify.matrix import cases
from executor.verify.parity import TOLERANCE
from tests.executor.tiny import assert_equal, random_batch, tiny, verified

pytestmark = pytest.mark.distributed

QUICK: dict[str, tuple[Plan, dict[str, Any]]] = {
    "zbv, tied": (Plan(1, 1, 2, 2, "zbv", num_microbatches=4), {"tied": True}),
    "zero_bubble, zero 2": (Plan(2, 1, 2, 1, "zero_bubble", 2, num_microbatches=3), {}),
}
# beside the matrix, which has every split schedule with every ZeRO stage: every kind of
# recomputation, tensor and sequence parallelism, tied weights and uneven stages
SLOW: dict[str, tuple[Plan, dict[str, Any]]] = {
    "zero_bubble, zero 1": (
        Plan(2, 2, 2, 1, "zero_bubble", 1, True, "full", num_microbatches=3),
        {"family": "qwen3"},
    ),
    "zero_bubble, zero 3": (
        Plan(2, 1, 4, 1, "zero_bubble", 3, num_microbatches=5),
        {"layer_ranges": ((0, 1), (1, 4), (4, 6), (6, 7)), "num_layers": 7, "tied": True},
    ),
    "interleaved_zero_bubble, zero 0": (
        Plan(2, 2, 2, 2, "interleaved_zero_bubble", 0, True, "full", num_microbatches=2),
        {"tied": True},
    ),
    "interleaved_zero_bubble, zero 2": (
        Plan(2, 1, 2, 2, "interleaved_zero_bubble", 2, recompute="selective", num_microbatches=4),
        {"layer_ranges": ((0, 1), (1, 3), (3, 4), (4, 6)), "num_layers": 6},
    ),
    "zbv, zero 1": (
        Plan(2, 2, 2, 2, "zbv", 1, True, "selective", num_microbatches=4),
        {"family": "gpt2", "tied": True},
    ),
    "zbv, zero 2": (
        Plan(2, 1, 2, 2, "zbv", 2, num_microbatches=5),
        {"layer_ranges": ((0, 2), (2, 3), (3, 6), (6, 7)), "num_layers": 7},
    ),
    "dualpipev, zero 0": (
        Plan(2, 2, 2, 2, "dualpipev", 0, True, "selective", num_microbatches=4),
        {"family": "gpt2", "tied": True},
    ),
    "dualpipev, zero 1": (
        Plan(2, 1, 3, 2, "dualpipev", 1, recompute="full", num_microbatches=7),
        {"num_layers": 6, "tied": True},
    ),
    "dualpipev, zero 2": (
        Plan(2, 1, 2, 2, "dualpipev", 2, num_microbatches=6),
        {"layer_ranges": ((0, 1), (1, 3), (3, 4), (4, 6)), "num_layers": 6},
    ),
    "replicas of shards": (
        Plan(4, 1, 2, 1, "zero_bubble", 2, num_microbatches=2, dp_replicate=2),
        {"tied": True},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", QUICK)
def test_parity(name: str):
    plan, options = QUICK[name]
    assert_equal(verified(tiny(plan, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_parity_of_every_schedule_and_zero_stage(name: str):
    plan, options = SLOW[name]
    assert_equal(verified(tiny(plan, **options)))


def test_the_cases_hold_every_schedule_with_every_zero_stage():
    plans = [case.plan for case in cases()]
    plans += [plan for plan, _ in [*QUICK.values(), *SLOW.values()]]
    seen = {(plan.pipeline_schedule, plan.zero_stage) for plan in plans}
    split = ("zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev")
    assert {(name, zero) for name in split for zero in range(4)} <= seen
    for name in split:
        kinds = {plan.recompute for plan in plans if plan.pipeline_schedule == name}
        assert kinds >= {"none", "full"}


# --- the comparison sees it when a guard is gone -------------------------------------------------


def _reducing_before_the_weight_gradients() -> None:
    finish = pipeline.compute_weight_gradients

    def too_early(stage: Any, zero_stage: int, due: Any, *, last: bool) -> None:
        finish(stage, zero_stage, [], last=last)
        weight_gradients.compute_deferred(due)

    pipeline.compute_weight_gradients = too_early


def _without_tied_sum() -> None:
    train.sum_shared_gradients = lambda *_: None


def _mixing_micro_batches() -> None:
    pipeline.defer_other_gradients = lambda *_: None


SHARDED = Plan(2, 1, 2, 1, "zero_bubble", 1, num_microbatches=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "plan"),
    [
        (_reducing_before_the_weight_gradients, SHARDED),
        (_without_tied_sum, Plan(1, 1, 2, 2, "zbv", num_microbatches=3)),
    ],
)
def test_a_missing_guard_is_seen(prepare: Any, plan: Plan):
    file = tiny(plan, tied=True)
    assert not verified(file, prepare).gradient_difference <= 1e-3


@pytest.mark.slow
def test_gradients_of_other_micro_batches_in_a_reduction_are_seen():
    """Nothing is lost, but the last reductions are smaller than those of a whole backward pass."""
    file = tiny(Plan(2, 1, 2, 1, "zero_bubble", 2, num_microbatches=3))
    found = verified(file, _mixing_micro_batches)
    assert found.gradient_difference <= TOLERANCE
    assert not found.traffic_is_predicted


# --- no operation twice ---------------------------------------------------------------------------


def _flops(rank: int, file: PlanFile) -> tuple[int, int]:
    trainer = Trainer(file)
    batch = random_batch(file)
    with FlopCounter() as counter:
        trainer.step(batch)
    return counter.total, len(weight_gradients._open)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_split_backward_pass_does_the_operations_of_a_whole_one(recompute: Any):
    """torch's own schedules recompute once for each group of weights: 2.96 times the operations."""
    totals = {}
    for schedule, virtual in (("1f1b", 1), ("zero_bubble", 1), ("zbv", 2), ("dualpipev", 2)):
        plan = Plan(
            1,
            1,
            2,
            virtual,
            schedule,
            recompute=recompute,
            num_microbatches=4,  # type: ignore[arg-type]
        )
        ranks = run_forked(_flops, 2, tiny(plan, "qwen3"))
        totals[schedule] = sum(total for total, _ in ranks)
        assert not any(still_open for _, still_open in ranks)
    assert len(set(totals.values())) == 1, totals
