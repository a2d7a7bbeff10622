from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import WORDS, Plan, PlanTable
from planner.request.divisors import divisors
from planner.request.pins import parse_fixed
from planner.search import space
from planner.search.search import search
from planner.search.space import (
    MAX_VIRTUAL_STAGES,
    Space,
    allowed_offloads,
    enumerate_plans,
)
from tests.samples import all_plans, make_scenario

QUESTIONS = [
    ("llama", "8xA100-80GB", 16),
    ("llama tied", "4xA100-80GB", 12),
    ("gpt2", "6xA100-80GB", 12),
    ("mixtral", "2x4xH100-SXM", 8),
    ("t5", "4xA100-80GB", 8),
    ("llama", "1xA100-80GB", 6),
]


def enumerated(scenario: Any, fixed: dict[str, Any] | None = None) -> PlanTable:
    return enumerate_plans(
        scenario.model, scenario.workload, scenario.cluster.num_gpus, fixed or {}
    )


def legal_plans(scenario: Any, plans: list[Plan]) -> set[Plan]:
    if not plans:
        return set()
    codes = legality_codes(scenario, PlanTable.from_plans(plans))
    return {plan for plan, code in zip(plans, codes, strict=True) if not code}


def in_the_space(plan: Plan, num_layers: int) -> bool:
    """The documented limits: virtual stages of equal size; nothing varied that means nothing."""
    if plan.tensor_parallel == 1 and not plan.expert_tensor_parallel:
        return False
    stages = plan.num_stages  # embedding and head may count as layers
    even = num_layers % stages == 0 or (num_layers + 2) % stages == 0
    even = even and plan.virtual_stages <= MAX_VIRTUAL_STAGES
    no_schedule = plan.pipeline_parallel > 1 or plan.pipeline_schedule == "1f1b"
    return no_schedule and (plan.virtual_stages == 1 or even)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster", "batch"), QUESTIONS)
def test_every_legal_plan_of_nested_loops_is_enumerated(
    model: str, cluster: str, batch: int
) -> None:
    scenario = make_scenario(model, cluster, global_batch_size=batch)
    virtual = tuple(range(1, MAX_VIRTUAL_STAGES + 1))
    plans = all_plans(scenario, virtual_stages=virtual, replicas=True, experts=model == "mixtral")
    loops = legal_plans(scenario, list(plans))
    expected = {plan for plan in loops if in_the_space(plan, scenario.model.num_layers)}
    candidates = list(enumerated(scenario))
    assert len(candidates) == len(set(candidates))  # no plan twice
    whole = [plan for plan in candidates if plan.context_parallel == 1]
    assert legal_plans(scenario, whole) == expected
    assert expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fix",
    [
        "tp=2",
        "pp=2",
        "dp=2,zero=1",
        "tp=2,pp=2,zero=1",
        "recompute=full,sp=on",
        "mbs=2",
        "microbatches=4",
        "mbs=1,microbatches=4",
        "schedule=gpipe,pp=2",
        "schedule=interleaved_1f1b",
        "vp=2",
        "dp=8",
        "tp=1,pp=1",
        "sp=off",
    ],
)
def test_pinned_parts_pick_rows_of_the_whole_space(fix: str) -> None:
    scenario = make_scenario("llama", "8xA100-80GB", global_batch_size=16)
    fixed = parse_fixed(fix)
    everything = legal_plans(scenario, list(enumerated(scenario)))
    expected = {
        plan
        for plan in everything
        if all(getattr(plan, name) == value for name, value in fixed.items())
    }
    assert expected
    assert legal_plans(scenario, list(enumerated(scenario, fixed))) == expected


@pytest.mark.parametrize(
    "fix",
    ["tp=3", "tp=16", "dp=3", "pp=16", "tp=2,pp=2,dp=3", "mbs=5", "microbatches=7", "tp=1,sp=on"],
)
def test_what_cannot_be_pinned_gives_no_legal_plan(fix: str) -> None:
    scenario = make_scenario("llama", "8xA100-80GB", global_batch_size=16)
    candidates = list(enumerated(scenario, parse_fixed(fix)))
    assert candidates  # of which legality says what is wrong
    assert not legal_plans(scenario, candidates)


def test_a_pinned_schedule_leaves_plans_without_a_pipeline() -> None:
    scenario = make_scenario("llama", "8xA100-80GB", global_batch_size=16)
    found = legal_plans(scenario, list(enumerated(scenario, {"pipeline_schedule": "gpipe"})))
    assert {plan.pipeline_parallel for plan in found} == {1, 2, 4, 8}
    assert {plan.pipeline_schedule for plan in found} == {"gpipe"}


def test_columns_are_numbers_of_the_right_kind() -> None:
    table = enumerated(make_scenario())
    assert table.sequence_parallel.dtype == np.bool_
    assert table.tensor_parallel.dtype == np.int64


@given(st.integers(1, 10**6))
def test_divisors_divide_and_are_all(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % d == 0 for d in found)
    assert {number // d for d in found} == set(found)
    if number <= 2000:
        assert found == [d for d in range(1, number + 1) if number % d == 0]


# --- --fix ----------------------------------------------------------------------------------------


def test_brute_force_holds_plans_with_a_larger_batch_too() -> None:
    """The loops above must not be empty where the batch has many divisors."""
    scenario = make_scenario(global_batch_size=16)
    larger = replace(scenario, workload=replace(scenario.workload, global_batch_size=48))
    assert len(enumerated(larger)) > len(enumerated(scenario))


def test_long_sequences_are_shared_out() -> None:
    scenario = make_scenario("llama", "2x8xA100-80GB", seq_len=65_536, global_batch_size=4)
    plans = list(enumerated(scenario))
    assert {p.context_parallel for p in plans} == {1, 2, 4, 8, 16}
    assert {p.context_parallel_method for p in plans if p.context_parallel > 1} == {
        "ring",
        "ulysses",
        "allgather",
    }
    assert {p.context_parallel_method for p in plans if p.context_parallel == 1} == {"ring"}
    assert all(p.world_size == 16 for p in plans)
    assert len(plans) == len(set(plans))
    # ZeRO shards over the ranks of one sequence too
    assert any(p.data_parallel == 1 and p.zero_stage == 3 for p in plans)


def test_many_short_pieces_are_candidates_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = make_scenario("llama", "8xA100-80GB", seq_len=4_096, global_batch_size=8)
    assert {p.context_parallel for p in enumerated(scenario)} == {1, 2, 4, 8}
    monkeypatch.setattr(space, "FEW", 0)
    assert {p.context_parallel for p in enumerated(scenario)} == {1}
    of = scenario.model, scenario.workload, 8
    product = Space(*of, {}).short_product()
    assert product is not None
    projection = product.factored()[1].project(0)
    plans = product.plans(projection, np.arange(projection.size))
    assert set(plans.plain().context_parallel.tolist()) == {2, 4, 8}
    assert Space(*of, {"context_parallel": 2}).short_product() is None
    assert Space(*of, {"data_parallel": 8}).short_product() is None
    pinned = list(enumerated(scenario, parse_fixed("cp=2,cp_method=ulysses")))
    assert {(p.context_parallel, p.context_parallel_method) for p in pinned} == {(2, "ulysses")}


@pytest.mark.slow
def test_shards_are_split_into_replicas_in_every_way() -> None:
    scenario = make_scenario("llama", "4x8xA100-80GB", global_batch_size=32)
    plans = list(enumerated(scenario))
    for data, tensor in ((32, 1), (16, 2), (8, 4)):
        copies = {
            p.dp_replicate for p in plans if (p.data_parallel, p.tensor_parallel) == (data, tensor)
        }
        assert copies == set(divisors(data)) - {data}
    assert all(p.zero_stage > 0 for p in plans if p.dp_replicate > 1)


def test_pinned_replicas_are_judged_where_there_is_one_data_rank() -> None:
    """They cannot be there, but are candidates, and the others are searched."""
    scenario = make_scenario("llama", "2x8xA100-80GB", global_batch_size=16)
    plans = list(enumerated(scenario, parse_fixed("dp_replicate=2")))
    assert {p.dp_replicate for p in plans} == {2}
    assert {1, 2, 16} <= {p.data_parallel for p in plans}
    assert search(scenario, {"dp_replicate": 2, "tensor_parallel": 4}, top=1).plans


def test_offload_varies_where_it_is_allowed() -> None:
    scenario = make_scenario("llama", "4xA100-80GB", global_batch_size=4)
    assert {p.offload for p in enumerated(scenario)} == {"none"}
    words = allowed_offloads(["weights", "activations"])
    assert words == ("none", "activations", "weights", "weights+activations")
    table = enumerate_plans(scenario.model, scenario.workload, 4, {}, offloads=words)
    assert {p.offload for p in table} == set(words)
    several = [plan for plan in enumerated(scenario) if plan.data_parallel > 1]
    assert np.sum(table.data_parallel > 1) == 4 * len(several)
    alone = table.data_parallel * table.context_parallel == 1  # ZeRO may offload on one rank
    assert set(table.zero_stage[alone]) == {0, 1, 2, 3}
    pinned = enumerate_plans(
        scenario.model, scenario.workload, 4, {"offload": "optimizer"}, offloads=words
    )
    assert {p.offload for p in pinned} == {"optimizer"}


def test_fields_that_the_search_leaves_alone_can_be_pinned() -> None:
    """Of every field of a plan, so that a new one needs no entry in the search."""
    scenario = make_scenario("gpt2", "8xA100-80GB", seq_len=512, global_batch_size=8)
    unvaried = Space(scenario.model, scenario.workload, 8, {}).product().pinned
    assert {"recompute_layers", "offload_device", "quantised_weights"} < unvaried.keys()
    for name in unvaried:
        default = getattr(Plan(), name)
        wanted = WORDS[name][1] if name in WORDS else (not default) if default is False else 2
        table = enumerate_plans(scenario.model, scenario.workload, 8, {name: wanted})
        assert {getattr(table.plan(row), name) for row in range(0, len(table), 97)} == {wanted}
