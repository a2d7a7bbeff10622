"""A pipeline, action by action: torch's own order of actions, and when each of them can start."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import FORWARD, FULL_BACKWARD


class Action(NamedTuple):
    stage: int
    forward: bool
    microbatch: int


def torch_order(schedule: str, ranks: int, virtual: int, microbatches: int) -> list[list[Action]]:
    """The actions of every rank in the order in which torch runs them."""
    if schedule == "interleaved_1f1b":
        interleaved = object.__new__(ScheduleInterleaved1F1B)
        interleaved.pp_group_size = ranks
        interleaved.n_local_stages = virtual
        interleaved._n_microbatches = microbatches
        # as in its __init__, which wants a process group
        interleaved.number_of_rounds = max(1, microbatches // ranks)
        interleaved.microbatches_per_round = microbatches // interleaved.number_of_rounds
        lists = [interleaved._calculate_single_rank_operations(rank) for rank in range(ranks)]
    else:
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        single = object.__new__(kind)
        single._num_stages, single._n_microbatches = ranks, microbatches
        by_rank = single._get_pipeline_order()
        lists = [by_rank[rank] for rank in range(ranks)]
    return [_numbered(actions) for actions in lists]


def _numbered(actions: Sequence[Any]) -> list[Action]:
    """Number each stage's micro-batches in order (torch's list of a last stage starts at 1)."""
    seen: Counter[tuple[int, bool]] = Counter()
    numbered = []
    for action in actions:
        if action is None or action.computation_type not in (FORWARD, FULL_BACKWARD):
            continue
        key = (action.stage_index, action.computation_type == FORWARD)
        numbered.append(Action(*key, seen[key]))
        seen[key] += 1
    return numbered


def most_in_flight(actions: Sequence[Action]) -> int:
    """Largest number of forward actions whose backward action has not come yet."""
    live = most = 0
    for action in actions:
        live += 1 if action.forward else -1
        most = max(most, live)
    return most


def makespan(
    order: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float]
) -> float:
    """Seconds until all is done; ``forward`` and ``backward`` seconds of each stage."""
    last_stage = len(forward) - 1
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(order)
    position = [0] * len(order)
    while any(place < len(actions) for place, actions in zip(position, order, strict=True)):
        moved = False
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needs = _needs(action, last_stage)
                if needs is not None and needs not in ends:
                    break
                start = max(clocks[rank], ends.get(needs, 0.0) if needs else 0.0)
                seconds = forward if action.forward else backward
                clocks[rank] = ends[action] = start + seconds[action.stage]
                position[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return max(clocks)


def _needs(action: Action, last_stage: int) -> Action | None:
    """The action of another stage that must have ended."""
    if action.forward:
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.stage == last_stage:
        return action._replace(forward=True)
    return action._replace(stage=action.stage + 1)
