"""The order of passes: torch's own schedules, and no order that waits for itself."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from cost_models.partition.schedules import SPLIT, Action, actions, rank_of_stage, stages_of_rank
from cost_models.plan.plan import Plan

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def _of_torch(order: list[Any]) -> list[Action]:
    """Return torch's actions, overlapped pairs one after the other, without its pauses."""
    parts = [part for a in order if a is not None for part in (a.sub_actions or (a,))]
    return [
        Action(KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)  # type: ignore[arg-type]
        for a in parts
        if a.computation_type.value in KINDS
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


MULTI = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,  # with one stage a rank
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


@pytest.mark.parametrize(
    ("name", "virtual"),
    [
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zero_bubble", 1),
        ("interleaved_zero_bubble", 2),
        ("interleaved_zero_bubble", 3),
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
def test_orders_of_several_stages_are_those_of_torch(name: str, virtual: int):
    for size in range(2, 7):
        for microbatches in range(1, 21):
            rounds = max(1, microbatches // size)
            if name == "dualpipev" and microbatches < 2 * size:
                continue
            if microbatches % rounds and name not in ("zbv", "dualpipev"):
                continue
            fake = SimpleNamespace(
                n_local_stages=virtual,
                microbatches_per_round=microbatches // rounds,
                pp_group_size=size,
                num_stages=virtual * size,
                _n_microbatches=microbatches,
            )
            plan = Plan(1, 1, size, virtual, name, num_microbatches=microbatches)  # type: ignore[arg-type]
            for rank in range(size):
                expected = MULTI[name]._calculate_single_rank_operations(fake, rank)
                assert actions(plan, rank) == _of_torch(expected), (size, microbatches, rank)


def test_places_of_stages_are_those_of_torch():
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for size in (2, 3, 5):
        for schedule, style in (("zbv", "v"), ("interleaved_1f1b", "loop")):
            plan = Plan(1, 1, size, 2, schedule)  # type: ignore[arg-type]
            expected = generate_stage_to_rank_mapping(size, 2 * size, style=style)
            assert {s: rank_of_stage(plan, s) for s in range(2 * size)} == expected
            owned = {s: r for r in range(size) for s in stages_of_rank(plan, r)}
            assert owned == expected


FEWEST: dict[str, tuple[int, Callable[[int], int]]] = {  # virtual stages, micro-batches
    "gpipe": (1, lambda p: 1),
    "1f1b": (1, lambda p: p),
    "interleaved_1f1b": (2, lambda p: p),
    "zero_bubble": (1, lambda p: p),
    "interleaved_zero_bubble": (3, lambda p: p),
    "zbv": (2, lambda p: 2 * p - 1),
    "dualpipev": (2, lambda p: 2 * p),
}
LEGAL = [
    Plan(1, 1, size, virtual, schedule, num_microbatches=fewest(size) + rounds * size)  # type: ignore[arg-type]
    for size in (2, 3, 4, 8)
    for rounds in (0, 1, 4)
    for schedule, (virtual, fewest) in FEWEST.items()
] + [Plan(1, 1, 4, num_microbatches=m) for m in (1, 2, 3, 5)]
LEGAL += [Plan(pipeline_schedule=name, num_microbatches=3) for name in FEWEST]  # type: ignore[arg-type]


def _name(plan: Plan) -> str:
    return f"{plan.pipeline_schedule} p{plan.pipeline_parallel} m{plan.num_microbatches}"


@pytest.mark.parametrize("plan", LEGAL, ids=_name)
def test_every_order_runs_to_its_end(plan: Plan):
    """Let every rank go as far as its inputs allow, until all are done."""
    size, last = plan.pipeline_parallel, plan.num_stages - 1
    waiting = {rank: actions(plan, rank) for rank in range(size)}
    done: set[tuple[str, int, int]] = set()

    def ready(action: Action) -> bool:
        kind, stage, microbatch = action
        if kind == "forward":
            return stage == 0 or ("forward", stage - 1, microbatch) in done
        if kind == "backward_weight":
            return ("backward", stage, microbatch) in done
        own = ("forward", stage, microbatch) in done
        return own and (stage == last or ("backward", stage + 1, microbatch) in done)

    count = 0
    while any(waiting.values()):
        before = count
        for order in waiting.values():
            while order and ready(order[0]):
                kind, stage, microbatch = order.pop(0)
                done.add((kind.removesuffix("_input"), stage, microbatch))
                count += 1
                if kind == "backward":
                    done.add(("backward_weight", stage, microbatch))
        assert count > before, "every rank waits"
    kinds = ("forward", "backward", "backward_weight")
    every = {
        (k, s, m) for k in kinds for s in range(last + 1) for m in range(plan.num_microbatches)
    }
    assert done == every


@pytest.mark.parametrize("plan", LEGAL, ids=_name)
def test_both_ends_of_a_channel_use_it_in_the_same_order(plan: Plan):
    size, last = plan.pipeline_parallel, plan.num_stages - 1
    for kind, step in (("forward", 1), ("backward", -1)):
        sent: dict[tuple[int, int], list[Any]] = {}
        received: dict[tuple[int, int], list[Any]] = {}
        for rank in range(size):
            for action in actions(plan, rank):
                if action.kind.removesuffix("_input") != kind:
                    continue
                to, source = action.stage + step, action.stage - step
                if 0 <= to <= last and rank_of_stage(plan, to) != rank:
                    key = (rank, rank_of_stage(plan, to))
                    sent.setdefault(key, []).append((action.stage, action.microbatch))
                if 0 <= source <= last and rank_of_stage(plan, source) != rank:
                    key = (rank_of_stage(plan, source), rank)
                    received.setdefault(key, []).append((source, action.microbatch))
        assert sent == received


@pytest.mark.parametrize("plan", LEGAL, ids=_name)
def test_weight_gradients_come_after_those_of_inputs_and_only_where_the_backward_pass_is_split(
    plan: Plan,
):
    for rank in range(plan.pipeline_parallel):
        order = actions(plan, rank)
        kinds = {action.kind for action in order}
        if plan.pipeline_parallel == 1 or plan.pipeline_schedule not in SPLIT:
            assert kinds == {"forward", "backward"}
            continue
        for position, action in enumerate(order):
            if action.kind == "backward_weight":
                assert action._replace(kind="backward_input") in order[:position]
