"""What trainers run: profiles search and accept the plans of their tables, no others."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

import planner
from cost_models.legality.capabilities import (
    Capabilities,
    Never,
    _check,
    _joined,
    all_capabilities,
    beyond_trainer,
    beyond_trainer_in_words,
    capabilities,
    capabilities_of,
    require_runnable_workload,
    targets,
    trainer_named,
    usual,
)
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import parent_of, profile_names, software_profile
from planner.search.search import search
from planner.search.space import enumerate_plans
from planner.validation.rows.case import case_of
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import PUBLISHED, Row, read_runs
from tests.samples import make_scenario

# parts of the plans of a trainer that have one value, and some that have several
FIXED: dict[str, dict[str, Any]] = {
    "hf-trainer": {"pipeline_parallel": 1, "virtual_stages": 1, "sequence_parallel": False},
    "hf-trainer-liger+fsdp2": {"pipeline_parallel": 1, "expert_parallel": 1},
    "torchtune": {"pipeline_parallel": 1, "virtual_stages": 1},
    "megatron-2021": {"zero_stage": 0, "sequence_parallel": False, "context_parallel": 1},
    "composer": {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1},
    "torchtitan": {"recompute_layers": 0},
}
FREE = {"hf-trainer": "tensor_parallel", "torchtune": "tensor_parallel"} | {
    "hf-trainer-liger+fsdp2": "zero_stage",
    "megatron-2021": "virtual_stages",
    "composer": "zero_stage",
    "torchtitan": "pipeline_parallel",
}


@pytest.mark.parametrize("software", FIXED)
def test_a_profile_searches_the_plans_of_its_trainer_alone(software: str) -> None:
    scenario = make_scenario("llama", "8xA100-80GB", seq_len=8192, software=software)
    if software == "megatron-2021":
        scenario = replace(scenario, workload=replace(scenario.workload, attention_kernel="eager"))
    table = enumerate_plans(scenario.model, scenario.workload, 8, {})
    legal = table.rows(np.flatnonzero(legality_codes(scenario, table) == 0))
    for name, value in FIXED[software].items():
        assert (getattr(legal, name) == value).all()
    assert len(np.unique(getattr(legal, FREE[software]))) > 1
    found = search(scenario, top=3)
    assert found.counts.illegal["trainer"] > 0
    limits = capabilities_of(scenario.software)
    assert limits is not None
    assert not any(limits.problems_of_plan(plan) for plan in found.plans)


def test_a_profile_has_the_table_of_what_it_inherits() -> None:
    tables = {software_profile(name).capabilities for name in profile_names()}
    assert tables - {""} <= set(all_capabilities())
    for name in ("hf-trainer-foak", "torchtune-chunked", "nemo"):
        parent = parent_of(name)
        assert software_profile(name).capabilities == software_profile(parent).capabilities != ""
    assert software_profile("hf-trainer+any-plan").capabilities == ""


def test_fit_names_what_a_trainer_cannot_run_and_the_nearest_plan() -> None:
    asked = {"pipeline_parallel": 4, "data_parallel": 2, "zero_stage": 1, "recompute": "none"}
    asked |= {"micro_batch_size": 1, "software": "hf-trainer"}
    with pytest.raises(InputError) as raised:
        planner.fit("llama-3.2-1b", "8xA100-80GB", **asked)
    said = str(raised.value)
    assert "Hugging Face Trainer" in said
    assert "pipeline_parallel = 4 (it runs 1). --software" in said
    assert "The nearest that it runs: --dp 8" in said
    assert "shardplan plan llama-3.2-1b 8xA100-80GB --software hf-trainer" in said
    planner.fit("llama-3.2-1b", "8xA100-80GB", **asked | {"software": "hf-trainer+any-plan"})


def test_defaults_are_those_of_the_trainer() -> None:
    """Where they differ from the usual ones: sequence parallelism, kernels, the ZeRO stage."""
    complete = {"tensor_parallel": 2, "recompute": "none", "micro_batch_size": 1}
    answer = planner.fit("llama-3.2-1b", "8xA100-80GB", software="hf-trainer", **complete)
    assert not answer.plan.sequence_parallel
    answer = planner.fit("llama-3.2-1b", "8xA100-80GB", software="megatron-2021", **complete)
    assert (answer.plan.zero_stage, answer.scenario.workload.attention_kernel) == (0, "eager")
    flash = {"software": "megatron-2021", "attention_kernel": "flash"}
    with pytest.raises(InputError, match=r"megatron-2021.* attention_kernel = flash .*runs eager"):
        planner.fit("llama-3.2-1b", "1xA100-80GB", **flash)


def test_a_row_whose_profile_cannot_run_its_plan_takes_the_one_that_it_inherits() -> None:
    cells = {"framework": "Hugging Face Trainer", "model": "llama2-7b", "gpu": "A100-SXM"}
    cells |= {"num_gpus": 8, "pipeline_parallel": 4, "global_batch_size": 32, "seq_len": 2048}
    case = case_of(Row(**cells))
    assert case.scenario.software.name == "torch-trainer"
    assert any("hf-trainer does not run pipeline_parallel = 4" in one for one in case.defaults)


@pytest.mark.slow
def test_published_runs_are_plans_that_their_trainers_run() -> None:
    """Colossal-AI's stand-in is another profile; Llama 3's rows name a profile and figures."""
    beyond = set()
    for row in read_runs(PUBLISHED):
        try:
            case = case_of(row)
        except Unpriceable:
            continue
        limits = capabilities_of(case.scenario.software)
        experts = case.scenario.model.has_experts
        if limits is not None and limits.problems(
            case.plan, case.scenario.workload, experts=experts
        ):
            beyond.add(row.get("source_group"))
    assert beyond == {"llama3-paper"}


# --- one table by hand ---------------------------------------------------------------------------

TOY = Capabilities(
    title="Toy",
    version="2",
    source="made up",
    plan={"tensor_parallel": "any", "pipeline_parallel": [1, 2], "recompute": ["none", "full"]}
    | {"zero_stage": [0, 2], "sequence_parallel": [True], "micro_batch_size": [1, 2]},
    workload={"precision": ["fp32"], "optimizer": "any", "adapter": ["none", "qlora"]},
    never=(
        Never({"tensor_parallel": ">1", "zero_stage": [2]}, "shards are not cut"),
        Never({"dp_shard": [3]}, "three shards are not aligned", of_experts=True),
    ),
)
RUN_BY_TOY: list[tuple[Plan, str]] = [
    (Plan(), ""),
    (Plan(4, zero_stage=2, num_microbatches=9, recompute="full"), ""),
    (Plan(1, 7, sequence_parallel=True), ""),
    (Plan(3, pipeline_parallel=2), ""),
    (Plan(1, 2), "sequence_parallel = False (it runs True)"),  # means something from two ranks on
    (Plan(1, 1, 3), "pipeline_parallel = 3 (it runs 1, 2)"),
    (Plan(1, 1, 2, virtual_stages=2), "virtual_stages = 2 (it runs 1)"),
    (Plan(virtual_stages=2), ""),  # without a pipeline no one asks
    (Plan(2, zero_stage=1), "zero_stage = 1 (it runs 0, 2)"),
    (Plan(recompute="selective"), "recompute = selective (it runs none, full)"),
    (Plan(micro_batch_size=3), "micro_batch_size = 3 (it runs 1, 2)"),
    (Plan(2, 1, offload="optimizer"), "offload = optimizer (it runs none)"),
    (
        Plan(2, 2, zero_stage=2, sequence_parallel=True),
        "tensor_parallel 2, zero_stage 2: shards are not cut",
    ),
]


def test_a_table_lists_values_or_leaves_a_part_free_and_all_others_have_their_defaults() -> None:
    plans = [plan for plan, _ in RUN_BY_TOY]
    for plan, problem in RUN_BY_TOY:
        assert TOY.problems_of_plan(plan) == ([problem] if problem else [])
    runs = [not problem for _, problem in RUN_BY_TOY]
    assert TOY.runnable(PlanTable.from_plans(plans)).tolist() == runs
    assert "tensor_parallel" not in TOY.limits()
    assert "data_parallel" not in TOY.limits()
    assert TOY.limits()["micro_batch_size"] == [1, 2]
    assert TOY.limits()["context_parallel"] == [1]


def test_a_combination_may_be_refused_for_experts_alone() -> None:
    three, table = Plan(6, dp_replicate=2), PlanTable.from_plans([Plan(6, dp_replicate=2)])
    limits = replace_struct(TOY, plan={**TOY.plan, "dp_replicate": "any"})
    assert limits.problems_of_plan(three) == []
    assert limits.runnable(table).tolist() == [True]
    said = ["dp_shard 3: three shards are not aligned"]
    assert limits.problems_of_plan(three, experts=True) == said
    assert limits.runnable(table, experts=True).tolist() == [False]


def test_what_a_table_says_of_workloads() -> None:
    fits = Workload(8, 8, precision="fp32")
    assert TOY.problem_of_workload(fits) is None
    assert TOY.problem_of_workload(replace(fits, optimizer="muon")) is None
    assert TOY.problem_of_workload(Workload(8, 8)) == "precision = bf16 (it runs fp32)"
    # the values of frozen matrices mean something under QLoRA alone
    adapted = replace(fits, adapter="qlora", quantisation="int8")
    assert TOY.problem_of_workload(adapted) == "quantisation = int8 (it runs nf4)"
    assert TOY.problem_of_workload(replace(adapted, adapter="none")) is None
    both = TOY.problems(Plan(2, zero_stage=1), Workload(8, 8))
    assert both == ["precision = bf16 (it runs fp32)", "zero_stage = 1 (it runs 0, 2)"]


def test_a_table_that_is_like_another_has_its_entries() -> None:
    base = {"version": "1", "source": "code", "title": "Base", "plan": {"a": [1], "b": [2]}}
    base |= {"workload": {"c": [3]}, "never": [{"why": "first"}]}
    like = {"like": "base", "title": "Like", "plan": {"b": "any"}, "never": [{"why": "second"}]}
    assert _joined({"base": base, "like": like}, "like") == {
        "title": "Like",
        "version": "1",
        "source": "code",
        "plan": {"a": [1], "b": "any"},
        "workload": {"c": [3]},
        "never": [{"why": "first"}, {"why": "second"}],
    }
    assert like["like"] == "base"  # unchanged
    newer = {**like, "version": "2", "source": "newer code"}
    assert _joined({"base": base, "like": newer}, "like")["version"] == "2"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"plan": {"tensor": "any"}}, "toy: tensor is no part of a plan"),
        ({"plan": {"recompute": ["never"]}}, "toy: recompute = never"),
        ({"plan": {"sequence_parallel": ["yes"]}}, "toy: sequence_parallel = yes"),
        ({"never": (Never({"shards": [1]}, ""),)}, "toy: shards is no part of a plan"),
        (
            {"workload": {"seq_len": [1]}},
            "toy: seq_len is no part of a workload that a target limits",
        ),
    ],
)
def test_a_table_with_an_unknown_part_or_value_is_refused(
    change: dict[str, Any], problem: str
) -> None:
    _check(TOY, "toy")
    with pytest.raises(InputError, match=f"^{re.escape(problem)}$"):
        _check(replace_struct(TOY, **change), "toy")


def test_every_name_of_a_trainer_stands_for_its_profile_or_its_table() -> None:
    tables = all_capabilities()
    for name, one in tables.items():
        assert (name in targets()) == bool(one.checked_by)
        if one.software and name not in profile_names():
            known = name if one.software_of_zero_stage else one.software
            spelled = [name.upper(), one.title, *one.also]
            assert {trainer_named(each) for each in spelled} <= {known, *profile_names()}
            assert trainer_named(name) == known
    assert trainer_named("Hugging-Face trainer") == "transformers"
    assert trainer_named("HF trainer") == trainer_named("hf-trainer") == "hf-trainer"
    assert trainer_named("no such trainer") == "no such trainer"
    deepspeed = tables["deepspeed"]
    assert trainer_named("Deep Speed") == "deepspeed"
    assert deepspeed.name == "DeepSpeed 0.19.8"
    assert [deepspeed.software_for(stage) for stage in (0, 1)] == [
        "torch-trainer+ddp",
        "torch-trainer+deepspeed-zero1",
    ]
    with pytest.raises(InputError, match=r"target 'deepsped' is unknown .* deepspeed"):
        capabilities("deepsped")
    assert capabilities("deepspeed") is deepspeed


def test_a_profile_prices_adapters_without_shards_where_its_trainer_has_one_for_them() -> None:
    one = replace_struct(
        TOY, software="a", software_of_adapters="b", software_of_zero_stage={"2": "c"}
    )
    assert [one.software_for(stage) for stage in (0, 1, 2)] == ["a", "a", "c"]
    assert [one.software_for(stage, adapters=True) for stage in (0, 1, 2)] == ["b", "a", "c"]


def test_the_usual_value_is_the_trainers_first_where_it_has_others() -> None:
    early = software_profile("megatron-2021")
    assert usual(early, "attention_kernel", "flash") == "eager"
    assert usual(early, "tensor_parallel", 8) == 8
    assert usual(early, "zero_stage", 3) == 0
    assert usual(software_profile("shardplan"), "zero_stage", 3) == 3


def test_plans_and_workloads_beyond_a_trainer_are_illegal_and_say_why() -> None:
    scenario = make_scenario("llama", software="hf-trainer")
    plans = [Plan(8, zero_stage=3), Plan(4, pipeline_parallel=2)]
    table = PlanTable.from_plans(plans)
    assert beyond_trainer(scenario, table).tolist() == [False, True]
    assert beyond_trainer(make_scenario("llama"), table).tolist() == [False, False]
    other = replace(scenario, workload=replace(scenario.workload, precision="fp64"))
    assert beyond_trainer(other, table).tolist() == [True, True]
    said = beyond_trainer_in_words(other, plans[1])
    assert re.fullmatch(
        r"Hugging Face Trainer .* cannot run this plan: precision = fp64 \(it runs [^;]*\); "
        r"pipeline_parallel = 2 \(it runs 1\)",
        said,
    )
    require_runnable_workload(scenario.software, scenario.workload)
    with pytest.raises(InputError, match=r"^--software hf-trainer: Hugging Face .* precision = fp"):
        require_runnable_workload(other.software, other.workload)
