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

from typing import Final

import numpy as np

from cost_models.partition.recomputed_layers import recomputed_layers
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import contents_of_rank
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from cost_models.uncertainty import verdict_spread
from planner.assessment.verdict import budget_bytes
from planner.refinement.stage_costs import Pricing, Ranges, one

EPSILON: Final = 1e-3  # weight of recomputation: among equal longest stages the least


def minimal_recompute_layers(
    scenario: Scenario, plan: Plan, ranges: Ranges
) -> tuple[int, ...] | None:
    """Return the number of recomputed first layers of each stage; None if nothing fits."""
    owner = ranks_of_stages(plan)
    sizes = [last - first for first, last in ranges]
    pricing = Pricing(scenario, plan)
    most = budget_bytes(scenario.cluster) / (
        1.0 + verdict_spread(scenario.software.name, scenario.cluster.num_gpus).above
    )

    def peak(rank: int, by_stage: tuple[int, ...]) -> float:
        recomputed = recomputed_layers(plan, by_stage)
        contents = contents_of_rank(scenario.model, ranges, owner, rank, recomputed=recomputed)
        return pricing.peak(contents)

    ranks = range(plan.pipeline_parallel)
    mine = [[stage for stage, rank in enumerate(owner) if rank == r] for r in ranks]
    longest, each = _seconds(pricing, ranges)
    least = []
    for rank in ranks:
        found = _least(rank, mine[rank], sizes, peak, most)
        if found is None:
            return None
        least.append(found)
    while True:
        shared = share_out(longest, each, sizes, mine, least)
        short = [rank for rank in ranks if peak(rank, shared) > most]
        if not short:
            return shared
        for rank in short:  # this distribution needs more than the one of the bisection
            least[rank] += 1
            if least[rank] > sum(sizes[stage] for stage in mine[rank]):
                return None


def _least(rank: int, mine: list[int], sizes: list[int], peak: object, most: float) -> int | None:
    """Return the fewest recomputed layers with which a rank fits, spread over its stages."""
    assert callable(peak)

    def fits(number: int) -> bool:
        return float(peak(rank, spread(number, mine, sizes))) <= most

    high = sum(sizes[stage] for stage in mine)
    if fits(0):
        return 0
    if not fits(high):
        return None
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def spread(number: int, mine: list[int], sizes: list[int]) -> tuple[int, ...]:
    """Return recomputed layers of each stage: ``number`` layers in turn over the stages ``mine``.

    >>> spread(5, [0, 2], [4, 4, 2])
    (3, 0, 2)
    """
    shared = [0] * len(sizes)
    while number:
        for stage in mine:
            if number and shared[stage] < sizes[stage]:
                shared[stage] += 1
                number -= 1
    return tuple(shared)


def spread_over(least: list[int], mine: list[list[int]], count: int) -> tuple[int, ...]:
    """Return recomputed layers of each stage if every rank has one stage or recomputes none."""
    shared = [0] * count
    for number, stages in zip(least, mine, strict=True):
        shared[stages[0]] = number
    return tuple(shared)


def _seconds(pricing: Pricing, ranges: Ranges) -> tuple[list[float], list[float]]:
    """Return seconds of each stage without recomputation, and of one recomputed layer of it."""
    plan, model = pricing.plan, pricing.scenario.model
    owner = ranks_of_stages(plan)
    without, each = [], []
    found: dict[int, tuple[float, float]] = {}
    for rank in owner:
        if rank not in found:
            layers = sum(b - a for (a, b), r in zip(ranges, owner, strict=True) if r == rank)
            seconds = []
            for by_stage in ((0,) * len(owner), tuple(b - a for a, b in ranges)):
                recomputed = recomputed_layers(plan, by_stage)
                contents = contents_of_rank(model, ranges, owner, rank, recomputed=recomputed)
                seconds.append(one(pricing.seconds(contents).microbatch))
            found[rank] = seconds[0] / plan.virtual_stages, (seconds[1] - seconds[0]) / layers
        without.append(found[rank][0])
        each.append(found[rank][1])
    return without, each


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
