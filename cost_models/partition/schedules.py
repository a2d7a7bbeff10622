"""Pipeline schedules: the stages that a rank owns, and its actions of a step in order.

The executor runs these lists of actions (one a rank), and the estimates follow from them. Orders
are those of torch.distributed.pipelining.

Symbols   p pipeline_parallel   v virtual_stages (stages on a rank)   m num_microbatches   r rank
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count, zip_longest
from typing import Final, Literal, NamedTuple, get_args

from cost_models.plan.plan import SCHEDULES, Plan

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

# two stages a rank, in ascending then descending order: one rank owns the first and the last stage
V_SHAPED: Final = ("zbv", "dualpipev")
# split backward pass: input gradients, for which the previous stage waits, and weight gradients
SPLIT: Final = ("zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev")
LOOPED: Final = ("interleaved_1f1b", "interleaved_zero_bubble")  # two or more stages a rank
V_CODES: Final = tuple(SCHEDULES.index(name) for name in V_SHAPED)
SPLIT_CODES: Final = tuple(SCHEDULES.index(name) for name in SPLIT)
LOOPED_CODES: Final = tuple(SCHEDULES.index(name) for name in LOOPED)


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    microbatch: int


def default_virtual_stages(schedule: str | None) -> int:
    """Return the default number of stages a rank of a schedule."""
    return 2 if schedule in (*LOOPED, *V_SHAPED) else 1


def owned_stages(
    rank: int, pipeline_parallel: int, virtual_stages: int, *, v_shaped: bool
) -> range:
    """Return the stages that a pipeline rank owns, in the order of the model.

    loop   r, r + p, r + 2 p, ...
    V      r and 2 p - 1 - r

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2 (loop); Qi et al. (arXiv:2405.15362), the
    V of ZB-V. Leaves out: other assignments of stages to ranks, such as the two directions of
    DualPipe.

    >>> list(owned_stages(1, 4, 2, v_shaped=False)), list(owned_stages(1, 4, 2, v_shaped=True))
    ([1, 5], [1, 6])
    """
    stages = pipeline_parallel * virtual_stages
    if v_shaped:
        return range(rank, stages - rank, 2 * (pipeline_parallel - rank) - 1)
    return range(rank, stages, pipeline_parallel)


def stages_of_rank(plan: Plan, rank: int) -> range:
    """Return the stages that a pipeline rank of a plan owns."""
    v_shaped = plan.pipeline_schedule in V_SHAPED
    return owned_stages(rank, plan.pipeline_parallel, plan.virtual_stages, v_shaped=v_shaped)


def rank_of_stage(plan: Plan, stage: int) -> int:
    """Return the pipeline rank that owns a stage.

    >>> [rank_of_stage(Plan(1, 1, 3, 2, "zbv"), stage) for stage in range(6)]
    [0, 1, 2, 2, 1, 0]
    """
    if plan.pipeline_schedule in V_SHAPED:
        return min(stage, plan.num_stages - 1 - stage)
    return stage % plan.pipeline_parallel


def ranks_of_stages(plan: Plan) -> list[int]:
    """Return the pipeline rank that owns each stage of a plan."""
    return [rank_of_stage(plan, stage) for stage in range(plan.num_stages)]


def actions(plan: Plan, rank: int) -> list[Action]:
    """Return the actions of one pipeline rank in a step, in order.

    gpipe             all forward passes, then all backward passes (Huang et al., arXiv:1811.06965)
    1f1b              p - r - 1 forward passes, then one of each in turn (Narayanan et al.,
                      arXiv:2104.04473, sec. 2.2.1)
    interleaved_1f1b  the same over v stages a rank (sec. 2.2.2), micro-batches in rounds
    zero_bubble       ZB-H1 (Qi et al., arXiv:2401.10241, sec. 2.2 and 3.1): 1f1b whose weight
                      gradients are delayed by r micro-batches, into the bubble at the end; no rank
                      keeps more micro-batches than the first rank of 1f1b
    interleaved_zero_bubble  the same over v stages a rank (ZB1P; torch's
                      ScheduleInterleavedZeroBubble)
    zbv               ZB-V (Qi et al., sec. 6; arXiv:2405.15362): two stages a rank in a V
    dualpipev         the V form of DeepSeek's DualPipe (arXiv:2412.19437, sec. 3.2.1): forward and
                      backward passes of two micro-batches in turn

    Without a pipeline each micro-batch runs forward and backward at once, under every schedule.

    Source: the papers named above, and torch.distributed.pipelining, whose orders the tests
    require. Leaves out: messages, and when an action runs (``step_time.pipeline_simulation``).
    """
    p, v, m = plan.pipeline_parallel, plan.virtual_stages, plan.num_microbatches
    if p == 1:
        order = _one_after_another(1, v, m, 0, warm_up=0)
    elif plan.pipeline_schedule == "gpipe":
        order = _one_after_another(p, v, m, rank, warm_up=v * m)
    elif plan.pipeline_schedule == "zbv":
        order = _zbv(p, m, rank).actions
    elif plan.pipeline_schedule == "dualpipev":
        order = _dualpipev(p, m, rank).actions
    else:
        late = rank if plan.pipeline_schedule in SPLIT else None
        warm_up = _warm_up(plan, rank)
        order = _one_after_another(p, v, m, rank, warm_up=warm_up, weights_late=late)
    return [action for action in order if action.microbatch < m]


class RepeatingBlock(NamedTuple):
    """The part of a rank's order that repeats."""

    before: int  # actions
    actions: int  # of one repetition
    times: int
    microbatches: int  # of every stage, in one repetition


def repeats(plan: Plan, rank: int = 0) -> RepeatingBlock | None:
    """Return the repeating block of one rank's order, if any; rank 0's has the fewest repetitions.

    Blocks begin where the passes of a repetition wait for those of the same one or of the previous
    one.
    """
    p, v, m = plan.pipeline_parallel, plan.virtual_stages, plan.num_microbatches
    schedule = plan.pipeline_schedule
    if p == 1 or schedule == "gpipe":
        return None
    if schedule in V_SHAPED:
        if m < 2 * p:
            return None
        times = m - 2 * p + 1 + rank
        if schedule == "zbv":
            return RepeatingBlock(2 * p - 1 + 3 * (p - rank), 6, times, 1)
        return RepeatingBlock(2 * p + 3 * (p - rank - 1), 4, times, 1)
    split = schedule in SPLIT
    warm_up = _warm_up(plan, rank)
    round_of = per_round(m, p) if v > 1 else 1
    times = (v * m - warm_up - rank) // (v * round_of)
    if times < 1:
        return None
    return RepeatingBlock(warm_up + 2 * rank, v * round_of * (3 if split else 2), times, round_of)


def _warm_up(plan: Plan, rank: int) -> int:
    """Return the number of forward passes before forward and backward passes alternate."""
    p, v = plan.pipeline_parallel, plan.virtual_stages
    hops = 1 if v == 1 or plan.pipeline_schedule in SPLIT else 2  # ahead of the next rank
    return (v - 1) * per_round(plan.num_microbatches, p) + hops * (p - 1 - rank)


def per_round(num_microbatches: int, pipeline_parallel: int) -> int:
    """Return the micro-batches that a stage runs before the rank's next stage has its turn."""
    return num_microbatches // max(1, num_microbatches // pipeline_parallel)


class _Order:
    """A list of actions; every stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: dict[Kind, dict[int, int]] = {kind: defaultdict(int) for kind in get_args(Kind)}

    def add(self, kind: Kind, stage: int) -> None:
        """Append a stage's next action of a kind; "backward" is both halves at once."""
        counted = self.done[kind]
        if kind == "backward":
            self.done["backward_weight"][stage] += 1
            counted = self.done["backward_input"]
        microbatch = counted[stage]
        self.actions.append(Action(kind, stage, microbatch))
        counted[stage] = microbatch + 1

    def pending(self, kind: Kind, stage: int) -> int:
        """Return the number of micro-batches that had a forward pass and await ``kind``."""
        return self.done["forward"][stage] - self.done[kind][stage]


def _one_after_another(
    p: int, v: int, m: int, rank: int, *, warm_up: int, weights_late: int | None = None
) -> list[Action]:
    """Warm-up forward passes, then one forward and one backward pass in turn.

    ``weights_late``: number of backward passes by which weight gradients follow input gradients.
    """
    total, in_turn = v * m, per_round(m, p) if v > 1 else m
    stages = [(step // in_turn) % v * p + rank for step in range(total)]
    back = [(v - 1) * p + 2 * rank - stage for stage in stages]
    forward = _in_order("forward", stages)
    columns: list[list[Action | None]] = [[*forward[warm_up:]]]
    if weights_late is None:
        columns += [[*_in_order("backward", back)]]
    else:
        late = [None] * weights_late
        columns += [[*_in_order("backward_input", back)]]
        columns += [[*late, *_in_order("backward_weight", back)]]
    return [*forward[:warm_up], *filter(None, chain.from_iterable(zip_longest(*columns)))]


def _in_order(kind: Kind, stages: Sequence[int]) -> list[Action]:
    """Return the passes of a kind through some stages, which take their micro-batches in order."""
    of_stage: defaultdict[int, Iterator[int]] = defaultdict(count)
    # (a third of the time of Action(...), which dominates a simulation)
    return [tuple.__new__(Action, (kind, stage, next(of_stage[stage]))) for stage in stages]


def _zbv(p: int, m: int, rank: int) -> _Order:
    """ZB-V: the order for at least 2 p - 1 micro-batches; the caller drops surplus actions."""
    order, total = _Order(), max(2 * p - 1, m)
    down, up = rank, 2 * p - 1 - rank

    def backward(stage: int) -> None:
        order.add("backward_input", stage)
        order.add("backward_weight", stage)

    for _ in range(2 * (p - rank) - 1):
        order.add("forward", down)
    for _ in range(rank):
        order.add("forward", up)
        order.add("forward", down)
    for _ in range(p - rank):
        order.add("forward", up)
        backward(up)
    while order.done["forward"][up] < total:
        if order.done["forward"][down] < total:
            order.add("forward", down)
        backward(down)
        order.add("forward", up)
        backward(up)
    for _ in range(rank):
        order.add("backward_input", down)
        order.add("backward_input", up)
    for _ in range(p - rank):
        backward(down)
    for stage in (up, down):
        while order.pending("backward_weight", stage):
            order.add("backward_weight", stage)
    return order


def _dualpipev(p: int, m: int, rank: int) -> _Order:
    """DualPipeV: its overlapped pairs are one forward pass followed by one backward pass."""
    order = _Order()
    down, up = rank, 2 * p - 1 - rank
    late: list[int] = []  # stages with pending weight gradients

    def weights() -> None:
        if late:
            order.add("backward_weight", late.pop(0))

    def backward(stage: int, *, split: bool) -> None:
        order.add("backward_input" if split else "backward", stage)
        if split:
            late.append(stage)

    for _ in range(2 * (p - rank - 1)):
        order.add("forward", down)
    for _ in range(rank + 1):
        order.add("forward", down)
        order.add("forward", up)
    for _ in range(p - rank - 1):
        backward(up, split=True)
        weights()
        order.add("forward", up)
    for _ in range(m - 2 * p + rank + 1):
        order.add("forward", down)
        backward(up, split=False)
        order.add("forward", up)
        backward(down, split=False)
    for _ in range(p - rank - 1):
        backward(up, split=False)
        order.add("forward", up)
        backward(down, split=False)
    for step in range(2 * (rank + 1)):  # alternating; the later half splits
        backward(down if step % 2 else up, split=step > rank)
    for _ in range(p - rank - 1):
        weights()
        backward(down, split=True)
    for _ in range(rank + 1):
        weights()
    return order
