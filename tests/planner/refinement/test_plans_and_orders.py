"""The best plan in the best order of ranks, against every plan in every order of small trees."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.cluster.cluster_file import with_levels
from hardware_profiles.cluster.links.nvlink_domains import exchange_bandwidth
from hardware_profiles.cluster.links.tree import (
    ANY_ORDER,
    neighbour_link,
    ring_link,
    with_bandwidths,
)
from hardware_profiles.cluster.schema import Cluster
from planner.advice.trainers import best_of_trainers
from planner.refinement import placement
from planner.refinement.best_partition import best_staged
from planner.refinement.placed_plan import grid_of, ordered_step
from planner.refinement.placement import GAIN, best_placed, placed_front
from planner.request.objectives import pareto_front
from planner.search.search import SearchResult, search
from planner.search.space import enumerate_plans
from tests.planner.refinement.test_placement import random_tree
from tests.samples import make_scenario, sample_model

PINS: dict[str, Any] = {"micro_batch_size": 1, "context_parallel": 1}
LAYERS = {"num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 4096}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(30))
def test_no_order_has_faster_links_than_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_gpus = int(rng.choice([4, 5, 6]))
    cluster = random_tree(rng, num_gpus)
    bounds = replace(cluster, rank_order=ANY_ORDER)
    orders = list(itertools.permutations(range(num_gpus)))
    sizes = [n for n in range(2, num_gpus + 1) if num_gpus % n == 0]
    for size, link in itertools.product(sizes, (ring_link, neighbour_link)):
        for stride in (1, num_gpus // size):
            found = [
                link(replace(cluster, rank_order=order), size, stride, num_gpus) for order in orders
            ]
            best = link(bounds, size, stride, num_gpus)
            assert best.bandwidth >= max(one.bandwidth for one in found)
            assert best.latency <= min(one.latency for one in found)
            assert best.hop <= min(one.hop for one in found) * (1.0 + 1e-12)
    for size, copies in itertools.product(sizes, (0, 2)):
        for stride in (1, num_gpus // size):
            every = [
                float(
                    exchange_bandwidth(
                        replace(cluster, rank_order=order), size, stride, copies=copies
                    )
                )
                for order in orders
            ]
            best = float(exchange_bandwidth(bounds, size, stride, copies=copies))
            assert best >= max(every) * (1.0 - 1e-12)


def slow_tree(rng: np.random.Generator, num_gpus: int) -> Cluster:
    """Return a random tree with links of 1 to 20 GB/s and of 5 to 100 us."""
    tree = random_tree(rng, num_gpus)
    levels = [
        replace(
            with_bandwidths(level, 2e8),
            latency=tuple(replace(late, value=1e-3 * late.value) for late in level.latency),
        )
        for level in tree.levels
    ]
    return with_levels(tree, tuple(levels))


def small(seed: int, num_gpus: int, model: str) -> Scenario:
    """A small model on a random tree."""
    scenario = make_scenario(
        sample_model(model, **LAYERS), "8xL40S", seq_len=512, global_batch_size=16
    )
    return replace(scenario, cluster=slow_tree(np.random.default_rng(seed), num_gpus))


def searched(scenario: Scenario, top: int, below: float) -> SearchResult:
    """Return the fastest plans of a scenario, as ``best_placed`` asks for them."""
    return search(scenario, PINS, top=top, below=below)


def in_every_order(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the scenario with each order of four accelerators, the default order first."""
    for rest in itertools.permutations((1, 2, 3)):
        yield replace(scenario, cluster=replace(scenario.cluster, rank_order=(0, *rest)))


def placed(scenario: Scenario, *, stages: bool) -> tuple[float, float]:
    """Return the best steps in seconds: in the default order, and with an order of its own."""
    usual = search(scenario, PINS, top=10, with_near=stages)
    staged = best_staged(scenario, usual.plans, usual.near, usual.seconds[0]) if stages else None
    found = best_placed(scenario, usual.plans, staged, searched, usual.near)
    before = usual.seconds[0] if staged is None else staged.step
    if found is None:
        return before, before
    assert found.proven
    assert found.step == pytest.approx(
        ordered_step(found.scenario, found.plan, found.order), rel=1e-9
    )
    return before, found.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "seed"), [("llama", 7), ("mixtral", 7), ("llama", 3), ("llama", 0)]
)
def test_the_best_plan_and_order_equal_brute_force(seed: int, model: str) -> None:
    scenario = small(seed, 4, model)
    table = enumerate_plans(scenario.model, scenario.workload, 4, PINS, every_cut=True)
    table = table.rows(legality_codes(scenario, table) == 0)
    steps = []
    for own in in_every_order(scenario):
        steps.append(above(price(own, table).step, simulated_steps(own, table)).min())
    before, found = placed(scenario, stages=False)
    assert before == pytest.approx(steps[0], rel=1e-9)
    assert found <= min(steps) * (1.0 + 1e-9) / (1.0 - GAIN)
    assert found >= min(steps) * (1.0 - 1e-9)
    assert (found < 0.95 * before) == (seed > 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "seed"), [("llama", 7), ("mixtral", 7), ("llama", 3), ("llama", 0)]
)
def test_the_front_in_every_order_equals_brute_force(seed: int, model: str) -> None:
    scenario, pins = small(seed, 4, model), {**PINS, "recompute_layers": 0}
    table = enumerate_plans(scenario.model, scenario.workload, 4, pins, every_cut=True)
    table = table.rows(legality_codes(scenario, table) == 0)
    peak = price(scenario, table).peak
    steps = [
        above(price(own, table).step, simulated_steps(own, table))
        for own in in_every_order(scenario)
    ]
    step = np.min(steps, axis=0)

    usual = search(scenario, pins, front=True)
    orders = placed_front(
        scenario,
        usual,
        pins,
        lambda own, known, grids: search(own, pins, front=True, known=known, require=[grids]),
    )
    assert all(one.proven for one in orders)
    peaks = [*price(scenario, PlanTable.from_plans(usual.plans)).peak]
    peaks += [float(price(scenario, PlanTable.from_plans([one.plan])).peak[0]) for one in orders]
    seconds = [*usual.seconds, *(one.step for one in orders)]
    for row in pareto_front(step, peak).tolist():
        fastest = min(s for s, p in zip(seconds, peaks, strict=True) if p <= peak[row])
        assert step[row] * (1.0 - 1e-9) <= fastest <= step[row] * (1.0 + 1e-9) / (1.0 - GAIN)
    assert bool(orders) == (seed > 0)


def test_a_plan_that_is_second_in_the_default_order_wins_with_its_own() -> None:
    scenario = small(7, 4, "llama")
    usual = search(scenario, PINS, top=40)
    found = best_placed(scenario, usual.plans, None, searched)
    assert found is not None
    assert found.rank is not None
    before = usual.plans[: found.rank]
    assert grid_of(found.plan) in map(grid_of, before)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 7])
def test_stages_are_chosen_in_every_order(seed: int) -> None:
    scenario = small(seed, 4, "llama")
    best = []
    for own in in_every_order(scenario):
        usual = search(own, PINS, top=10, with_near=True)
        staged = best_staged(own, usual.plans, usual.near, usual.seconds[0])
        best.append(usual.seconds[0] if staged is None else staged.step)
    before, found = placed(scenario, stages=True)
    assert before == pytest.approx(best[0], rel=1e-9)
    assert min(best) * (1.0 - 2 * GAIN) <= found <= min(best) * (1.0 + 2 * GAIN)


@pytest.mark.slow
def test_the_best_of_each_trainer_is_that_of_all_orders() -> None:
    scenario = small(7, 4, "llama")
    best: dict[str, float] = {}
    for own in in_every_order(scenario):
        for one in best_of_trainers(own, PINS):
            seconds = one.step_seconds
            best[one.software] = min(seconds, best.get(one.software, seconds))
    found = {one.software: one for one in best_of_trainers(scenario, PINS)}
    assert {name: one.step_seconds for name, one in found.items()} == pytest.approx(
        best, rel=2 * GAIN
    )
    assert any(one.order is not None for one in found.values())


def test_larger_trees_try_a_few_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """With at most four accelerators searched exactly, six have an order that is no worse."""
    monkeypatch.setattr(placement, "EXACT", 4)
    scenario = small(8, 6, "llama")
    usual = search(scenario, PINS, top=10)
    found = best_placed(scenario, usual.plans, None, searched)
    assert found is None or (found.step < usual.seconds[0] and not found.proven)
