"""Stages of a user's own: how they are read, priced, searched and written down."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import planner
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import read_plan_file
from cost_models.pricing.estimate import price
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.cli.app import app
from planner.request.stage_layers import layers_option, stage_ranges
from tests.samples import llama, make_scenario

CLUSTER = "8xA100-80GB"
RANGES = ((0, 1), (1, 4), (4, 7), (7, 8))


def test_layers_are_read_and_typed() -> None:
    model = llama()
    assert stage_ranges("1,3,3,1", model) == stage_ranges([1, 3, 3, 1], model) == RANGES
    assert stage_ranges(" 1, 3,3 ,1", model) == RANGES
    assert stage_ranges("8", model) == ((0, 8),)
    assert layers_option(RANGES) == "--layers 1,3,3,1"


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("3,5,5,3", ["layers = 3,5,5,3", "16 in all", "tiny has 8", "must add up to 8"]),
        ("4,x", ["layers = 4,x", "whole number from 1"]),
        ("4,0,4", ["layers = 4,0,4", "whole number from 1"]),
        ("-1,9", ["layers = -1,9"]),
        ("", ["layers =", "such as 3,5,5,3"]),
        ("4,,4", ["layers = 4,,4"]),
        ([4, True, 3], ["layers = 4,True,3"]),
        ([4.0, 4.0], ["layers = 4.0,4.0"]),
        ([], ["layers ="]),
    ],
)
def test_what_are_no_stages_is_one_clear_line(layers: Any, said: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        planner.fit(llama(), CLUSTER, seq_len=256, layers=layers)
    assert "\n" not in str(caught.value)
    for word in said:
        assert word in str(caught.value)


@pytest.mark.slow
def test_fit_prices_the_stages_that_are_given() -> None:
    options: dict[str, Any] = {"seq_len": 256, "recompute": "none", "software": "megatron"}
    answer = planner.fit(llama(), CLUSTER, layers="1,3,3,1", **options)
    assert answer.plan.pipeline_parallel == 4  # a rank for each stage
    assert answer.to_dict()["layer_ranges"] == [list(pair) for pair in RANGES]
    assert "--layers 1,3,3,1" in str(answer)
    table = PlanTable.from_plans([answer.plan])
    exact = price(answer.scenario, table, RANGES)
    assert answer.assessment.time.step_seconds == float(exact.step[0])
    assert answer.assessment.memory.peak_bytes == float(exact.peak[0])
    even = planner.fit(llama(), CLUSTER, pipeline_parallel=4, **options)
    assert even.assessment.time.step_seconds < answer.assessment.time.step_seconds
    assert "layer_ranges" not in even.to_dict()
    same = planner.fit(llama(), CLUSTER, layers=[2, 2, 2, 2], **options)
    assert same.assessment == even.assessment


def test_stages_that_are_virtual() -> None:
    answer = planner.fit(
        llama(), CLUSTER, seq_len=256, layers="1,3,3,1", pipeline_schedule="interleaved_1f1b"
    )
    assert (answer.plan.pipeline_parallel, answer.plan.virtual_stages) == (2, 2)


@pytest.mark.parametrize("layers", ["4,2,2", "4,4"])
def test_another_number_of_stages_is_named(layers: str) -> None:
    with pytest.raises(InputError, match="pipeline_parallel 4 x virtual_stages 1 = 4 stages"):
        planner.fit(llama(), CLUSTER, seq_len=256, layers=layers, pipeline_parallel=4)


def test_the_search_keeps_the_stages_and_writes_them(tmp_path: Path) -> None:
    answer = planner.plan(
        llama(), CLUSTER, seq_len=256, global_batch_size=16, layers="1,3,3,1", top=3
    )
    assert all(found.num_stages == 4 for found in answer.result.plans)
    file = answer.plan_file()
    assert file.layer_ranges == RANGES
    times = [document.time.step_seconds for document in answer.assessments]
    assert times[0] <= 1.01 * min(times)  # the simplest of the fastest
    assert times[1:] == sorted(times[1:])
    assert file.prediction["time"]["step_seconds"] == times[0]


def test_no_plan_with_so_many_stages_says_so() -> None:
    with pytest.raises(NoLegalPlanError, match="layers are given for 3 stages"):
        planner.plan(llama(), CLUSTER, seq_len=256, layers="3,3,2")


@pytest.mark.slow
def test_the_command_line_writes_what_the_executor_reads(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    command = ["plan", "llama-3.2-1b", CLUSTER, "--seq-len", "1024", "--layers", "3,5,5,3"]
    command += ["--fix", "mbs=1", "--output", str(output), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert read_plan_file(output).layer_ranges == ((0, 3), (3, 8), (8, 13), (13, 16))
    assert json.loads(result.stdout)["layer_ranges"] == [[0, 3], [3, 8], [8, 13], [13, 16]]


def test_a_setting_without_stages_of_its_own_has_even_ones() -> None:
    scenario = make_scenario()
    assert scenario.pinned_stages(Plan().num_stages) is None
