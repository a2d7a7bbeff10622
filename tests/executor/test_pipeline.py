"""The order of passes: torch's own schedules, and no order that waits for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from cost_models.plan import Plan
from executor.pipeline import Action, actions

KINDS = {"F": "forward", "B": "backward"}


def _of_torch(order: list[Any]) -> list[Action]:
    """Return torch's actions without its pauses and its deferred gradient reductions."""
    return [
        Action(KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)
        for a in order
        if a is not None and a.computation_type.value in KINDS
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("size", "microbatches"), [(2, 2), (3, 7), (4, 4), (4, 9)])
def test_orders_are_those_of_torch(name: str, size: int, microbatches: int):
    cls = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name]
    fake = SimpleNamespace(_num_stages=size, _n_microbatches=microbatches)
    expected = cls._get_pipeline_order(fake)
    plan = Plan(1, 1, size, pipeline_schedule=name, num_microbatches=microbatches)
    for rank in range(size):
        # torch numbers the last rank's micro-batches from 1 in this picture of 1F1B: kinds only
        assert [a.kind for a in actions(plan, rank)] == [a.kind for a in _of_torch(expected[rank])]


@pytest.mark.parametrize(
    ("size", "virtual", "microbatches"), [(2, 2, 2), (2, 2, 8), (2, 3, 6), (4, 2, 8), (3, 2, 9)]
)
def test_interleaved_order_is_that_of_torch(size: int, virtual: int, microbatches: int):
    rounds = max(1, microbatches // size)
    fake = SimpleNamespace(
        n_local_stages=virtual,
        microbatches_per_round=microbatches // rounds,
        pp_group_size=size,
        _n_microbatches=microbatches,
    )
    plan = Plan(1, 1, size, virtual, "interleaved_1f1b", num_microbatches=microbatches)
    for rank in range(size):
        expected = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(fake, rank)
        assert actions(plan, rank) == _of_torch(expected)


LEGAL = [
    Plan(1, 1, size, virtual, schedule, num_microbatches=rounds * size)
    for size in (1, 2, 3, 4, 8)
    for rounds in (1, 2, 5)
    for virtual, schedule in ((1, "gpipe"), (1, "1f1b"), (2, "interleaved_1f1b"))
    if size > 1 or virtual == 1
] + [Plan(1, 1, 4, num_microbatches=m) for m in (1, 2, 3, 5)]


@pytest.mark.parametrize("plan", LEGAL, ids=str)
def test_every_order_runs_to_its_end(plan: Plan):
    """Let every rank go as far as its inputs allow, until all are done."""
    size, last = plan.pipeline_parallel, plan.num_stages - 1
    waiting = {rank: actions(plan, rank) for rank in range(size)}
    done: set[Action] = set()

    def ready(action: Action) -> bool:
        kind, stage, microbatch = action
        if kind == "forward":
            return stage == 0 or Action("forward", stage - 1, microbatch) in done
        own = Action("forward", stage, microbatch) in done
        return own and (stage == last or Action("backward", stage + 1, microbatch) in done)

    while any(waiting.values()):
        before = len(done)
        for order in waiting.values():
            while order and ready(order[0]):
                done.add(order.pop(0))
        assert len(done) > before, "every rank waits"
    assert len(done) == 2 * plan.num_stages * plan.num_microbatches


@pytest.mark.parametrize("plan", LEGAL, ids=str)
def test_both_ends_of_a_channel_use_it_in_the_same_order(plan: Plan):
    size, last = plan.pipeline_parallel, plan.num_stages - 1
    for kind, step in (("forward", 1), ("backward", -1)):
        sent: dict[tuple[int, int, bool], list[Any]] = {}
        received: dict[tuple[int, int, bool], list[Any]] = {}
        for rank in range(size):
            for action in actions(plan, rank):
                if action.kind != kind:
                    continue
                to, source = action.stage + step, action.stage - step
                if 0 <= to <= last:
                    around = abs(to % size - rank) != 1 or (to % size > rank) != (step > 0)
                    key = (rank, to % size, around)
                    sent.setdefault(key, []).append((action.stage, action.microbatch))
                if 0 <= source <= last:
                    around = abs(source % size - rank) != 1 or (rank > source % size) != (step > 0)
                    key = (source % size, rank, around)
                    received.setdefault(key, []).append((source, action.microbatch))
        assert sent == received
