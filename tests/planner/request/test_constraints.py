from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import simulated_steps
from hardware_profiles.errors import InputError
from planner.request.constraints import (
    OPERATORS,
    Constraint,
    broken_by_plan,
    broken_by_result,
    counts_by_text,
    parse_requirements,
    require_consistent,
)
from planner.request.objectives import results
from planner.search.search import search
from tests.samples import make_scenario


def parsed(text: str) -> list[tuple[str, str, Any]]:
    return [(c.name, c.operator, c.value) for c in parse_requirements(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("tp<=8", [("tensor_parallel", "<=", 8)]),
        (" tp >= 2 , pp<4 ", [("tensor_parallel", ">=", 2), ("pipeline_parallel", "<", 4)]),
        ("zero!=2 and zero>0", [("zero_stage", "!=", 2), ("zero_stage", ">", 0)]),
        ("tp=8", [("tensor_parallel", "==", 8)]),
        ("tp≤8", [("tensor_parallel", "<=", 8)]),
        ("schedule==1f1b", [("pipeline_schedule", "==", 1)]),
        ("sp==on", [("sequence_parallel", "==", True)]),
        ("gpus<=64", [("world_size", "<=", 64)]),
        ("dp_shard>=8", [("dp_shard", ">=", 8)]),
        ("memory<=70GiB", [("memory", "<=", 70 * 2.0**30)]),
        ("peak<=70 gb", [("memory", "<=", 70e9)]),
        ("step<=10s", [("step", "<=", 10.0)]),
        ("step<500ms", [("step", "<", 0.5)]),
        ("mfu>=40%", [("mfu", ">=", 0.4)]),
        ("mfu>=.4", [("mfu", ">=", 0.4)]),
        ("tokens_per_second_per_gpu>=1e3", [("tokens_per_second_per_gpu", ">=", 1000.0)]),
    ],
)
def test_constraints_are_read(text: str, expected: list[tuple[str, str, Any]]) -> None:
    assert parsed(text) == expected


def test_several_texts_are_one_list() -> None:
    assert [c.name for c in parse_requirements(["tp<=8,pp<=4", "zero==1"])] == [
        "tensor_parallel",
        "pipeline_parallel",
        "zero_stage",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "expected a comparison"),
        ("tp<=", "expected a comparison"),
        ("<=8", "expected a comparison"),
        ("tpp<=8", "Did you mean tp"),
        ("seq_len<=8", "no part of a plan"),
        ("tp<=two", "whole number"),
        ("tp<=2.5", "whole number"),
        ("tp<=-1", "whole number"),
        ("tp<=" + "9" * 40, "whole number"),
        ("schedule<=1f1b", "compare it with == or !="),
        ("schedule==1F1B", "Did you mean 1f1b"),
        ("sp==maybe", "on or off"),
        ("memory<=70 cats", "a number such as 70GiB"),
        ("memory<=-1", "a number such as 70GiB"),
        ("step<=10GiB", "a number such as 10s"),
        ("mfu>=40", "at most 1"),
        ("mfu>=1e99", "at most 1"),
    ],
)
def test_a_bad_constraint_is_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_requirements(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("required", "fixed", "sides"),
    [
        ("tp<=2,tp>=4", {}, ("'tp<=2'", "'tp>=4'")),
        ("tp<4,tp>3", {}, ("'tp<4'", "'tp>3'")),
        ("tp==2,tp!=2", {}, ("'tp==2'", "'tp!=2'")),
        ("sp==on,sp!=on", {}, ("'sp==on'", "'sp!=on'")),
        ("sp!=on,sp!=off", {}, ("'sp!=on'", "'sp!=off'")),
        ("zero>=1,zero!=1,zero!=2,zero!=3", {}, ("'zero>=1'", "'zero!=3'")),
        ("zero>3", {}, ("'zero>3'", "0 to 3")),
        ("tp<1", {}, ("'tp<1'", "1 or more")),
        ("memory<=1GiB,memory>2GiB", {}, ("'memory<=1GiB'", "'memory>2GiB'")),
        ("memory<1GiB,memory>1GiB", {}, ("'memory<1GiB'", "'memory>1GiB'")),
        ("mfu>=100%,mfu<1", {}, ("'mfu>=100%'", "'mfu<1'")),
        ("step<0", {}, ("'step<0'", "above 0")),
        ("tp<=8", {"tensor_parallel": 16}, ("'tp<=8'", "--fix tensor_parallel=16")),
        ("schedule!=gpipe", {"pipeline_schedule": "gpipe"}, ("gpipe'", "--fix pipeline_schedule")),
        ("sp==off", {"sequence_parallel": True}, ("'sp==off'", "sequence_parallel=on")),
    ],
)
def test_what_contradicts_itself_names_both_sides(
    required: str, fixed: dict[str, Any], sides: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        require_consistent(parse_requirements(required), fixed)
    for side in sides:
        assert side in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("required", "fixed"),
    [
        ("tp<=2,tp>=2", {}),
        ("tp<4,tp>2", {}),
        ("zero!=1,zero!=2", {}),
        ("schedule!=gpipe,schedule!=1f1b", {}),
        ("tp<=8,pp<=4", {"tensor_parallel": 8, "recompute_layers": (1, 2)}),
        ("memory<=70GiB,memory>=1GiB,mfu>=0.5,mfu<1", {}),
        ("mfu>=100%", {}),
        ("step<0.001ms", {}),
    ],
)
def test_what_can_be_is_no_contradiction(required: str, fixed: dict[str, Any]) -> None:
    require_consistent(parse_requirements(required), fixed)


SMALL = st.lists(st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 6)), max_size=5)


@given(SMALL)
def test_contradictions_are_those_of_trying_every_value(pairs: list[tuple[str, int]]) -> None:
    texts = [f"tp{op}{value}" for op, value in pairs]
    possible = any(all(OPERATORS[op](tp, value) for op, value in pairs) for tp in range(1, 9))
    try:
        require_consistent(parse_requirements(texts))
        found = True
    except InputError:
        found = False
    assert found == possible


def test_columns_are_compared_row_by_row() -> None:
    plans = [Plan(tensor_parallel=t, zero_stage=z) for t in (1, 2, 4) for z in (0, 3)]
    table = PlanTable.from_plans(plans)
    constraints = parse_requirements("tp<=2, zero!=3")
    codes = broken_by_plan(constraints, table)
    assert codes.tolist() == [0, 2, 0, 2, 1, 1]
    assert counts_by_text(constraints, codes) == {
        "--require 'tp<=2'": 2,
        "--require 'zero!=3'": 2,
    }


def test_results_are_compared_and_an_unknown_one_is_an_error() -> None:
    columns = {"memory": np.array([1.0, 3.0]), "step": np.array([5.0, 1.0])}
    constraints = parse_requirements("memory<=2b, step<=4s")
    assert broken_by_result(constraints, columns, 2).tolist() == [2, 1]
    with pytest.raises(InputError, match="mfu is not known here"):
        broken_by_result(parse_requirements("mfu>0.1"), columns, 2)


def test_results_are_those_of_one_plan() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    plan = search(scenario, top=1).plans[0]
    table = PlanTable.from_plans([plan])
    priced = price(scenario, table)
    from cost_models.pricing.estimate import throughput

    columns = results(scenario, table, priced.step, priced.peak)
    tokens, mfu = throughput(scenario, plan, float(priced.step[0]))
    assert columns["mfu"][0] == pytest.approx(mfu)
    assert columns["tokens_per_second_per_gpu"][0] == pytest.approx(tokens)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("required", "objective"),
    [
        ("tp>=2", "time"),
        ("schedule!=1f1b", "time"),
        ("step>1.5ms", "time"),
        ("gpus<9", "time"),
        ("zero==1,pp==1", "time"),
        # all its plans are simulated
        pytest.param("zero==1,pp==1", "memory", marks=pytest.mark.slow),
        ("memory>2GiB", "time"),
    ],
)
def test_the_search_keeps_what_satisfies_and_nothing_else(required: str, objective: Any) -> None:
    """The plans of a search with constraints are those of the whole list that satisfy them."""
    scenario = make_scenario("llama", "8xA100-80GB")
    constraints = parse_requirements(required)
    # with some of the layers: test_exact_search
    pinned: dict[str, Any] = {"recompute_layers": 0, "sequence_parallel": False}
    if objective == "memory":  # all plans are simulated: few of them
        pinned |= {"context_parallel": 1, "micro_batch_size": 1}
    every = search(scenario, pinned, top=100_000, objective=objective).plans
    table = PlanTable.from_plans(list(every))
    priced = price(scenario, table)
    columns = results(scenario, table, priced.step, priced.peak)
    keep = broken_by_plan(constraints, table) + broken_by_result(constraints, columns, len(table))
    wanted = [plan for plan, code in zip(every, keep, strict=True) if code == 0]
    found = search(scenario, pinned, top=100_000, require=constraints, objective=objective)
    assert list(found.plans) == wanted
    counts = found.counts
    removed = sum(counts.excluded.values())
    # other numbers of virtual stages than two, and those that divide the layers, are variants of
    # enumerated plans: they are kept and left out, but not counted
    layers = scenario.model.num_layers
    counted = [
        code
        for plan, code in zip(every, keep, strict=True)
        if plan.virtual_stages <= 2 or layers % (plan.pipeline_parallel * plan.virtual_stages) == 0
    ]
    assert removed == sum(code > 0 for code in counted)
    key = priced.peak
    if objective == "time":  # never shorter than the closed form
        simulated = simulated_steps(scenario, table)
        key = np.where(simulated <= priced.step * (1 + 1e-12), priced.step, simulated)
    assert list(key) == sorted(key)


def test_text_names_the_constraint_as_typed() -> None:
    assert parse_requirements("tp <= 8")[0] == Constraint(
        "tensor_parallel", "<=", 8, "--require 'tp <= 8'"
    )
