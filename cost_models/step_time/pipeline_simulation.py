"""Simulated seconds of a pipeline, action by action.

Symbols   p pipeline_parallel   v virtual_stages   m num_microbatches   r rank
Units     seconds

Orders have a body that repeats (``schedules.repeats``), whose passes depend on passes of the same
repetition or of the previous one. Once all passes of all ranks end exactly D seconds later than
those of the previous repetition, every further repetition takes D seconds more, and the passes
after the body shift by D too: repetitions that are not simulated add D each. So the number of
simulated repetitions does not grow with the number of micro-batches. D is compared within rounding;
the relative error of the result is at most that of one repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from cost_models.partition.schedules import Action, Kind, actions, repeats
from cost_models.plan.plan import Plan, Schedule

SAME: Final = 1e-12  # of D
FEWEST: Final = 2  # repetitions, or micro-batches of all ranks, at first; then twice as many
NEVER: Final = -1.0  # has not ended


class StageSeconds(NamedTuple):
    """Seconds of each stage; ``weights``: the part of ``backward`` that a split defers."""

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]

    @property
    def by_kind(self) -> dict[Kind, Sequence[float]]:
        """Seconds of an action of each kind, at every stage."""
        first = [each - late for each, late in zip(self.backward, self.weights, strict=True)]
        return {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": first,
            "backward_weight": self.weights,
        }


def makespan(
    plan: Plan, forward: Sequence[float], backward: Sequence[float], weights: Sequence[float]
) -> float:
    """Return the seconds from the first pass to the last.

    ``forward``, ``backward`` and ``weights``: of each stage, as of ``StageSeconds``. A pass starts
    as soon as its rank is free and its input is ready; messages take no time of their own.
    """
    seconds = StageSeconds(forward, backward, weights)
    m = plan.num_microbatches
    if plan.pipeline_schedule == "gpipe" and plan.pipeline_parallel > 1 == plan.virtual_stages:
        # two flow shops of equal jobs, one after the other
        return sum(forward) + sum(backward) + (m - 1) * (max(forward) + max(backward))
    body = repeats(plan)
    few = 0 if body is None else max(FEWEST, plan.pipeline_parallel // body.microbatches)
    while body is not None and few + 1 < body.times:
        less = body.times - few
        shorter = replace(plan, num_microbatches=m - less * body.microbatches)
        if repeats(shorter) != body._replace(times=few):
            break
        ends = ends_of(shorter, seconds)
        each = _steady(shorter, ends, body.actions, few)
        if each is not None:
            return max(order[-1] for order in ends) + less * each
        few *= 2
    return max(order[-1] for order in ends_of(plan, seconds))


def _steady(plan: Plan, ends: Sequence[Sequence[float]], length: int, times: int) -> float | None:
    """Return the seconds of a repetition once it takes as long as the previous one; else None."""
    each = None
    for rank, order in enumerate(ends):
        at = repeats(plan, rank).before + (times - 1) * length  # type: ignore[union-attr]
        now, before = order[at : at + length], order[at - length : at]
        each = now[-1] - before[-1] if each is None else each
        if any(abs(b - a - each) > SAME * each for a, b in zip(before, now, strict=True)):
            return None
    return each


def ends_of(plan: Plan, seconds: StageSeconds) -> list[list[float]]:
    """Return the end of each action of each rank in seconds, in the rank's order."""
    ranks = range(plan.pipeline_parallel)
    shape = plan.pipeline_schedule, plan.pipeline_parallel, plan.virtual_stages
    orders = _orders(*shape, plan.num_microbatches)
    passes = _passes(plan.num_stages, seconds)
    m = plan.num_microbatches
    # end of each pass of each micro-batch; passes without a dependency use the last row
    # or NEVER, less the number (from 1) of the rank that waits for it
    ended = [[NEVER] * m for _ in range(2 * plan.num_stages + 1)] + [[0.0] * m]
    ends: list[list[float]] = [[] for _ in ranks]
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        mine = ends[rank]
        clock = mine[-1] if mine else 0.0
        order = orders[rank]
        for at in range(len(mine), len(order)):
            kind, stage, microbatch = order[at]
            needs, gives, lasts = passes[kind][stage]
            input_ready = ended[needs][microbatch]
            if input_ready < 0.0:
                ended[needs][microbatch] = NEVER - 1.0 - rank
                break
            clock = (input_ready if input_ready > clock else clock) + lasts
            mine.append(clock)
            passed = ended[gives]
            if passed[microbatch] < NEVER:
                ready.append(int(NEVER - 1.0 - passed[microbatch]))
            passed[microbatch] = clock
    assert all(len(mine) == len(order) for mine, order in zip(ends, orders, strict=True))
    return ends


@lru_cache(maxsize=4)  # plans that are simulated in turn often differ in their seconds alone
def _orders(
    schedule: Schedule, pipeline: int, virtual: int, microbatches: int
) -> list[list[Action]]:
    """Return the actions of every rank."""
    plan = Plan(
        pipeline_parallel=pipeline,
        virtual_stages=virtual,
        pipeline_schedule=schedule,
        num_microbatches=microbatches,
    )
    return [actions(plan, rank) for rank in range(pipeline)]


def _passes(stages: int, seconds: StageSeconds) -> dict[Kind, list[tuple[int, int, float]]]:
    """Return, for each kind of action and stage, the pass that it needs, its own, its seconds.

    Numbers of passes: forward ones by stage, backward ones by stage, one that no pass needs, one
    that has ended from the beginning.
    """
    unneeded, ended = 2 * stages, 2 * stages + 1
    forward = [(stage - 1 if stage else ended, stage) for stage in range(stages)]
    last = stages - 1
    backward = [(stages + s + 1 if s < last else s, stages + s) for s in range(stages)]
    passes: dict[Kind, list[tuple[int, int]]] = {
        "forward": forward,
        "backward": backward,
        "backward_input": backward,
        "backward_weight": [(ended, unneeded)] * stages,
    }
    by_kind = seconds.by_kind
    return {
        kind: [(*numbers, lasts) for numbers, lasts in zip(mine, by_kind[kind], strict=True)]
        for kind, mine in passes.items()
    }
