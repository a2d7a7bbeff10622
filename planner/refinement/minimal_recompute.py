"""Fewest recomputed layers on every pipeline rank with which given stages fit.

Rank r needs at least R_r recomputed layers, found by bisection on its peak (recomputing a layer
never increases it). A small integer program (HiGHS) distributes them over the stages of the rank so
that the longest stage is as short as possible:

    minimise    T + EPSILON sum x_c s_c
    such that   t_c + s_c x_c <= T           for every stage c: t_c seconds without recomputation,
                                             s_c seconds for each recomputed layer
                sum of x_c on a rank >= R_r
                0 <= x_c <= layers of c
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct

from cost_models.partition.recomputed_layers import RecomputedLayers
from cost_models.partition.schedules import SPLIT, ranks_of_stages
from cost_models.partition.stages import PipelineRank, contents_of_rank
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from planner.refinement.rank_prices import (
    OfPlan,
    Seconds,
    fewest_that_fit,
    max_peak,
    rank_passes,
    rank_peaks,
)
from planner.refinement.stage_contents import Ranges, spread
from planner.refinement.stage_costs import ranks_of

EPSILON: Final = 1e-3  # weight of recomputation: among equal longest stages the least


class RankRecompute(NamedTuple):
    """The fewest recomputed layers with which a rank fits, and its seconds."""

    least: int
    layers: int  # all
    without: Seconds  # with no layer recomputed
    whole: Seconds  # with all layers recomputed

    @property
    def each(self) -> float:
        """Seconds of one recomputed layer for a micro-batch; 0 with embedding or head alone."""
        return (self.whole.whole - self.without.whole) / max(1, self.layers)

    @property
    def passes(self) -> float:
        """Seconds of a micro-batch with the fewest recomputed layers."""
        return self.without.whole + self.least * self.each

    @property
    def once(self) -> float:
        """Lower bound of the seconds once a step: recomputation may hide communication."""
        return min(self.without.once, self.whole.once)


class LeastRecompute(Struct):
    """Fewest recomputed layers on each rank of a plan with given stages."""

    plan: Plan
    ranges: Ranges
    of_rank: dict[int, RankRecompute] = {}  # some, or all

    @property
    def ranks(self) -> list[RankRecompute]:
        """The ranks that are priced, in order."""
        return [self.of_rank[rank] for rank in sorted(self.of_rank)]

    @property
    def step_bound(self) -> float:
        """Lower bound of the step in seconds, for every distribution over the stages of a rank.

        A rank works for m micro-batches, after the first one has passed the first stages of the
        ranks before it, and until the last one has passed them back; where the backward pass is
        split, weight gradients may follow.
        """
        before, longest, splits = 0.0, 0.0, self.plan.pipeline_schedule in SPLIT
        for rank in self.ranks:
            longest = max(longest, before + self.plan.num_microbatches * rank.passes)
            passed = rank.without.forward if splits else rank.without.whole
            before += passed / self.plan.virtual_stages
        return longest + min((rank.once for rank in self.ranks), default=0.0)

    def by_stage(self, scenario: Scenario, most_bytes: float = np.inf) -> tuple[int, ...] | None:
        """Distribute the layers over the stages; None if no distribution fits."""
        plan, ranks = self.plan, self.ranks
        owner, most = ranks_of_stages(plan), max_peak(scenario, most_bytes)
        seconds = [ranks[rank].without.whole / plan.virtual_stages for rank in owner]
        each = [ranks[rank].each for rank in owner]
        sizes = [last - first for first, last in self.ranges]
        mine = [[s for s, r in enumerate(owner) if r == rank] for rank in range(len(ranks))]
        least = [rank.least for rank in ranks]
        while True:
            shared = share_out(seconds, each, sizes, mine, least)
            contents = [(0, rank) for rank in ranks_of(scenario, plan, self.ranges, shared)]
            short = np.flatnonzero(rank_peaks(scenario, [plan], contents) > most).tolist()
            if not short:
                return shared
            for rank in short:  # this distribution needs more than the one of the bisection
                least[rank] += 1
                if least[rank] > ranks[rank].layers:
                    return None


def least_recompute(
    scenario: Scenario,
    plans: Sequence[tuple[Plan, Ranges]],
    limit: float = np.inf,
    most_bytes: float = np.inf,
) -> list[LeastRecompute]:
    """Return the fewest recomputed layers of the plans, with given stages, that fit.

    Plans whose steps take ``limit`` seconds or more are left out. ``most_bytes``: the largest peak
    that is allowed, whatever fits. Ranks are priced in an order that ends most plans early: the
    first, which mostly has the largest peak; the last, which computes the head; the others.
    """
    contents: dict[Any, PipelineRank] = {}
    left = [LeastRecompute(plan, ranges) for plan, ranges in plans]
    for some in (slice(0, 1), slice(-1, None), slice(1, -1)):
        priced = _with_ranks(scenario, left, some, contents, most_bytes)
        left = [one for one in priced if one.step_bound < limit]
    return left


def _with_ranks(
    scenario: Scenario,
    plans: list[LeastRecompute],
    some: slice,
    contents: dict[Any, PipelineRank],
    most_bytes: float,
) -> list[LeastRecompute]:
    """Price some ranks of every plan, and return the plans in which they fit."""
    owners = [tuple(ranks_of_stages(one.plan)) for one in plans]
    ranks = [
        (n, rank)
        for n, one in enumerate(plans)
        for rank in range(one.plan.pipeline_parallel)[some]
        if rank not in one.of_rank
    ]
    sizes = [
        [
            (b - a) * (owner == rank)
            for owner, (a, b) in zip(owners[n], plans[n].ranges, strict=True)
        ]
        for n, rank in ranks
    ]

    def contents_of(item: int, recomputed: int) -> OfPlan:
        number, rank = ranks[item]
        owner, ranges = owners[number], tuple(plans[number].ranges)
        key = owner, ranges, rank, recomputed
        if key not in contents:
            mine = [stage for stage, size in enumerate(sizes[item]) if size]
            again = RecomputedLayers(by_stage=spread(recomputed, mine, sizes[item]))
            contents[key] = contents_of_rank(scenario.model, ranges, owner, rank, recomputed=again)
        return number, contents[key]

    alone, most = [one.plan for one in plans], [sum(each) for each in sizes]
    least = fewest_that_fit(scenario, alone, most, contents_of, most_bytes)
    ends = [
        [contents_of(item, n) for item, n in enumerate(each)] for each in ([0] * len(most), most)
    ]
    seconds = rank_passes(scenario, alone, [*ends[0], *ends[1]])
    too_large = set()
    for item, (number, rank) in enumerate(ranks):
        fewest = least[item]
        if fewest is None:
            too_large.add(number)
        else:
            of_item = seconds[item], seconds[len(ranks) + item]
            plans[number].of_rank[rank] = RankRecompute(fewest, most[item], *of_item)
    return [one for number, one in enumerate(plans) if number not in too_large]


def spread_over(least: list[int], mine: list[list[int]], count: int) -> tuple[int, ...]:
    """Return recomputed layers of each stage if every rank has one stage or recomputes none."""
    shared = [0] * count
    for number, stages in zip(least, mine, strict=True):
        shared[stages[0]] = number
    return tuple(shared)


def share_out(
    seconds: list[float],
    each: list[float],
    sizes: list[int],
    mine: list[list[int]],
    least: list[int],
) -> tuple[int, ...]:
    """Return x of the integer program in the module docstring.

    ``seconds`` (without recomputation), ``each`` (seconds of one recomputed layer) and ``sizes``
    (layers): by stage; ``mine``: stages of each rank; ``least``: R of each rank.

    >>> share_out([4.0, 3.0, 3.0, 3.0], [0.5] * 4, [4] * 4, [[0, 2], [1, 3]], [4, 0])
    (1, 0, 3, 0)
    """
    count = len(sizes)
    if not any(least) or count == len(mine):
        return spread_over(least, mine, count)
    from scipy.optimize import Bounds, LinearConstraint, milp  # heavy: where it is used

    scale = max(seconds)
    cost = np.array([1.0, *(EPSILON * np.array(each) / scale)])
    longest = np.hstack([-np.ones((count, 1)), np.diag(np.array(each) / scale)])
    ranks = np.zeros((len(mine), 1 + count))
    for rank, stages in enumerate(mine):
        ranks[rank, 1 + np.array(stages)] = 1.0
    found = milp(
        cost,
        integrality=np.array([0, *([1] * count)]),
        bounds=Bounds(np.zeros(1 + count), np.array([np.inf, *sizes])),
        constraints=[
            LinearConstraint(longest, -np.inf, -np.array(seconds) / scale),
            LinearConstraint(ranks, np.array(least), np.inf),
        ],
    )
    assert found.success, found.message
    return tuple(round(x) for x in found.x[1:])
