"""What ``explain`` says is what pricing says: reasons, thresholds, what binds."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile, write_plan_file
from cost_models.pricing.estimate import price
from cost_models.pricing.prediction import TIME_PARTS
from cost_models.pricing.step_bounds import step_times
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TIME_WORDS
from hardware_profiles.errors import InputError
from planner.assessment.assess import amounts, assess, plan_file
from planner.assessment.verdict import budget_bytes, plan_verdict_spread
from planner.cli.app import app
from planner.explanation.answer import SMALL, _figure
from planner.explanation.choices import MOST_NUMBERED, Choices, priced_choices
from planner.explanation.explain import explain
from planner.explanation.glossary import describe, layout, place
from planner.explanation.machine_figures import figures
from planner.explanation.sensitivity import (
    HIGHEST,
    LOWEST,
    Race,
    Sensitivity,
    other_batches,
    sensitivities,
)
from planner.explanation.why_not import LEAST, why_not
from planner.refinement.best_partition import StagedPlan, best_staged
from planner.request.command import describe_plan
from planner.search.distinct import DISTINCT, TOP
from planner.search.search import search
from planner.text.plan_changes import changes, same_layout
from tests.samples import llama, make_scenario, with_memory

ONE_SCHEDULE = {"pipeline_schedule": "1f1b"}  # searches a part of the space, in less time
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
MODEL, FEW_LAYERS = llama(**SIZES), llama(**SIZES, num_hidden_layers=4)


def scenario_with(
    memory: float | None = None, cluster: str = "2x2xH100-SXM", model: Any = MODEL
) -> Scenario:
    scenario = make_scenario(model, cluster, global_batch_size=8, seq_len=1024)
    return scenario if memory is None else with_memory(scenario, memory)


def written(tmp_path: Path, scenario: Scenario, plan: Plan) -> Path:
    path = tmp_path / "plan.json"
    write_plan_file(path, plan_file(scenario, plan, "test"))
    return path


def best_of(scenario: Scenario, fixed: dict[str, Any] | None = None) -> Plan:
    return search(scenario, fixed, top=1).plans[0]


def staged_scenario() -> Scenario:
    """Return a scenario whose best plan has stages of its own: a large head, a lean host."""
    model = llama(hidden_size=2048, intermediate_size=8192, vocab_size=128_000)
    sizes = {"global_batch_size": 16, "seq_len": 1024}
    return make_scenario(model, "2x2xA100-80GB", software="megatron", **sizes)


def best_staged_of(scenario: Scenario) -> StagedPlan:
    found = search(scenario, top=TOP, distinct=DISTINCT, with_near=True)
    staged = best_staged(scenario, found.plans, found.near)
    assert staged is not None
    return staged


# --- what binds, and how the best plan compares ---


def test_parts_add_up_and_the_best_plan_is_called_so(tmp_path: Path) -> None:
    scenario = staged_scenario()
    best = best_staged_of(scenario)
    found = explain(written(tmp_path, best.scenario(scenario), best.plan), sensitivity=False)
    assert found.is_best
    assert found.best == best.plan
    binds = found.binds()
    assert sum(term.share for term in binds.time) == pytest.approx(1.0)
    assert sum(term.share for term in binds.memory) == pytest.approx(1.0)
    shares = [term.share for term in binds.time]
    assert shares == sorted(shares, reverse=True)
    assert "no legal plan that fits is predicted faster" in str(found)
    even = explain(plan_file(scenario, best_of(scenario), "test"), sensitivity=False)
    assert not even.is_best
    assert best.stage_options in " ".join(str(even).split())
    plan, figure = best_of(scenario), Sensitivity("memory", "memory", "B", 8e10, None, None, 0.0)
    words = " ".join(str(replace(found, varied=plan, sensitivity=(figure,))).split())
    assert f"beats the best plan with even stages, {describe_plan(plan)} (-v: which)" in words


@pytest.mark.slow
def test_another_plan_is_compared_with_stages_of_its_own() -> None:
    scenario = staged_scenario()
    best = best_staged_of(scenario)
    fixed = f"pp={best.plan.pipeline_parallel}"
    even = plan_file(scenario, best_of(scenario), "test")
    (other,) = explain(even, why_not=fixed, sensitivity=False).why_not
    assert other.kind == "faster"
    assert other.staged is not None
    assert other.staged.step == pytest.approx(best.step, rel=1e-9)
    own = plan_file(best.scenario(scenario), best.plan, "test")
    (other,) = explain(own, why_not=fixed, sensitivity=False).why_not
    assert other.kind == "same"


@pytest.mark.slow
def test_a_plan_that_is_not_the_best_says_by_how_much(tmp_path: Path) -> None:
    scenario = staged_scenario()
    best = best_of(scenario)
    worse = replace(best, recompute="full")
    found = explain(written(tmp_path, scenario, worse), sensitivity=False)
    assert not found.is_best
    steps = [assess(scenario, worse).time.step_seconds, best_staged_of(scenario).step]
    assert found.slower_than_best == pytest.approx(steps[0] / steps[1] - 1.0)
    assert f"{100 * (steps[0] / steps[1] - 1):.1f} % longer than the best one" in str(found)


@pytest.mark.slow
def test_stages_of_a_plan_file_are_the_ones_that_are_explained() -> None:
    scenario = scenario_with()
    plan = Plan(data_parallel=2, pipeline_parallel=2, zero_stage=1, num_microbatches=4)
    even = plan_file(scenario, plan, "test")
    uneven = replace(even, layer_ranges=((0, 2), (2, 8)))
    found = [explain(file, sensitivity=False) for file in (even, uneven)]
    steps = [one.assessment.time.step_seconds for one in found]
    assert steps[1] > 1.2 * steps[0]
    assert "--layers" not in found[0].options
    assert found[1].options == f"{found[0].options} --layers 2,6"
    assert found[1].options in " ".join(str(found[1]).split())


def test_recomputed_layers_of_the_stages_do_not_bind_other_plans() -> None:
    """Another number of stages needs other numbers of layers."""
    scenario = scenario_with()
    plan = Plan(data_parallel=2, pipeline_parallel=2, num_microbatches=4, recompute="full")
    own = replace(scenario, stage_recompute_layers=(3, 1))
    file = plan_file(own, plan, "test")
    (other,) = explain(file, why_not="pp=1,schedule=1f1b", sensitivity=False).why_not
    (alone,) = [why_not(scenario, plan, assess(own, plan), "pp=1,schedule=1f1b")]
    assert other == alone
    assert other.plan is not None
    equal = replace(file, stage_recompute_layers=(3, 3))
    found = explain(equal, sensitivity=False)
    assert found.plan == replace(plan, recompute_layers=3)
    assert found.assessment.time == assess(replace(own, stage_recompute_layers=(3, 3)), plan).time


def test_every_part_of_a_plan_is_told() -> None:
    scenario = make_scenario("mixtral", "2x4xA100-80GB", global_batch_size=8)
    plan = Plan(
        data_parallel=2,
        tensor_parallel=2,
        pipeline_parallel=2,
        virtual_stages=2,
        pipeline_schedule="interleaved_1f1b",
        sequence_parallel=True,
        expert_parallel=2,
        zero_stage=1,
        recompute="full",
        recompute_layers=1,
        num_microbatches=4,
    )
    text = " ".join(describe(scenario, plan))
    for word in ("Data parallelism 2", "Pipeline parallelism 2", "Tensor parallelism 2"):
        assert word in text
    for word in ("Expert parallelism 2", "ZeRO 1", "full recomputation", "interleaved", "first 1"):
        assert word in text


def test_groups_lie_where_the_grid_puts_them() -> None:
    plan = Plan(
        data_parallel=4, dp_replicate=2, tensor_parallel=2, pipeline_parallel=2, zero_stage=1
    )
    assert layout(plan, "tensor") == (2, 1)
    assert layout(plan, "data") == (2, 2)
    assert layout(plan, "replicate") == (2, 4)
    assert layout(plan, "pipeline") == (2, 8)
    cluster = scenario_with(cluster="2x8xH100-SXM").cluster
    assert place(cluster, plan, "replicate").startswith("inside a node, 450 GB/s")
    assert place(cluster, plan, "pipeline").startswith("over the network between nodes, 50 GB/s")
    cluster = scenario_with(cluster="8x8xA100-80GB").cluster
    far = Plan(data_parallel=4, tensor_parallel=4, pipeline_parallel=4)  # a stage is two nodes
    assert place(cluster, far, "pipeline") == "over the network between nodes, 25 GB/s"
    near = Plan(tensor_parallel=4, pipeline_parallel=16)  # a node holds two stages
    words = "partly over the network between nodes, 46.2 GB/s on average"
    assert place(cluster, near, "pipeline") == words


# --- why not ---


def test_an_illegal_plan_names_the_rule_that_every_candidate_breaks() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    best = best_of(scenario)
    found = why_not(scenario, best, assess(scenario, best), "tp=8")
    assert found.kind == "illegal"
    assert found.every
    assert [code for code, _, _ in found.rules] == ["num_kv_heads"]
    assert found.rules[0][2] == found.candidates > 1
    assert "does not divide num_kv_heads = 4" in found.rules[0][1]


def test_where_no_rule_is_broken_by_all_the_first_ones_are_counted() -> None:
    """One data rank cannot shard, several would get less than a micro-batch."""
    scenario = scenario_with()
    best = best_of(scenario)
    assessment = assess(scenario, best)
    found = why_not(scenario, best, assessment, "zero=1,mbs=8,cp=1")
    assert found.kind == "illegal"
    assert not found.every
    assert len(found.rules) == 3
    assert "global_batch_size" in {code for code, _, _ in found.rules}
    assert all(0 < number < found.candidates for _, _, number in found.rules)


def test_what_is_too_large_says_on_which_stage_and_by_how_much() -> None:
    scenario = scenario_with(4e9)
    best = best_of(scenario)
    assessment = assess(scenario, best)
    found = why_not(scenario, best, assessment, "tp=1,pp=1,zero=0")
    assert found.kind == "too_large"
    assert found.plan is not None
    alone = assess(scenario, found.plan).memory
    sizes = amounts(alone.parts)
    assert found.over_bytes == pytest.approx(alone.peak_bytes - budget_bytes(scenario.cluster))
    assert found.terms[0].part == max(sizes, key=lambda part: sizes[part])
    assert sum(t.other for t in found.terms) == pytest.approx(alone.peak_bytes)
    # it is the smallest of them
    more = why_not(scenario, best, assessment, "tp=1,pp=1,zero=0,recompute=none")
    assert more.assessment is not None
    assert more.assessment.memory.peak_bytes >= alone.peak_bytes


@pytest.mark.slow
def test_a_slower_plan_is_the_best_with_that_pin_and_its_terms_add_up() -> None:
    scenario = staged_scenario()
    best = best_of(scenario)
    assessment = assess(scenario, best)
    asked = {"data_parallel": 4}
    found = why_not(scenario, best, assessment, "dp=4")
    assert found.kind == "slower"
    assert found.plan == search(scenario, asked, top=1).plans[0]
    assert found.assessment is not None
    slower = found.assessment.time.step_seconds - assessment.time.step_seconds
    told = sum(term.difference for term in found.terms)
    differences = [term.difference for term in found.terms]
    small = LEAST * max(map(abs, differences))  # such terms are not told
    assert told == pytest.approx(slower, abs=small * (len(TIME_PARTS) - len(differences)))
    assert differences == sorted(differences, reverse=True)
    assert {term.part for term in found.terms} <= set(TIME_PARTS)
    # the best plan with its own stages is the same; with even ones, they are what is faster
    staged = best_staged_of(scenario)
    own, its = staged.plan, staged.scenario(scenario)
    same = why_not(scenario, own, assess(its, own), {"data_parallel": own.data_parallel})
    assert same.kind == "same"
    even = why_not(scenario, best, assessment, {"data_parallel": best.data_parallel})
    assert (even.kind, even.plan) == ("faster", own)
    assert even.staged is not None
    assert even.staged.layers == staged.layers


@pytest.mark.slow
def test_a_slow_plan_hears_what_is_faster() -> None:
    scenario = scenario_with()
    best = best_of(scenario)
    worse = replace(best, recompute="full")
    found = why_not(scenario, worse, assess(scenario, worse), "recompute=none")
    assert found.kind == "faster"
    assert "recompute" in {term.part for term in found.terms}


def test_a_plan_that_is_only_tight_is_not_called_slower() -> None:
    pin = {"recompute": "none", "data_parallel": 4, "zero_stage": 0}
    smallest = search(scenario_with(1e6), pin).smallest
    assert smallest is not None
    peak = assess(scenario_with(), smallest).memory.peak_bytes
    scenario = scenario_with(peak / 0.97)  # what is left of the capacity
    best = best_of(scenario)
    assessment = assess(scenario, best)
    assert assessment.verdict == "fits"
    tight = why_not(scenario, best, assessment, "recompute=none,dp=4,zero=0")
    assert tight.kind == "tight"
    assert tight.assessment is not None
    memory = tight.assessment.memory
    assert tight.over_bytes == pytest.approx(memory.high_bytes - tight.assessment.budget.size)


# --- sensitivity ---


@pytest.fixture(scope="module")
def choices() -> Choices:
    scenario = scenario_with(4e9)
    return priced_choices(scenario, best_of(scenario, ONE_SCHEDULE), ONE_SCHEDULE)


def scaled(scenario: Scenario, name: str, factor: float) -> Scenario:
    figure = next(f for f in figures(scenario) if f.name == name)
    return replace(scenario, cluster=figure.scaled(factor))


def best_step(scenario: Scenario) -> float:
    plan = best_of(scenario, ONE_SCHEDULE)
    return float(price(scenario, PlanTable.from_plans([plan])).step[0])


def own_step(scenario: Scenario, plan: Plan) -> float:
    priced = price(scenario, PlanTable.from_plans([plan]))
    spread = plan_verdict_spread(scenario)
    fits = priced.peak[0] * (1.0 + spread.above) <= budget_bytes(scenario.cluster)
    return float(priced.step[0]) if fits else float("inf")


@pytest.mark.slow
def test_thresholds_are_those_of_whole_searches(choices: Choices) -> None:
    """On the near side the choice still is the best plan; on the far side it is not."""
    scenario, chosen = choices.scenario, choices.table.plan(choices.chosen)
    changed = 0
    for one in sensitivities(choices):
        for change, towards in ((one.less, -1), (one.more, 1)):
            end = LOWEST if towards < 0 else HIGHEST
            if change is None:
                there = scaled(scenario, one.name, end)
                assert own_step(there, chosen) == pytest.approx(best_step(there), rel=1e-9)
                continue
            changed += 1
            near = scaled(scenario, one.name, change.scale * (1.0 - towards * 0.03))
            far = scaled(scenario, one.name, change.scale * (1.0 + towards * 1e-4))
            assert own_step(near, chosen) == pytest.approx(best_step(near), rel=1e-9), one.name
            assert best_step(far) < own_step(far, chosen), one.name
            assert not same_layout(chosen, change.plan)
            assert own_step(far, change.plan) == pytest.approx(best_step(far), rel=2e-3), one.name
            last = scaled(scenario, one.name, end)
            if np.isfinite(change.keeping_costs):
                keeping = own_step(last, chosen) / best_step(last) - 1.0
                assert change.keeping_costs == pytest.approx(keeping, rel=1e-6, abs=1e-9), one.name
    assert changed >= 2


@pytest.mark.slow
@pytest.mark.parametrize("most", [MOST_NUMBERED, 0])
def test_with_a_little_less_memory_one_more_layer_recomputes(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not another layout: of very many plans that is so for the chosen one, at least."""
    monkeypatch.setattr("planner.explanation.choices.MOST_NUMBERED", most)
    scenario = make_scenario("llama-3-8b", "8xA100-40GB", seq_len=4096, global_batch_size=64)
    names = ("tensor_parallel", "pipeline_parallel", "dp_replicate")
    pinned = {"zero_stage": 3, "micro_batch_size": 2, **dict.fromkeys(names, 1)}
    best = best_of(scenario, pinned)
    assert best.recompute_layers > 0
    memory, *_ = sensitivities(priced_choices(scenario, best, pinned))
    for change, number in ((memory.less, 1), (memory.more, -1)):
        assert change is not None
        assert change.plan == replace(best, recompute_layers=best.recompute_layers + number)


@pytest.mark.slow
def test_ten_percent_more_of_a_rate(choices: Choices) -> None:
    chosen = choices.table.plan(choices.chosen)
    for one in sensitivities(choices):
        if one.name == "memory":
            assert one.step_change == 0.0
            continue
        there = scaled(choices.scenario, one.name, 1.1)
        expected = own_step(there, chosen) / own_step(choices.scenario, chosen) - 1.0
        assert one.step_change == pytest.approx(expected)
        assert one.step_change <= 1e-12


def test_where_power_binds_it_is_named() -> None:
    def said(cluster: str, change: float, name: str = "flops") -> str:
        one = Sensitivity(name, "bf16 matrix products", "FLOP/s", 9e14, None, None, change)
        return _figure(one, Plan(), scenario_with(cluster=cluster))

    assert "(10 % more changes no step time: in a long run 700 W allow 714 TFLOP/s)" in said(
        "8xH100-SXM", 0.0
    )
    assert "no step time):" in said("8xH100-SXM", 0.0, "memory_bandwidth")
    assert "no step time):" in said("8xMI355X", 0.0)  # of its power nothing is known
    assert "shortens the step by 3.0 %" in said("8xH100-SXM", -0.03)


@pytest.mark.slow
def test_no_plan_takes_less_than_its_bound_on_a_slower_machine() -> None:
    """The law that lets plans be left out. Bubbles of split backward passes are not under it."""
    scenario = scenario_with()
    choices = priced_choices(scenario, best_of(scenario))
    longer = 0
    for figure in figures(scenario)[1:]:
        bound = before = bubbles = np.zeros(len(choices.table))
        for factor in (4.0, 1.3, 0.5):
            there = replace(scenario, cluster=figure.scaled(factor))
            steps, least, _ = step_times(there, choices.table)
            assert np.all(least <= steps)
            assert np.all(bound <= least * (1.0 + 1e-12)), (figure.name, factor)
            # a pass defers only the time by which weight gradients make it longer
            assert np.all(before <= steps * (1.0 + 1e-9)), (figure.name, factor)
            longer += int(np.sum(steps - least < bubbles - 1e-9 * steps))
            bound, before, bubbles = least, steps, steps - least
    assert longer > 0  # bubbles, which the bound leaves out, are longer on a faster machine


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "t5"])
def test_step_times_are_those_of_price(model: str) -> None:
    scenario = make_scenario(model, "2x2xH100-SXM", global_batch_size=8)
    choices = priced_choices(scenario, best_of(scenario))
    seconds, least, _ = step_times(scenario, choices.table)
    np.testing.assert_allclose(seconds, choices.step, rtol=1e-12)
    kept = choices.fits  # the others cannot win
    np.testing.assert_allclose(least[kept], choices.least[kept], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "memory"), [("4xH100-SXM", 4e9), ("2x2xH100-SXM", 3e9)])
def test_bounds_answer_as_prices_do(cluster: str, memory: float) -> None:
    """Plans with a number of recomputed layers are priced only where bounds do not decide."""
    scenario = scenario_with(memory, cluster)
    best = best_of(scenario)
    whole = priced_choices(scenario, best)
    bounded = priced_choices(scenario, best, bounded=True)
    left = np.flatnonzero(~bounded.settled)
    assert len(left)
    assert bounded.table.plan(bounded.chosen) == whole.table.plan(whole.chosen)
    for name in ("step", "least", "needed"):
        bound, exact = getattr(bounded, name), getattr(whole, name)
        assert np.all(bound[left] <= exact[left]), name
    found = sensitivities(bounded)
    assert found == sensitivities(whole)
    assert any(change for one in found for change in (one.less, one.more))


@pytest.mark.slow
def test_leaving_plans_out_changes_no_answer(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sensitivities(choices)
    monkeypatch.setattr(Race, "_bound", lambda race, *_: np.zeros(len(race.others)))
    assert sensitivities(choices) == expected


@pytest.mark.slow
def test_other_batches_are_searched_anew() -> None:
    scenario = scenario_with(4e9)
    best = best_of(scenario, ONE_SCHEDULE)
    for batch in other_batches(scenario, best, ONE_SCHEDULE):
        workload = replace(scenario.workload, global_batch_size=batch.global_batch_size)
        assert batch.plan == best_of(replace(scenario, workload=workload), ONE_SCHEDULE)
        assert batch.plan is not None
        assert batch.same == same_layout(best, batch.plan)
        assert batch.same == (changes(best, batch.plan) == "")


# --- the front door and the command line ---


@pytest.mark.slow
def test_one_json_document_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_with(5e9, model=FEW_LAYERS)
    path = written(tmp_path, scenario, best_of(scenario))
    monkeypatch.setattr("planner.explanation.sensitivity.BATCHES", (2.0,))  # each is a search
    words = ["explain", str(path), "--json", "--why-not", "pp=2,schedule=1f1b", "--why-not", "pp=3"]
    done = CliRunner().invoke(app, words)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["is_best"]
    assert [reason["reason"] for reason in document["why_not"]] == ["slower", "illegal"]
    slower = document["why_not"][0]
    assert slower["step_seconds"] > document["time"]["step_seconds"]
    names = [one["figure"] for one in document["sensitivity"]]
    assert names == ["memory", "flops", "memory_bandwidth", "link_0", "link_1"]
    assert document["story"]


@pytest.mark.slow
def test_the_text_tells_all_of_it_in_lines_of_100_columns(
    choices: Choices,
) -> None:
    scenario = choices.scenario
    file = plan_file(scenario, choices.table.plan(choices.chosen), "test")
    found = replace(
        explain(file, sensitivity=False),
        varied=file.plan,
        sensitivity=sensitivities(choices),
        batches=other_batches(scenario, file.plan, ONE_SCHEDULE),
    )
    text = str(found)
    for label in ("Plan", "In words", "Step", "Memory", "Best", "Sensitive"):
        assert f"\n{label} " in text
    assert "global batch, now 8" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    whole = found.text(verbose=True)
    for term in found.binds().time:
        if term.share >= SMALL:
            assert TIME_WORDS[term.part] in text
            assert " ".join(term.words.split()) in " ".join(whole.split())
    for one in found.sensitivity:
        assert one.words.split(",")[0] in " ".join(text.split())
        assert f"{one.words}, now" in " ".join(whole.split())
    assert len(text.splitlines()) < len(whole.splitlines())


def test_a_question_about_another_plan_is_answered_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = scenario_with(model=FEW_LAYERS)
    path = written(tmp_path, scenario, Plan(data_parallel=4, num_microbatches=2))
    monkeypatch.setattr("planner.explanation.explain.sensitivities", None)  # not searched for
    words = ["explain", str(path), "--why-not", "pp=3", "--why-not", "pp=2,schedule=1f1b"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert re.findall(r"^[A-Z][a-z ]+?(?=  )", done.stdout, re.MULTILINE)[-3:] == [
        "Plan",
        "Why not",
        "Why not",
    ]
    whole = CliRunner().invoke(app, [*words, "--no-sensitivity", "-v"]).stdout
    for label in ("In words", "Step", "Memory", "Best", "Why not"):
        assert f"\n{label} " in whole


@pytest.mark.slow
def test_a_plan_that_does_not_fit_gets_ways_out() -> None:
    scenario = scenario_with(4e9)
    plan = Plan(data_parallel=4, micro_batch_size=2)
    found = explain(plan_file(scenario, plan, "test"), sensitivity=False)
    assert found.verdict == "does_not_fit"
    assert found.ways_out
    assert "too much" in " ".join(str(found).split())
    assert "Fixes" in str(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", "--why-not: is empty"),
        ("tq=3", "--why-not 'tq=3': 'tq' is not a part of a plan"),
        ("tp=x", "--why-not tensor_parallel=x: must be a whole number"),
        (
            "pp=2,recompute=full,recompute_layers=4,2",
            "--why-not: recompute_layers takes one number",
        ),
    ],
)
def test_bad_words_are_refused_before_anything_is_searched(
    asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = scenario_with()
    file: PlanFile = plan_file(scenario, best_of(scenario), "test")
    monkeypatch.setattr("planner.explanation.explain.search", None)
    with pytest.raises(InputError, match=said):
        explain(file, why_not=asked or [""], sensitivity=False)


def test_an_illegal_plan_file_is_refused_by_its_rule() -> None:
    scenario = scenario_with()
    file = plan_file(scenario, best_of(scenario), "test")
    with pytest.raises(InputError, match="ranks"):
        explain(replace(file, plan=Plan(data_parallel=2)), sensitivity=False)
