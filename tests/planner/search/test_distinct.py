from typing import Any

import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from planner.search.distinct import degrees_of
from planner.search.search import SearchResult, search
from planner.search.simplicity import CLOSE, complexity
from tests.samples import llama, make_scenario, with_memory

NAMES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
MOST = 5
TIGHT_LLAMA = llama(hidden_size=1024, intermediate_size=4096, vocab_size=32000)
CASES: dict[str, Any] = {
    "llama": ("llama", "8xA100-80GB", None),
    "mixtral": pytest.param(("mixtral", "8xA100-80GB", None), marks=pytest.mark.slow),
    "little memory": (TIGHT_LLAMA, "8xA100-80GB", 4.6e9),  # plans that recompute some layers win
}


def scenario_of(model: Any, cluster: str, capacity: float | None) -> Scenario:
    scenario = make_scenario(model, cluster, seq_len=2048, global_batch_size=16)
    return scenario if capacity is None else with_memory(scenario, capacity)


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def found(request: pytest.FixtureRequest) -> tuple[Scenario, SearchResult]:
    model, cluster, capacity = request.param
    scenario = scenario_of(model, cluster, capacity)
    return scenario, search(scenario, top=3, distinct=MOST)


def pins(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in NAMES}


def test_the_answer_is_exact(found: tuple[Scenario, SearchResult]) -> None:
    """Its ties, its fastest plans and the best plan of each split are those of plain searches."""
    scenario, result = found
    every = search(scenario, top=2000)
    assert every.fits
    assert result.seconds[:3] == every.seconds[:3]
    near = [step for step in every.seconds if step <= (1.0 + CLOSE) * every.seconds[0]]
    assert list(result.seconds[: len(near)]) == near
    best: dict[tuple[int, ...], float] = {}
    for step, plan in zip(every.seconds, every.plans, strict=True):
        best.setdefault(tuple(pins(plan).values()), step)
    mine: dict[tuple[int, ...], float] = {}
    for step, plan in zip(result.seconds, result.plans, strict=True):
        mine.setdefault(tuple(pins(plan).values()), step)
    assert list(mine.items())[:MOST] == list(best.items())[:MOST]


def test_rows_differ_in_their_degrees_and_the_simplest_of_a_tie_is_first(
    found: tuple[Scenario, SearchResult],
) -> None:
    _, result = found
    shown = result.simplest_first()
    rows = [tuple(pins(plan).values()) for plan in shown.plans]
    firsts = len(set(rows))
    assert len(set(rows[:firsts])) == firsts
    assert shown.seconds[1:firsts] == tuple(sorted(shown.seconds[1:firsts]))
    tie = shown.tie
    assert tie is not None
    assert (tie.fastest, tie.seconds) == (result.plans[0], result.seconds[0])
    assert shown.seconds[0] <= (1.0 + CLOSE) * tie.seconds
    tied = result.plans[: tie.plans]
    assert complexity(shown.plans[0]) == min(map(complexity, tied))
    assert set(shown.plans) == set(result.plans)


def test_pins_do_not_improve_the_fastest_plan(found: tuple[Scenario, SearchResult]) -> None:
    scenario, result = found
    for plan in result.plans[-1:]:
        pinned = search(scenario, pins(plan), top=1, distinct=1)
        assert pinned.seconds[0] >= result.seconds[0]


def test_numbers_of_degrees_are_distinct() -> None:
    plans = [
        Plan(1, tensor_parallel=t, pipeline_parallel=p, context_parallel=c, expert_parallel=e)
        for t in (1, 2, 8, 2**19)
        for p in (1, 2, 126)
        for c in (1, 2)
        for e in (1, 2, 256)
    ]
    codes = degrees_of(PlanTable.from_plans(plans))
    assert len(set(codes.tolist())) == len(plans)
    assert [int(degrees_of(plan)) for plan in plans] == codes.tolist()
