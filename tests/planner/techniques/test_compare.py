"""compare_techniques(): lines of every technique, their order, and what they are derived of."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

import planner
from cost_models.plan.plan import SCHEDULES, Plan
from hardware_profiles.errors import InputError
from planner.assessment.assess import assess
from planner.cli.app import app
from planner.request.command import describe_plan
from planner.techniques.answer import TechniquesAnswer
from planner.techniques.grids import Grid, products
from planner.techniques.line import TechniqueLine
from tests.samples import llama

CLUSTER = "2x8xA100-80GB"


@cache
def answer(**options: Any) -> TechniquesAnswer:
    return planner.compare_techniques(
        "llama-3.2-1b", CLUSTER, seq_len=2048, global_batch_size=64, **options
    )


def line(name: str, **options: Any) -> TechniqueLine:
    (found,) = (one for one in answer(**options).lines if one.name == name)
    return found


def test_every_technique_has_one_line() -> None:
    names = [one.name for one in answer().lines]
    assert len(names) == len(set(names))
    assert {
        *("all", "ddp", "zero1", "zero2", "zero3", "hsdp", "zero_plus_plus"),
        *("zero_offload", "zero_infinity", "tensor", "tensor_sequence", "context", "experts"),
        *("tensor_2d", "tensor_2p5d", "tensor_3d", "pipedream", "pipedream_2bw"),
        *("parameter_server", "asynchronous_sgd"),
        *SCHEDULES,
    } == set(names)


def test_lines_that_fit_come_first_by_step_and_impossible_ones_last() -> None:
    lines = answer().lines
    fitting = [one for one in lines if one.verdict == "fits"]
    assert list(lines[: len(fitting)]) == fitting
    steps = [one.step_seconds for one in fitting]
    assert steps == sorted(steps)
    assert all(one.why_not for one in lines if one.verdict is None)
    assert line("all").step_seconds == min(
        one.step_seconds for one in fitting if one.level in ("runs", "plans")
    )


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ddp", {"zero_stage": 0, "data_parallel": 16}),
        ("zero1", {"zero_stage": 1, "data_parallel": 16}),
        ("zero3", {"zero_stage": 3, "data_parallel": 16}),
        ("zero_offload", {"offload": "optimizer", "zero_stage": 2}),
        ("zero_infinity", {"offload": "weights", "offload_device": "nvme"}),
        ("zero_plus_plus", {"secondary_ranks": 8, "quantised_weights": True}),
        ("tensor_sequence", {"sequence_parallel": True, "pipeline_parallel": 1}),
        ("zbv", {"pipeline_schedule": "zbv", "tensor_parallel": 1}),
    ],
)
def test_a_priced_line_is_the_best_plan_of_its_kind(name: str, parts: dict[str, Any]) -> None:
    found = line(name)
    assert found.plan is not None
    assert {key: getattr(found.plan, key) for key in parts} == parts
    priced = assess(answer().scenario, found.plan)
    assert found.peak_bytes == priced.memory.peak_bytes
    assert found.step_seconds == priced.time.step_seconds


def test_data_parallel_ranks_receive_twice_the_gradients_less_a_share() -> None:
    """Ring all-reduce of fp32 gradients: 2 (n - 1)/n w P."""
    parameters = answer().scenario.model.num_parameters
    assert line("ddp").received_bytes == pytest.approx(2 * 15 / 16 * 4 * parameters, rel=0.01)


def test_levels_say_what_shardplan_does() -> None:
    assert line("zero3").level == line("1f1b").level == "runs"
    assert line("zero_plus_plus").level == line("zero_infinity").level == "estimates"
    assert line("tensor_2d").level == line("asynchronous_sgd").level == "compares"
    assert "deepspeed" in line("zero1").exports
    assert "torchtitan" in line("zero3").exports
    assert line("tensor_3d").exports == ()


def test_grids_divide_the_states_of_the_model() -> None:
    """2 x 2 ranks keep a quarter of the weights, 2 x 2 x 2 an eighth; a box keeps a quarter."""
    whole = answer().scenario.model.num_parameters
    matrices = products(answer().scenario.model, Grid(1), 1).weights
    assert matrices == pytest.approx(whole, rel=0.001)  # the tied head instead of the embedding
    for grid, share in ((Grid(2), 4), (Grid(2, 2), 4), (Grid(2, cube=True), 8)):
        assert products(answer().scenario.model, grid, 1).weights == matrices / share


def test_grids_need_whole_sequences_for_their_rows() -> None:
    found = planner.compare_techniques(llama(), "4xA100-80GB", seq_len=256, global_batch_size=1)
    (square,) = (one for one in found.lines if one.name == "tensor_2d")
    assert square.why_not is not None
    assert "a micro-batch of 2 sequences" in square.why_not


def test_pipelines_without_a_flush_save_the_bubble_and_keep_more_weights() -> None:
    double, stashed = line("pipedream_2bw"), line("pipedream")
    for found in (double, stashed):
        assert "--pp" in found.layout
        assert "late by" in found.note
    scenario = answer().scenario
    words = double.layout.split()
    pipeline, size = (int(words[words.index(w) + 1]) for w in ("--pp", "--micro-batch-size"))
    plan = Plan(
        data_parallel=16 // pipeline,
        pipeline_parallel=pipeline,
        micro_batch_size=size,
        num_microbatches=64 * pipeline // (16 * size),
    )
    assert describe_plan(plan).split()[:4] == words[:4]
    flushed = assess(scenario, plan)
    step = flushed.time.step_seconds - float(flushed.time.parts.bubble)
    assert double.step_seconds == pytest.approx(step)
    assert double.peak_bytes > flushed.memory.peak_bytes


def test_workers_of_a_parameter_server_keep_no_optimizer_states() -> None:
    server, delayed, alone = line("parameter_server"), line("asynchronous_sgd"), line("ddp")
    parameters = answer().scenario.model.num_parameters
    assert server.received_bytes == delayed.received_bytes == 2 * parameters
    assert server.peak_bytes < alone.peak_bytes - 8 * parameters  # two fp32 moments
    assert delayed.step_seconds <= server.step_seconds
    assert "late by 15 updates" in delayed.note


def test_a_pinned_micro_batch_is_that_of_every_line() -> None:
    found = planner.compare_techniques(
        llama(), "4xA100-80GB", seq_len=256, global_batch_size=16, micro_batch_size=2
    )
    plans = [one.plan for one in found.lines if one.plan is not None]
    assert {plan.micro_batch_size for plan in plans} == {2}


def test_short_sequences_are_shared_by_the_fewest_ranks() -> None:
    found = line("context").plan
    assert found is not None
    assert found.context_parallel == 2


def test_frozen_weights_leave_the_formulas_out() -> None:
    found = planner.compare_techniques(llama(), "2xA100-80GB", seq_len=256, lora=8)
    words = "its formulas are of training all weights"
    missing = {one.name for one in found.lines if one.why_not == words}
    assert {"tensor_2d", "pipedream", "asynchronous_sgd"} <= missing


def test_one_accelerator_has_nothing_to_compare() -> None:
    found = planner.compare_techniques(llama(), "1xA100-80GB", seq_len=256)
    assert [one.name for one in found.lines if one.verdict == "fits"] == [
        *("all", "ddp", "zero_offload", "zero_infinity")
    ]
    assert str(found).count("there is one accelerator") == 1


@pytest.mark.parametrize("columns", [60, 80])
def test_the_text_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(answer())
    assert max(map(len, text.splitlines())) <= columns
    assert "Fits, fastest first" in text
    assert ("exports" in text) == (columns == 80)


def test_details_name_layouts_and_notes() -> None:
    text = answer().text(verbose=True)
    assert "as PipeDream-Flush" in text
    assert "grid 2 x 2" in text


def test_the_document_is_plain_and_the_table_has_a_row_each() -> None:
    document = json.loads(json.dumps(answer().to_dict(), allow_nan=False))
    assert document["schema_version"] == 1
    assert len(document["techniques"]) == len(answer().table) == len(answer().lines)
    assert np.isfinite(answer().table["peak_bytes"].dropna()).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "module:a.b:c"}, "layers are known"),
        ({"cluster": "8xA100-80GB,8xH100-SXM"}, "one cluster is expected"),
        ({"micro_batch_size": 0}, "micro_batch_size = 0"),
        ({"seq_length": 4}, "seq_len"),
    ],
)
def test_errors_name_what_was_wrong(options: dict[str, Any], words: str) -> None:
    asked = {"model": "gpt2", "cluster": "8xA100-80GB", **options}
    with pytest.raises((InputError, TypeError), match=words):
        planner.compare_techniques(**asked)


def test_the_command_prints_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare-techniques", "gpt2", "1xA100-80GB", "--json"]
    assert app.main(args=words, standalone_mode=False) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "gpt2"
