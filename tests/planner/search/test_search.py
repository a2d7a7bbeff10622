from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import planner
from cost_models.legality.rules import CODES, legality_codes
from cost_models.memory.allocator import most_over_typical
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.uncertainty import MEMORY, peak_interval, verdict_spread
from hardware_profiles.errors import NoLegalPlanError
from planner.advice.refusal import no_plan
from planner.assessment.assess import assess
from planner.assessment.verdict import (
    LARGEST_SHARE_KEPT,
    MOST_KEPT,
    VERDICTS,
    budget_bytes,
    memory_budget,
    verdict,
    verdict_codes,
)
from planner.search.feasible import verdicts_of
from planner.search.search import search
from planner.search.space import enumerate_plans
from tests.samples import all_plans, learned, llama, make_scenario, with_memory


def priced_one_by_one(scenario: Scenario) -> list[tuple[int, float, float, Plan]]:
    """Verdict, step and peak of every legal candidate, each row with the formulas of ``fit``.

    (That a table costs what its rows cost alone is tested with ``price``.)
    """
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    legal = table.rows(legality_codes(scenario, table) == 0).plain()
    priced, budget = price(scenario, legal), budget_bytes(scenario.cluster)
    codes = verdict_codes(*peak_interval(priced.peak, priced.typical_peak, MEMORY), budget)
    return list(zip(codes.tolist(), priced.step.tolist(), priced.peak.tolist(), legal, strict=True))


TIGHT_LLAMA = llama(hidden_size=1024, intermediate_size=4096, vocab_size=32000)


def test_a_search_below_some_seconds_finds_what_the_whole_one_does() -> None:
    scenario = make_scenario(TIGHT_LLAMA, "4xA100-80GB", global_batch_size=4, seq_len=512)
    scenario = with_memory(scenario, 3.7e9)
    whole = search(scenario, top=1)
    step = whole.seconds[0]
    assert whole.fits
    for below in (1.001 * step, 2.0 * step):
        found = search(scenario, top=1, below=below)
        assert (found.plans, found.seconds, found.fits) == (whole.plans, whole.seconds, True)
    assert not search(scenario, top=1, below=step).plans


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "cluster", "capacity"),
    [
        ("llama", "4xA100-80GB", None),
        pytest.param("llama tied", "2x4xH100-SXM", None, marks=pytest.mark.slow),
        pytest.param("mixtral", "4xA100-80GB", None, marks=pytest.mark.slow),
        (TIGHT_LLAMA, "4xA100-80GB", 3.9e9),  # most plans are too large
        pytest.param(TIGHT_LLAMA, "4xA100-80GB", 4.8e9, marks=pytest.mark.slow),
    ],
    ids=["llama", "tied", "mixtral", "little memory", "enough memory"],
)
def test_the_best_plans_are_those_of_pricing_each_plan_alone(
    model: Any, cluster: str, capacity: float | None
) -> None:
    scenario = make_scenario(model, cluster, global_batch_size=4, seq_len=512)
    if capacity is not None:
        scenario = with_memory(scenario, capacity)
    alone = priced_one_by_one(scenario)
    result = search(scenario, top=20)
    usable = sorted((row for row in alone if row[0] < 2), key=lambda row: row[:3])
    best = [row for row in usable if row[0] == usable[0][0]][:20]
    chosen = [next(row for row in alone if row[3] == plan) for plan in result.plans]
    assert [row[:3] for row in chosen] == [row[:3] for row in best]
    assert len(set(result.plans)) == len(result.plans)
    counts = result.counts
    assert counts.priced == len(alone)
    assert counts.too_large == sum(row[0] == 2 for row in alone)
    assert counts.tight == sum(row[0] == 1 for row in alone)
    assert counts.fitting == sum(row[0] == 0 for row in alone)
    assert result.smallest is not None
    assert min(row[2] for row in alone) == next(r[2] for r in alone if r[3] == result.smallest)


@pytest.mark.parametrize("of", [lambda usual: usual, learned], ids=["published", "learned"])
def test_the_best_of_the_nested_loops_is_found(of: Callable[[Scenario], Scenario]) -> None:
    """A second brute force that does not use our enumeration."""
    scenario = of(make_scenario("llama", "4xA100-80GB", global_batch_size=8))
    table = PlanTable.from_plans(list(all_plans(scenario)))
    legal = table.rows(legality_codes(scenario, table) == 0)
    fastest = float(np.min(price(scenario, legal).step))
    best = search(scenario, top=1).plans[0]
    assert float(price(scenario, PlanTable.from_plans([best])).step[0]) == fastest


def test_counts_add_up() -> None:
    counts = search(make_scenario("llama", "8xA100-80GB")).counts
    assert counts.enumerated == sum(counts.illegal.values()) + counts.priced
    assert counts.priced == counts.too_large + counts.tight + counts.fitting
    assert set(counts.illegal) <= set(CODES) - {"legal"}
    assert min(counts.illegal.values()) > 0
    assert list(counts.illegal.values()) == sorted(counts.illegal.values(), reverse=True)


def test_the_page_of_the_search_counts_one() -> None:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "search.md"
    counts = planner.plan("llama-3-8b", "8xA100-80GB").to_dict()["search"]
    kinds = ("enumerated", "priced", "too_large", "tight", "simulated", "bounded_away")
    numbers = [*counts["illegal"].values(), *(counts[kind] for kind in kinds)]
    example = page.read_text(encoding="utf-8").split("## Why the answer is exact")[0]
    assert [number for number in numbers if f"{number:,}" not in example] == []


@pytest.mark.slow
def test_a_larger_top_only_adds_plans() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    ten, three = search(scenario, top=10).plans, search(scenario, top=3).plans
    assert ten[:3] == three
    assert len(ten) == 10


@pytest.mark.slow
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    whole = search(scenario)
    monkeypatch.setattr("planner.search.space.SLAB", 17)
    monkeypatch.setattr("cost_models.pricing.plan_groups.AT_ONCE", 500)
    chunked = search(scenario)
    assert chunked.plans == whole.plans
    assert chunked.counts == structs.replace(whole.counts, seconds=chunked.counts.seconds)


def test_pinned_parts_stay() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    fixed = {"tensor_parallel": 2, "zero_stage": 1, "recompute": "full"}
    plans = search(scenario, fixed).plans
    assert plans
    for plan in plans:
        assert {name: getattr(plan, name) for name in fixed} == fixed


@pytest.mark.slow
def test_plans_that_fit_come_before_tight_ones() -> None:
    """Where nothing fits with its whole interval, the answer is tight as a whole."""
    scenario = make_scenario(TIGHT_LLAMA, "4xA100-80GB", global_batch_size=8, seq_len=512)
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    legal = table.rows(legality_codes(scenario, table) == 0)
    smallest = float(price(scenario, legal).peak.min())
    tight = with_memory(scenario, smallest)
    result = search(tight)
    assert result.plans
    assert result.counts.fitting == 0
    budget = budget_bytes(tight.cluster)
    priced = price(tight, PlanTable.from_plans(list(result.plans)))
    ends = peak_interval(priced.peak, priced.typical_peak, MEMORY)
    assert set(verdict_codes(*ends, budget).tolist()) == {VERDICTS.index("tight")}


@pytest.mark.slow
def test_where_nothing_fits_there_is_no_plan_and_the_reasons_are_the_largest() -> None:
    scenario = with_memory(make_scenario("llama", "2xA100-80GB"), 1e6)
    result = search(scenario)
    assert result.plans == ()
    assert result.counts.too_large == result.counts.priced > 0
    message = str(no_plan(scenario, result))
    assert "one copy of weights and optimizer states takes " in message
    every = result.counts.enumerated  # no plan holds even that copy
    numbers = [every, *result.counts.illegal.values(), result.counts.too_large]
    removed = sorted(numbers, reverse=True)
    shown = [line.split()[0] for line in message.splitlines() if " candidates: " in line[:40]]
    assert shown == [f"{number:,}" for number in removed[: len(shown)]]
    assert 1 <= len(shown) <= 3
    assert "0 fit" in message


def test_an_illegal_pin_is_explained_by_its_rule() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    result = search(scenario, {"tensor_parallel": 8})
    assert result.plans == ()
    assert result.smallest is None
    words = " ".join(str(no_plan(scenario, result)).split())
    assert "does not divide num_kv_heads = 4; legal values: 1, 2, 4" in words


def test_a_pin_that_leaves_no_candidate_says_so() -> None:
    from planner.api.plan import plan

    with pytest.raises(NoLegalPlanError) as caught:
        plan("llama-3.2-1b", "8xA100-80GB", fix="tp=3", seq_len=128)
    assert "tensor_parallel 3" in str(caught.value)
    assert "8 ranks" in str(caught.value)


# --- verdicts at the borders ----------------------------------------------------------------------


def test_verdicts_at_the_borders() -> None:
    budget = 1e9
    upper, lower = budget / (1 + MEMORY.above), budget / (1 - MEMORY.below)
    peaks = np.array(
        [upper * (1 - 1e-9), upper * (1 + 1e-9), budget, lower * (1 - 1e-9), lower * (1 + 1e-9)]
    )
    words = ["fits", "tight", "tight", "tight", "does_not_fit"]
    for peak, expected in zip(peaks.tolist(), words, strict=True):
        assert verdict(*peak_interval(peak, peak, MEMORY), budget) == expected
    # the cautious peak is over the budget by more than the spread, the typical one is not
    assert verdict(*peak_interval(1.2 * lower, 0.99 * lower, MEMORY), budget) == "tight"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("software", ["shardplan", "torch-trainer", "megatron"])
def test_the_search_judges_as_fit_does(software: str) -> None:
    """Verdicts of a table are those of its plans; budgets cut between cautious and typical."""
    scenario = make_scenario(seq_len=512, global_batch_size=8, software=software)
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    legal = table.rows(legality_codes(scenario, table) == 0).plain()
    priced = price(scenario, legal)
    row = int(np.argmax(priced.peak / priced.typical_peak))
    peak, typical = float(priced.peak[row]), float(priced.typical_peak[row])
    assert typical < peak <= most_over_typical(scenario.software) * typical
    # a budget below the low end of the cautious peak, and above that of the typical one
    between = (1.0 - verdict_spread(software).below) * 0.5 * (typical + peak)
    capacity = min(between / (1.0 - LARGEST_SHARE_KEPT), between + MOST_KEPT)
    cut = with_memory(scenario, capacity)
    some = legal.rows(np.append(np.arange(0, len(legal), len(legal) // 40), row))
    own = [VERDICTS.index(assess(cut, plan).verdict) for plan in some]
    assert verdicts_of(cut, legal)[1][row] == own[-1] == VERDICTS.index("tight")
    assert verdicts_of(cut, some)[1].tolist() == own


def test_the_budget_is_what_a_process_can_get() -> None:
    scenario = make_scenario()
    chip = scenario.cluster.accelerator
    capacity = chip.memory_capacity.value
    assert chip.name == "A100-SXM-80GB"
    assert budget_bytes(scenario.cluster) == 79.25 * 2**30
    unknown = replace(chip, usable_memory=None)
    assert memory_budget(unknown).size == capacity - 0.75 * 2**30
    assert memory_budget(unknown).kind == "assumed"
    # a figure of another card
    smaller = replace(chip, memory_capacity=replace(chip.memory_capacity, value=10e9))
    assert memory_budget(smaller).size == 0.97 * 10e9
    cpu = replace(chip, device="cpu")
    assert budget_bytes(replace(scenario.cluster, accelerator=cpu)) == 0.9 * capacity


@pytest.mark.slow
def test_the_front_is_that_of_comparing_every_pair() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    pinned = {"recompute_layers": 0}  # with some of the layers: test_exact_search
    every = search(scenario, pinned, top=100_000).plans
    priced = price(scenario, PlanTable.from_plans(list(every)))
    points = list(zip(priced.step.tolist(), priced.peak.tolist(), strict=True))
    best = {
        (step, peak)
        for step, peak in points
        if not any(s <= step and m <= peak and (s, m) != (step, peak) for s, m in points)
    }
    found = search(scenario, pinned, front=True).plans
    on_front = price(scenario, PlanTable.from_plans(list(found)))
    assert set(zip(on_front.step.tolist(), on_front.peak.tolist(), strict=True)) == best
    assert len(found) == len(best) > 1
    assert on_front.step.tolist() == sorted(on_front.step.tolist())
