"""The winner is that of pricing and simulating every legal plan, one by one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cost_models.legality.rules import legality_codes
from cost_models.partition.schedules import LOOPED_CODES
from cost_models.plan.plan import OFFLOADS, SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.pricing.estimate import price, price_memory
from cost_models.pricing.simulated_steps import above, simulated_steps
from cost_models.pricing.table import price_table
from cost_models.scenario import Scenario
from cost_models.uncertainty import peak_interval
from planner.assessment.host_memory import host_codes
from planner.assessment.verdict import (
    LARGEST_SHARE_KEPT,
    MOST_KEPT,
    budget_bytes,
    plan_verdict_spread,
    verdict_codes,
)
from planner.request.constraints import parse_requirements
from planner.request.objectives import pareto_front
from planner.search.search import search
from planner.search.sources.exhaustive_recompute import KEPT
from planner.search.sources.partial_recompute import FULL, peaks_without
from planner.search.space import enumerate_plans
from tests.samples import examples, llama, make_scenario, sample_model, with_memory

FEWEST_PLANS = 500
CLOSE = 1e-12


@st.composite
def problems(draw: Any) -> Scenario:
    """A small model on eight accelerators, of which some plans may not fit."""
    name = draw(st.sampled_from(["llama", "llama tied", "gpt2", "mixtral", "t5", "wide"]))
    model = sample_model(name) if name != "wide" else llama(hidden_size=512, vocab_size=32_000)
    cluster = draw(st.sampled_from(["8xA100-80GB", "2x4xH100-SXM", "8xA100-40GB"]))
    scenario = make_scenario(
        model,
        cluster,
        seq_len=draw(st.sampled_from([64, 256, 512])),
        global_batch_size=draw(st.sampled_from([16, 24, 32])),
        software=draw(st.sampled_from(["shardplan", "megatron-core"])),
        target_seq_len=draw(st.sampled_from([0, 48, 800])) if name == "t5" else 0,
    )
    return with_share(scenario, draw(st.sampled_from([1.0, 0.1, 0.06, 0.04])))


def with_share(scenario: Scenario, share: float) -> Scenario:
    return with_memory(scenario, share * scenario.cluster.accelerator.memory_capacity.value)


def verdicts(scenario: Scenario, table: PlanTable) -> Any:
    peak, typical, _ = price_memory(scenario, table)
    around = plan_verdict_spread(scenario)
    return verdict_codes(*peak_interval(peak, typical, around), budget_bytes(scenario.cluster))


def brute_force(scenario: Scenario, legal: PlanTable) -> tuple[int, float, float]:
    """Verdict, simulated step and peak of the best plan."""
    priced = price(scenario, legal)
    simulated = simulated_steps(scenario, legal)
    assert (simulated >= priced.step * (1 - CLOSE)).all()  # the bound is one
    step = np.where(simulated <= priced.step * (1 + CLOSE), priced.step, simulated)
    codes = verdicts(scenario, legal)
    best = np.lexsort((priced.peak, step, codes))[0]
    return int(codes[best]), float(step[best]), float(priced.peak[best])


def legal_plans(scenario: Scenario, table: PlanTable, pinned: dict[str, Any]) -> PlanTable:
    """Return legal ones of enumerated plans and of those with other numbers of stages a rank."""
    tables = [table]
    if "virtual_stages" not in pinned:
        looped = table.rows(np.isin(table.pipeline_schedule, LOOPED_CODES))
        two = looped.rows(looped.virtual_stages == 2)
        for number in range(3, scenario.model.num_layers + 1):
            tables.append(replace(two, virtual_stages=np.full(len(two), number)))
    every = PlanTable.from_plans(list(dict.fromkeys(plan for one in tables for plan in one)))
    return every.rows(legality_codes(scenario, every) == 0)


def every_smaller_number(scenario: Scenario, legal: PlanTable) -> PlanTable:
    """Return the plans that recompute all layers, fitting or not, with every number of layers."""
    every = legal.rows(legal.recompute == FULL)
    smallest = scenario.model.num_layers // (every.pipeline_parallel * every.virtual_stages)
    more = every.rows(np.repeat(np.arange(len(every)), smallest))
    first = np.repeat(np.cumsum(smallest) - smallest, smallest)
    return replace(more, recompute_layers=np.arange(len(more)) - first + 1)


def with_fewer_recomputed(
    scenario: Scenario, legal: PlanTable, best: tuple[int, float, float]
) -> tuple[int, float, float]:
    """The same with every number of layers, too, whether all of them would fit or not.

    All are priced; those whose bound is longer than the best step without them need no simulation.
    """
    code, step, _ = best
    more = every_smaller_number(scenario, legal)
    priced = price_table(scenario, more)
    codes = verdicts(scenario, more)
    more = more.rows((codes < 2) & ((codes < code) | (codes == code) & (priced.step <= step)))
    return min(best, brute_force(scenario, more)) if len(more) else best


def check(scenario: Scenario) -> None:
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    legal = table.rows(legality_codes(scenario, table) == 0)
    assume(len(legal) >= FEWEST_PLANS)
    axes = ("data_parallel", "tensor_parallel", "pipeline_parallel")
    assert all(len(np.unique(getattr(legal, axis))) > 1 for axis in axes)
    found = search(scenario, top=1)
    brute = with_fewer_recomputed(scenario, legal, brute_force(scenario, legal))
    if brute[0] == 2:
        assert not found.plans
        return
    code, step, peak = brute
    best = PlanTable.from_plans([found.plans[0]])
    priced, simulated = price(scenario, best), simulated_steps(scenario, best)
    assert max(priced.step[0], simulated[0]) == pytest.approx(step, rel=CLOSE)
    assert priced.peak[0] == pytest.approx(peak, rel=CLOSE)
    assert verdicts(scenario, best)[0] == code
    counts = found.counts
    assert counts.enumerated == len(table)
    assert counts.priced == len(legal)
    rivals = counts.fitting if counts.fitting else counts.tight
    assert counts.simulated + counts.bounded_away <= rivals + counts.part_recomputed


RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(problems())
@settings(max_examples=examples(25), **RELAXED)  # type: ignore[arg-type]
def test_the_winner_is_that_of_brute_force(scenario: Scenario) -> None:
    check(scenario)


def test_fronts_and_the_smallest_are_those_of_brute_force() -> None:
    """Time is the simulated step there, too: the front, and among equal peaks the order."""
    scenario = make_scenario("llama", "8xA100-80GB", global_batch_size=32)
    pinned = {"sequence_parallel": False, "recompute": "none"}
    table = enumerate_plans(scenario.model, scenario.workload, 8, pinned)
    legal = table.rows(legality_codes(scenario, table) == 0)
    peak, steps = price_table(scenario, legal).peak, simulated_steps(scenario, legal)
    step = above(price(scenario, legal).step, steps)
    fits = np.flatnonzero(verdicts(scenario, legal) == 0)

    def of(plans: tuple[Plan, ...]) -> list[tuple[float, float]]:
        rows = [next(i for i in fits if legal.plan(i) == plan) for plan in plans]
        return [(float(step[row]), float(peak[row])) for row in rows]

    front = pareto_front(step[fits], peak[fits])
    found = search(scenario, pinned, front=True)
    assert of(found.plans) == [(float(step[fits][i]), float(peak[fits][i])) for i in front]
    assert found.counts.simulated + found.counts.bounded_away <= len(fits)
    assert found.counts.simulated < len(fits) / 2
    smallest = np.lexsort((step[fits], peak[fits]))[:20]
    found = search(scenario, pinned, objective="memory", top=20)
    assert of(found.plans) == [(float(step[fits][i]), float(peak[fits][i])) for i in smallest]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("words", "objective"), [("step<={}s", "memory"), ("step>={}s", "time")])
def test_constraints_on_the_step_are_about_the_simulated_one(words: str, objective: Any) -> None:
    """Not about its lower bound: between the two lie plans that would be shown, or left out."""
    scenario = make_scenario("t5", global_batch_size=96)
    pinned = {"sequence_parallel": False, "recompute": "none", "pipeline_parallel": 4}
    table = enumerate_plans(scenario.model, scenario.workload, 8, pinned)
    legal = table.rows(legality_codes(scenario, table) == 0)
    bound = price(scenario, legal).step
    step = above(bound, simulated_steps(scenario, legal))
    peak = price_table(scenario, legal).peak
    for row in np.argsort(bound / step)[:1]:  # where the two are far apart
        assert bound[row] < (1.0 - 1e-6) * step[row]
        limit = (bound[row] + step[row]) / 2.0
        keeps = step <= limit if "<=" in words else step >= limit
        assert keeps[row] != (bound[row] <= limit if "<=" in words else bound[row] >= limit)
        text = words.format(f"{limit:.12f}")
        found = search(scenario, pinned, require=parse_requirements(text), objective=objective)
        keys = (step, peak) if objective == "memory" else (peak, step)
        best = int(np.flatnonzero(keeps)[np.lexsort([key[keeps] for key in keys])[0]])
        (one,) = price(scenario, PlanTable.from_plans(found.plans[:1])).peak
        (seconds,) = simulated_steps(scenario, PlanTable.from_plans(found.plans[:1]))
        assert one == pytest.approx(peak[best], rel=CLOSE)
        assert seconds == pytest.approx(step[best], rel=1e-9)


@pytest.mark.slow
def test_a_bound_that_is_no_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps in closed form that are too long the first one that is simulated would win."""
    scenario = make_scenario("llama", "8xA100-80GB", global_batch_size=32)
    table = enumerate_plans(scenario.model, scenario.workload, 8, {})
    legal = table.rows(legality_codes(scenario, table) == 0)
    from cost_models.step_time import pipeline_bound as pipeline_time

    honest = pipeline_time.BOUNDS["1f1b"]
    monkeypatch.setitem(pipeline_time.BOUNDS, "1f1b", lambda x: 1.5 * honest(x))
    with pytest.raises(AssertionError):
        brute_force(scenario, legal)


def check_fewer_recomputed(scenario: Scenario, data: Any) -> None:
    """One grid of ranks, and memory with which a plan of it fits that recomputes some layers."""
    pinned = {
        "tensor_parallel": data.draw(st.sampled_from([1, 2])),
        "pipeline_parallel": data.draw(st.sampled_from([1, 2, 4])),
        "dp_replicate": 1,
    }
    table = enumerate_plans(scenario.model, scenario.workload, 8, pinned)
    legal = legal_plans(scenario, table, pinned)
    assume(len(legal))
    row = data.draw(st.integers(0, len(legal) - 1))
    few = PlanTable.from_plans(
        [replace(legal.plan(row), recompute=word) for word in ("none", "full")]
    )
    without, whole = price(scenario, few).peak
    between = whole + data.draw(st.sampled_from([0.1, 0.4, 0.8])) * (without - whole)
    check_numbers(with_most(scenario, between), pinned, legal)


def with_most(scenario: Scenario, peak: float) -> Scenario:
    """Return the scenario with accelerators that a plan of such a peak just fits in."""
    budget = peak * (1.0 + plan_verdict_spread(scenario).above) * (1.0 + 1e-6)
    capacity = min(budget / (1.0 - LARGEST_SHARE_KEPT), budget + MOST_KEPT)
    found = with_memory(scenario, capacity)
    assert budget_bytes(found.cluster) == pytest.approx(budget)
    return found


def check_numbers(scenario: Scenario, pinned: dict[str, Any], legal: PlanTable) -> None:
    """Compare the winner with brute force over every number of layers."""
    found = search(scenario, pinned, top=1)
    code, step, peak = with_fewer_recomputed(scenario, legal, brute_force(scenario, legal))
    assert code < 2
    best = PlanTable.from_plans([found.plans[0]])
    priced, simulated = price(scenario, best), simulated_steps(scenario, best)
    assert max(priced.step[0], simulated[0]) == pytest.approx(step, rel=CLOSE)
    assert priced.peak[0] == pytest.approx(peak, rel=CLOSE)
    assert verdicts(scenario, best)[0] == code


SPLIT = {"pipeline_parallel": 2, "tensor_parallel": 2}
# small heads, so that layers are what is fullest; and grids of ranks
NARROW: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "llama": ({"hidden_size": 512, "vocab_size": 1000}, ({"pipeline_parallel": 1}, SPLIT)),
    "t5": ({}, ({"pipeline_parallel": 1},)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "software"),
    [
        ("llama", "shardplan"),
        pytest.param("llama", "megatron-core", marks=pytest.mark.slow),
        pytest.param("t5", "megatron-core", marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_fits_only_with_some_layers_recomputed_is_found(
    name: str, software: str
) -> None:
    """What the last layer recomputes comes on top: without that less may be there at once.

    Under pipelines that split the backward pass, with one micro-batch in flight, and where the
    largest kind of layers need not be recomputed.
    """
    changes, grids = NARROW[name]
    model = sample_model(name, **changes)
    scenario = make_scenario(
        model, "8xA100-80GB", seq_len=1024, global_batch_size=32, software=software
    )
    seen = 0
    for pinned in grids:
        fixed = {"dp_replicate": 1, "sequence_parallel": False, "virtual_stages": 1, **pinned}
        fixed["context_parallel"] = 1
        table = enumerate_plans(scenario.model, scenario.workload, 8, fixed)
        legal = table.rows(legality_codes(scenario, table) == 0)
        more = every_smaller_number(scenario, legal)
        peak = price_table(scenario, more).peak
        with_all = price_table(scenario, replace(more, recompute_layers=0 * more.micro_batch_size))
        row = int(np.argmin(peak / with_all.peak))
        if peak[row] > (1.0 - 1e-4) * with_all.peak[row]:
            continue
        seen += 1
        one = more.plan(row)
        own = fixed | {
            part: getattr(one, part)
            for part in ("tensor_parallel", "zero_stage", "micro_batch_size", "pipeline_schedule")
        }
        tighter = with_most(scenario, float(peak[row]))
        assert not search(tighter, own | {"recompute_layers": 0}).counts.fitting
        found = search(tighter, own, top=1)
        assert found.counts.fitting == 0
        (best,) = found.plans
        assert best.recompute_layers > 0
        assert verdicts(tighter, PlanTable.from_plans([best])) == [0]
        check_numbers(tighter, fixed, legal)
    assert seen


@given(problems(), st.data())
@settings(max_examples=examples(3), **RELAXED)  # type: ignore[arg-type]
def test_the_winner_recomputes_as_few_layers_as_brute_force(scenario: Scenario, data: Any) -> None:
    check_fewer_recomputed(scenario, data)


@pytest.mark.slow
@given(problems(), st.data())
@settings(max_examples=examples(20), **RELAXED)  # type: ignore[arg-type]
def test_the_winner_recomputes_as_few_layers_as_brute_force_20_times(
    scenario: Scenario, data: Any
) -> None:
    check_fewer_recomputed(scenario, data)


ASKED: list[dict[str, Any]] = [
    {"front": True},
    {"objective": "memory", "top": 5},
    {"require": "memory>={}B", "top": 1},
    {"require": "step>={}s", "top": 1},
    {"offloads": ("none", "activations"), "top": 1},
    {"offloads": ("none", "activations"), "top": 1, "objective": "memory"},
]


def check_every_number(scenario: Scenario, pinned: dict[str, Any], asked: dict[str, Any]) -> None:
    """Price and simulate every legal plan with every number of recomputed layers."""
    asked = dict(asked)
    offloads = asked.get("offloads", ("none",))
    table = enumerate_plans(scenario.model, scenario.workload, 8, pinned, offloads=offloads)
    legal = legal_plans(scenario, table, pinned)
    assume(len(legal))
    whole = legal.rows(legal.recompute == FULL)
    stages = whole.pipeline_parallel * whole.virtual_stages
    smallest = scenario.model.num_layers // stages
    smallest -= smallest * stages == scenario.model.num_layers  # these are all
    more = whole.rows(np.repeat(np.arange(len(whole)), smallest))
    first = np.repeat(np.cumsum(smallest) - smallest, smallest)
    more = replace(more, recompute_layers=np.arange(len(more)) - first + 1)
    every = PlanTable.from_plans([*legal, *more])
    priced = price(scenario, every)
    peak, step = priced.peak, above(priced.step, simulated_steps(scenario, every))
    codes = verdicts(scenario, every)
    codes = np.maximum(codes, host_codes(scenario.cluster, priced.host))
    assume(codes.min() < 2)
    rows = np.flatnonzero(codes == codes.min())
    if "require" in asked:
        figures = peak if "memory" in asked["require"] else step
        limit = float(np.quantile(figures[rows], 0.8))  # (as written: rounded)
        asked["require"] = parse_requirements(asked["require"].format(f"{limit:.12f}"))
        rows = rows[asked["require"][0].holds(figures[rows])]
        assume(len(rows))
    found = search(scenario, pinned, **asked)
    plans = list(every)
    positions = [plans.index(plan) for plan in found.plans]
    got = [(float(step[i]), float(peak[i])) for i in positions]
    if asked.get("front"):
        front = rows[pareto_front(step[rows], peak[rows])]
        expected = [(float(step[i]), float(peak[i])) for i in front]
    elif asked.get("objective") == "memory":
        grid = [replace(plan, recompute_layers=int(plan.recompute_layers > 0)) for plan in plans]
        best: dict[Plan, int] = {}  # of each plan the number with the smallest peak is shown
        with_all = {plan: peak[i] for i, plan in enumerate(plans)}
        for i in rows[np.lexsort((step[rows], peak[rows]))].tolist():
            if peak[i] <= with_all[replace(plans[i], recompute_layers=0)] * (1 + 1e-9):
                best.setdefault(grid[i], i)
        expected = [(float(step[i]), float(peak[i])) for i in best.values()][: asked["top"]]
    else:
        i = rows[np.lexsort((peak[rows], step[rows]))[0]]
        expected = [(float(step[i]), float(peak[i]))]
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def draw_grid(data: Any) -> dict[str, Any]:
    return {
        "tensor_parallel": data.draw(st.sampled_from([1, 2])),
        "pipeline_parallel": data.draw(st.sampled_from([1, 2])),
        "dp_replicate": 1,
        "sequence_parallel": False,
        "zero_stage": data.draw(st.sampled_from([1, 3])),
    }


@pytest.mark.slow
@given(problems(), st.data())
@settings(max_examples=examples(4), **RELAXED)  # type: ignore[arg-type]
def test_every_number_of_layers_is_looked_at(scenario: Scenario, data: Any) -> None:
    """On fronts, with the objective memory, more of a result required, activations offloaded."""
    check_every_number(scenario, draw_grid(data), data.draw(st.sampled_from(ASKED)))


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
@given(scenario=problems(), data=st.data())
@settings(max_examples=examples(6), **RELAXED)  # type: ignore[arg-type]
def test_every_number_of_layers_is_looked_at_in_every_question(
    asked: dict[str, Any], scenario: Scenario, data: Any
) -> None:
    check_every_number(scenario, draw_grid(data), asked)


def test_no_more_layers_are_recomputed_than_must_be() -> None:
    """With the grid and the micro-batch pinned only recomputation is left; all n are tried here."""
    scenario = make_scenario("llama-3-8b", "8xA100-40GB", seq_len=4096, global_batch_size=64)
    pinned = {"zero_stage": 3, "micro_batch_size": 2, "tensor_parallel": 1, "dp_replicate": 1}
    for pipeline in (1,):
        fixed = {**pinned, "pipeline_parallel": pipeline, "virtual_stages": 1}
        fixed["pipeline_schedule"] = "1f1b"
        found = search(scenario, fixed, top=1)
        (best,) = found.plans
        most = scenario.model.num_layers // pipeline
        assert best.recompute == "full"
        assert best.recompute_layers > 0 < most
        every = [replace(best, recompute_layers=n) for n in range(1, most)]
        table = PlanTable.from_plans([*every, replace(best, recompute_layers=0)])
        codes = verdicts(scenario, table)
        steps = simulated_steps(scenario, table)
        fits = np.flatnonzero(codes == 0)
        assert best == table.plan(int(fits[np.argmin(steps[fits])]))
        assert codes[best.recompute_layers - 2] > 0  # one layer fewer does not fit
        assert found.counts.part_recomputed > 0
        whole = search(scenario, {**fixed, "recompute_layers": 0}, top=1)
        assert steps[best.recompute_layers - 1] < simulated_steps(
            scenario, PlanTable.from_plans(list(whole.plans))
        )


@pytest.mark.parametrize(("name", "software"), [("llama", "shardplan"), ("gpt2", "megatron")])
def test_the_bounds_of_fewer_recomputed_layers_hold(name: str, software: str) -> None:
    """What is passed over unpriced rests on these: see ``part_recompute``."""
    model = sample_model(name, num_hidden_layers=7, n_layer=7)
    scenario = make_scenario(model, "8xA100-80GB", global_batch_size=32, software=software)
    table = enumerate_plans(scenario.model, scenario.workload, 8, {"recompute": "full"})
    legal = table.rows(legality_codes(scenario, table) == 0)
    legal = legal.rows(np.random.default_rng(0).permutation(len(legal))[:400])
    stages = legal.pipeline_parallel * legal.virtual_stages
    smallest, largest = 7 // stages, -(-7 // stages)
    counts = smallest + 2  # none, 1 to the smallest stage, all
    plan = np.repeat(np.arange(len(legal)), counts)
    number = np.arange(len(plan)) - np.repeat(np.cumsum(counts) - counts, counts)
    last = np.repeat(np.cumsum(counts) - 1, counts)
    layers = np.where(np.arange(len(plan)) == last, 0, number)
    priced = price_table(
        scenario,
        replace(legal.rows(plan), recompute=np.where(number, FULL, 0), recompute_layers=layers),
    )
    step, peak = priced.step, priced.peak
    same = plan[1:] == plan[:-1]
    assert (np.diff(step)[same] >= -CLOSE * step[1:][same]).all()
    some = np.arange(len(plan)) < last
    least = (2.0 / 3.0 + number / (3.0 * largest[plan])) * step[last]
    assert (step >= least * (1.0 - CLOSE))[some].all()
    least = (1.0 - number / smallest[plan]) * peak[last - smallest[plan] - 1]
    assert (peak >= least * (1.0 - CLOSE))[some].all()
    assert len(np.unique(step[some])) > len(legal)  # it moves
    least = number / largest[plan] * peak[last]
    assert (peak >= least * (1.0 - CLOSE))[some].all()


def test_plans_without_recomputation_are_found_where_others_between_are_illegal() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    table = enumerate_plans(scenario.model, scenario.workload, 8, {}, offloads=OFFLOADS)
    legal = table.rows(legality_codes(scenario, table) == 0)
    assert len(legal) < len(table)
    peak = np.arange(len(legal), dtype=np.float64)
    found = peaks_without(legal, peak, max_offset=len(OFFLOADS) * SEARCHED_RECOMPUTE.index("full"))
    whole = np.flatnonzero(legal.recompute == FULL)
    row_of = {plan: row for row, plan in enumerate(legal)}
    expected = [row_of.get(replace(legal.plan(int(row)), recompute="none")) for row in whole[::7]]
    assert None not in expected
    assert found[whole[::7]].tolist() == expected
    assert np.isnan(found[legal.recompute != FULL]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("software", ["shardplan", "megatron-core"])
def test_fewer_layers_keep_their_share_of_the_peak_where_kinds_differ(software: str) -> None:
    """n of N layers need n / N of what all of them need at least: see ``part_recompute``."""
    scenario = make_scenario("t5", "8xA100-80GB", global_batch_size=32, software=software)
    pinned = {"recompute": "full", "pipeline_parallel": 2}
    table = enumerate_plans(scenario.model, scenario.workload, 8, pinned)
    legal = table.rows(legality_codes(scenario, table) == 0)
    legal = legal.rows(np.random.default_rng(0).permutation(len(legal))[:300])
    whole = price_table(scenario, legal)
    more = every_smaller_number(scenario, legal)
    stages = legal.pipeline_parallel * legal.virtual_stages
    plan = np.repeat(np.arange(len(legal)), scenario.model.num_layers // stages)
    share = more.recompute_layers / -(-scenario.model.num_layers // stages[plan])
    priced = price_table(scenario, more)
    assert (priced.peak >= share * whole.peak[plan] * (1.0 - CLOSE)).all()
    assert (priced.step >= 2.0 / 3.0 * whole.step[plan] * (1.0 - CLOSE)).all()
    assert (priced.peak < whole.peak[plan] * (1.0 - 1e-4)).any()  # though not less than it


def test_the_bounds_hold_where_activations_leave_the_accelerator() -> None:
    """A step takes no less than that of the plan that keeps them: see ``every_number``."""
    model = sample_model("llama", num_hidden_layers=5)
    scenario = make_scenario(model, "8xA100-80GB", global_batch_size=32)
    offloads = ("activations", "optimizer+activations")
    every = {"recompute": "full"}
    table = enumerate_plans(scenario.model, scenario.workload, 8, every, offloads=offloads)
    legal = table.rows(legality_codes(scenario, table) == 0)
    legal = legal.rows(np.random.default_rng(0).permutation(len(legal))[:200])
    assert legal.offloads_activations.all()
    kept = replace(legal, offload=KEPT[legal.offload])
    assert not kept.offloads_activations.any()
    stages = legal.pipeline_parallel * legal.virtual_stages
    least = price_table(scenario, kept).step
    whole = price_table(scenario, legal).peak
    none = price_table(scenario, replace(legal, recompute=np.zeros_like(legal.recompute))).peak
    for number in range(1, 5):
        some = number < 5 // stages
        few = legal.rows(some)
        priced = price_table(
            scenario, replace(few, recompute_layers=np.full(len(few), number, dtype=np.int64))
        )
        largest = -(-5 // stages[some])
        bound = (2.0 / 3.0 + number / (3.0 * largest)) * least[some]
        assert (priced.step >= bound * (1.0 - CLOSE)).all()
        share = number / (5 // stages[some])
        assert (priced.peak >= (1.0 - share) * none[some] * (1.0 - CLOSE)).all()
        assert (priced.peak >= number / largest * whole[some] * (1.0 - CLOSE)).all()
