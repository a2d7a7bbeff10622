"""Several clusters, prices and whole jobs: the ranking is that of comparing everything by hand."""

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import planner
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.utilisation import least_step
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.answer.plan_answer import PlanAnswer
from planner.assessment.verdict import budget_bytes
from planner.run_cost.text import dollars
from planner.search.search import search
from planner.survey import compare_cases
from planner.survey.answer import SurveyAnswer
from planner.survey.compare_cases import OFFLOADED
from planner.text.answer import json_text
from tests.planner.refinement.test_own_stages import SMALL, small_cluster
from tests.samples import examples, llama, make_scenario, with_memory

CLUSTERS = "2xA100-80GB,4xH100-SXM,2xL40S"
OPTIONS: dict[str, Any] = {"seq_len": 256, "global_batch_size": 8, "top": 3}
RATES = ("cost", "energy")  # for which parts of clusters are tried too


def asked(**options: Any) -> SurveyAnswer:
    clusters = options.pop("clusters", CLUSTERS)
    model = options.pop("model", llama())
    answer = planner.plan(model, clusters, **{**OPTIONS, **options})
    assert isinstance(answer, SurveyAnswer)
    return answer


PRICES = {"A100-SXM-80GB": 2.0, "H100-SXM-80GB": 5.0, "L40S": 1.0}
PRICE = ",".join(f"{name}={price}" for name, price in PRICES.items())


def points(name: str) -> dict[str, np.ndarray]:
    """All four objectives of every plan of one cluster that fits: time, dollars, joules a token."""
    scenario = make_scenario(llama(), name, seq_len=256, global_batch_size=8)
    tokens, cluster = 256 * 8, scenario.cluster
    plans = list(search(scenario, top=100_000).plans)
    priced = price(scenario, PlanTable.from_plans(plans))
    seconds = priced.step * cluster.num_gpus
    power = cluster.accelerator.power
    assert power is not None
    return {
        "time": priced.step / tokens,
        "memory": priced.peak,
        "cost": seconds / tokens / 3600 * PRICES[cluster.accelerator.name],
        "energy": seconds / tokens * power.value,
    }


def every(objective: str, clusters: str = CLUSTERS) -> np.ndarray:
    return np.concatenate([points(name)[objective] for name in clusters.split(",")])


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "cost", "memory", "energy"])
def test_the_best_of_several_clusters_is_the_best_of_all_plans(objective: Any) -> None:
    sizes = CLUSTERS + (",1xA100-80GB,1xH100-SXM,2xH100-SXM,1xL40S" if objective in RATES else "")
    answer = asked(objective=objective, price=PRICE, top=3)
    values = [found.value(objective) for found in answer.ranked]
    assert min(values) == pytest.approx(every(objective, sizes).min(), rel=1e-12)
    assert values[0] <= 1.01 * min(values)  # the simplest of the fastest
    assert values[1:] == sorted(values[1:])


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("time", "memory"), ("memory", "cost")])
def test_the_front_is_that_of_comparing_all_plans(pair: Any) -> None:
    fewer = set(pair) & set(RATES)
    sizes = CLUSTERS + (",1xA100-80GB,1xH100-SXM,2xH100-SXM,1xL40S" if fewer else "")
    first, second = (every(name, sizes) for name in pair)
    better = [
        not np.any((first <= a) & (second <= b) & ((first < a) | (second < b)))
        for a, b in zip(first, second, strict=True)
    ]
    best = sorted(set(zip(first[better].tolist(), second[better].tolist(), strict=True)))
    # with some of the layers recomputed: test_exact_search
    answer = asked(pareto=pair, price=PRICE, fix="recompute_layers=0")
    found = [tuple(f.value(name) for name in pair) for f in answer.ranked]
    assert found == [pytest.approx(point, rel=1e-12) for point in best]


@pytest.mark.slow
def test_fewer_accelerators_are_tried_where_they_may_be_cheaper() -> None:
    answer = asked(clusters="8xH100-SXM", objective="cost")
    assert {case.scenario.cluster.num_gpus for case in answer.cases} == {8, 4, 2, 1}
    batches = {case.scenario.workload.global_batch_size for case in answer.cases}
    assert batches == {8}
    assert answer.best.world_size < 8  # a tiny model: communication costs more than it saves
    limited = asked(clusters="8xH100-SXM", gpus_at_most=4, objective="time")
    assert {case.scenario.cluster.num_gpus for case in limited.cases} == {4, 2, 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"to": "torchtitan"}, {"objective": "cost", "price": 1}])
def test_the_row_of_a_cluster_is_its_answer_alone(options: dict[str, Any]) -> None:
    """Also where the best plan has stages of its own, and for ranges of batches."""
    scenario = small_cluster(layers=7, vocab=32_000, nodes="2x2", share=0.9, batch=16)
    asked = {"seq_len": 1024, **options}
    answer = planner.plan(
        scenario.model, [scenario.cluster, "2xA100-80GB"], global_batch_size=16, **asked
    )
    ranged = planner.plan(scenario.model, scenario.cluster, global_batch_size="8..16", **asked)
    assert isinstance(answer, SurveyAnswer)
    assert isinstance(ranged, SurveyAnswer)
    own = 0
    for case in (case for case in (*answer.cases, *ranged.cases) if case.found):
        workload = case.scenario.workload
        alone = planner.plan(
            scenario.model,
            case.scenario.cluster,
            seq_len=1024,
            global_batch_size=workload.global_batch_size,
            to=options.get("to"),
        )
        assert isinstance(alone, PlanAnswer)
        best = alone.ranked[0]
        own += best.staged is not None
        assert case.found[0].plan == best.plan
        assert case.found[0].step.seconds == best.step.seconds
        assert case.found[0].scenario.layer_ranges == best.scenario.layer_ranges
    assert own > 0
    if ranged.ranked[0].staged is not None:
        assert "--layers" in str(ranged)
        assert ranged.plan_file().layer_ranges == ranged.scenario.layer_ranges


@pytest.mark.slow
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow])
@given(
    **{**SMALL, "share": st.floats(0.2, 1.2)},
    options=st.sampled_from([{}, {"objective": "cost"}, {"objective": "memory"}, {"tokens": "1M"}]),
)
@example(4, 32_000, "2x2", 1.0, 16, {"objective": "cost"})  # a single one needs offload
def test_every_cluster_of_a_survey_has_the_plan_that_it_has_alone(
    layers: int, vocab: int, nodes: str, share: float, batch: int, options: dict[str, Any]
) -> None:
    """Also where memory is tight, and where another cluster needs no offload."""
    scenario = small_cluster(layers, vocab, nodes, share, batch)
    asked = {"seq_len": 1024, "global_batch_size": batch}
    try:
        answer = planner.plan(
            scenario.model, [scenario.cluster, "1xL40S"], **asked, **options, price=1
        )
    except NoLegalPlanError:
        cases = []
    else:
        assert isinstance(answer, SurveyAnswer)
        cases = list(answer.cases)
    if options.get("objective") != "memory":
        options = {}  # the others rank the plans of one cluster as time does
    for case in cases:
        try:
            alone = planner.plan(scenario.model, case.scenario.cluster, **asked, **options)
        except NoLegalPlanError:
            assert not case.found
            continue
        assert isinstance(alone, PlanAnswer)
        best, found = alone.ranked[0], case.found[0]
        assert (found.plan, found.fits) == (best.plan, best.fits)
        assert found.step.seconds == best.step.seconds
        assert found.scenario.layer_ranges == best.scenario.layer_ranges
    if not cases:
        with pytest.raises(NoLegalPlanError):
            planner.plan(scenario.model, scenario.cluster, **asked)


def test_a_survey_has_the_best_zero_stage_of_every_cluster() -> None:
    """Of a trainer whose ZeRO stages are priced apart."""
    asked: dict[str, Any] = {"seq_len": 512, "global_batch_size": 8, "to": "accelerate"}
    answer = planner.plan("llama-3.2-1b", "2xL40S,4xRTX-4090", fix={"micro_batch_size": 1}, **asked)
    assert isinstance(answer, SurveyAnswer)
    assert answer.fixed == {"micro_batch_size": 1}
    for case in answer.cases:
        cluster = case.scenario.cluster
        alone = planner.plan("llama-3.2-1b", cluster, fix={"micro_batch_size": 1}, **asked)
        assert isinstance(alone, PlanAnswer)
        assert (case.found[0].plan, case.found[0].fits) == (alone.best, True)
        assert alone.best.zero_stage > 0
    front = planner.plan("llama-3.2-1b", "2xL40S", pareto="time,memory", **asked)
    assert isinstance(front, SurveyAnswer)
    assert {plan.plan.zero_stage for plan in front.ranked} == {2, 3}
    assert answer.ranked[0].value("time") == min(
        case.found[0].value("time") for case in answer.cases
    )


@pytest.mark.slow
def test_sizes_that_cannot_be_among_the_fastest_are_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {
        "clusters": "1..5x8xH100-SXM",
        "model": "llama-3-8b",
        "seq_len": 4096,
        "fix": "tp=1,zero=3,pp=1,micro_batch_size=1",
        "global_batch_size": 960,
    }
    every = asked(**options)
    assert all(case.found for case in every.cases)
    monkeypatch.setattr(compare_cases, "SEARCHED", 2)
    some = asked(**options)
    assert [one.plan for one in some.ranked] == [one.plan for one in every.ranked]
    left_out = [case for case in some.cases if not case.found]
    assert "1x8xH100-SXM" in [case.name for case in left_out]
    assert all("2 others are faster" in str(case.why) for case in left_out)
    assert "1x8xH100-SXM" in some.text()
    best = {case.name: case.found[0] for case in every.cases}
    for case in every.cases:
        assert least_step(case.scenario) <= best[case.name].step.seconds
    # another objective
    cheap = asked(**options, objective="cost", price=PRICE)
    assert {case.name for case in cheap.cases if case.found} >= set(best)


def test_without_a_batch_all_cases_train_with_the_same() -> None:
    answer = asked(clusters="2xA100-80GB,4xH100-SXM", global_batch_size=None)
    (batch,) = {case.scenario.workload.global_batch_size for case in answer.cases}
    assert batch % 4 == 0
    assert any("the same on every cluster" in words for words in answer.assumptions)


@pytest.mark.slow
def test_precisions_are_compared_and_one_that_a_device_lacks_says_so() -> None:
    answer = asked(clusters="2xA100-80GB,2xH100-SXM", precision="bf16,fp8")
    reasons = {(case.name, case.scenario.workload.precision): case.why for case in answer.cases}
    assert "no rate is known for fp8" in str(reasons[("2xA100-80GB", "fp8")])
    assert [reason for reason in reasons.values() if reason is None] == [None] * 3
    assert "not priced" in str(answer)
    with pytest.raises(InputError, match="no rate is known for fp8"):
        asked(clusters="2xA100-80GB,4xA100-80GB", precision="fp8")


@pytest.mark.slow
def test_a_budget_and_days_are_kept_or_refused() -> None:
    free = asked(clusters="2xA100-80GB", tokens="1B", price=1)
    job = free.documents[0]["job"]
    days = job["seconds"] / 86400
    inside = asked(clusters="2xA100-80GB", tokens="1B", price=1, budget=job["dollars"] * 1.001)
    assert inside.best == free.best

    with pytest.raises(NoLegalPlanError) as caught:
        asked(clusters="2xA100-80GB", tokens="1B", price=1, budget=job["dollars"] * 0.99)
    assert "--budget" in str(caught.value)
    with pytest.raises(NoLegalPlanError) as caught:
        asked(tokens="1B", days=days / 1e4)
    assert "has no plan: " in str(caught.value)
    assert "--days" in str(caught.value)
    assert "does not fit" not in str(caught.value)
    assert re.search(r"has no plan: [\d,]+ plans are excluded by", str(caught.value))
    assert all(name in str(caught.value) for name in CLUSTERS.split(","))


def test_the_table_and_the_job_have_the_same_dollars() -> None:
    answer = asked(tokens="1B", price=1, failures="mtbf=20,restart=30")
    job = answer.documents[0]["job"]
    assert job["with_failures"]["dollars"] > 1.05 * job["dollars"]
    row = next(line for line in str(answer).splitlines() if line.startswith("✔"))
    assert row.split()[-1] == dollars(job["with_failures"]["dollars"])


def test_a_price_that_nobody_published_is_asked_for() -> None:
    with pytest.raises(InputError, match="--price"):
        asked(clusters="2xV100-SXM2-32GB,2xH100-SXM", objective="cost", precision="fp16")
    assert asked(clusters="2xV100-SXM2-32GB", objective="cost", price=1, precision="fp16").best


@pytest.mark.slow
def test_the_document_is_json_and_the_text_names_every_cluster() -> None:
    answer = asked(tokens="1B", budget="1000")
    document = json.loads(json_text(answer.to_dict()))
    assert document["objective"] == "time"
    assert {case["cluster"] for case in document["cases"]} == set(CLUSTERS.split(","))
    assert document["plans"][0]["job"]["within_budget"] is True
    text = str(answer)
    assert all(name in text for name in CLUSTERS.split(","))
    assert all(len(line) <= 100 for line in text.splitlines() if "--" not in line)
    assert any("paid for" in words for words in answer.assumptions)
    assert list(answer.table["cluster"]) == [d["cluster"] for d in document["plans"]]


@pytest.mark.slow
def test_offload_is_tried_where_nothing_fits_without_and_only_there() -> None:
    small = llama(hidden_size=4096, intermediate_size=16384, vocab_size=32000)
    options: dict[str, Any] = {"seq_len": 256, "global_batch_size": 1, "fix": "recompute=full"}
    assert planner.plan(small, "1xA100-80GB", **options).best.offload == "none"
    larger = llama(
        hidden_size=8192, intermediate_size=28672, vocab_size=128256, num_attention_heads=64
    )
    answer = planner.plan(larger, "1xA100-80GB", **options)
    assert isinstance(answer, PlanAnswer)
    assert answer.best.offload != "none"
    assert OFFLOADED in answer.assumptions
    with pytest.raises(NoLegalPlanError):
        planner.plan(larger, "1xA100-80GB", require="offload==none", **options)
    allowed = planner.plan(small, "1xA100-80GB", allow="offload", top=1000, **options)
    assert {plan.offload for plan in allowed.result.plans} >= {"none", "optimizer"}


def test_offload_is_tried_where_plans_may_run_out_of_memory() -> None:
    model = llama(hidden_size=2048, intermediate_size=8192, vocab_size=32000)
    scenario = make_scenario(model, "1xA100-80GB", seq_len=256, global_batch_size=1)
    share = search(scenario, top=1).smallest_peak / budget_bytes(scenario.cluster)
    capacity = scenario.cluster.accelerator.memory_capacity.value
    scenario = with_memory(scenario, share * capacity)
    tight = search(scenario, top=1)
    assert tight.plans
    assert not tight.fits
    answer = planner.plan(model, scenario.cluster, seq_len=256, global_batch_size=1)
    assert isinstance(answer, PlanAnswer)
    assert answer.assessments[0].fits
    assert answer.best.offload != "none"
    assert OFFLOADED in answer.assumptions
    both = planner.plan(model, [scenario.cluster, "1xL40S"], seq_len=256, global_batch_size=1)
    assert isinstance(both, SurveyAnswer)
    tight, roomy = both.cases
    assert (tight.found[0].plan, roomy.found[0].plan.offload) == (answer.best, "none")
    assert f"{scenario.cluster.name}: {OFFLOADED}" in both.assumptions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pareto": "time"}, "two different ones"),
        ({"pareto": "time,time"}, "two different ones"),
        ({"pareto": "time,speed"}, "must be one of"),
        ({"objective": "speed"}, "must be one of"),
        ({"allow": "everything"}, "--allow"),
        ({"precision": "bf16,fp3"}, "precision"),
        ({"gpus_at_most": 0}, "gpus_at_most"),
        ({"price": "x"}, "--price"),
        ({"tokens": "x"}, "--tokens"),
        ({"find": "happiness"}, "must be one of"),
        ({"require": "tp<=2", "fix": "tp=4"}, "contradicts"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        planner.plan(llama(), "2xA100-80GB", **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_where_no_cluster_has_a_plan_each_says_why_and_the_smallest_change_is_named() -> None:
    with pytest.raises(NoLegalPlanError) as caught:
        planner.plan("llama-3-8b", ["8xA100-80GB", "8xH100-SXM"], fix="tp=3")
    words, document = str(caught.value), caught.value.document
    assert "on any of 2 clusters" in words
    assert words.count("tensor_parallel 3") == 2  # the reason, of each
    assert "smallest change on 8xA100-80GB: --fix tensor_parallel=2 instead of" in words
    (change,) = document["changes"]
    fixed = change["change"].removeprefix("--fix ")
    assert planner.plan("llama-3-8b", change["cluster"], fix=fixed, top=1).best is not None


@pytest.mark.slow
def test_where_all_clusters_are_too_small_the_nearest_has_ways_out() -> None:
    with pytest.raises(NoLegalPlanError) as caught:
        planner.plan("llama-3-70b", ["2xA100-40GB", "2xA100-80GB"], seq_len=512)
    document = caught.value.document
    assert [len(case["reasons"]) > 0 for case in document["cases"]] == [True, True]
    assert {way["cluster"] for way in document["ways_out"]} == {"2xA100-80GB"}
    assert "of 39" in str(caught.value)
    assert "of 79" in str(caught.value)


@pytest.mark.slow
def test_a_front_tells_plans_that_differ_in_layers_alone_in_one_line() -> None:
    fixed = "tp=1,pp=1,mbs=1,zero=3,dp_replicate=1"
    answer = planner.plan("llama-3-8b", "8xH100-SXM", pareto="time,memory", fix=fixed)
    assert isinstance(answer, SurveyAnswer)
    text = answer.text(verbose=True).splitlines()
    lines = [line for line in text if "--micro-batch-size 1" in line]
    shown = [line for line in text if "between, --recompute-layers" in line]
    between = sum(int(line.split("… ")[1].split()[0]) for line in shown)
    assert shown
    assert len(answer.ranked) == between + len(lines)
    assert len(answer.to_dict()["plans"]) == len(answer.ranked)
    short = str(answer).splitlines()
    rows = [line for line in short if " full " in line or " none " in line]
    assert f"  {len(answer.ranked) - len(rows)} more with -v" in short
    smallest = min(ranked.assessment.memory.peak_bytes for ranked in answer.ranked)
    assert f" {smallest / 2**30:.1f} " in rows[-1]  # both ends of the front
