"""What trainers run: profiles search and accept the plans of their tables, no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner
from cost_models.legality.capabilities import all_capabilities, capabilities_of
from cost_models.legality.rules import legality_codes
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import parent_of, profile_names, software_profile
from planner.search.search import search
from planner.search.space import enumerate_plans
from planner.validation.case import case_of
from planner.validation.reading import Unpriceable
from planner.validation.runs_file import PUBLISHED, Row, read_runs
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
