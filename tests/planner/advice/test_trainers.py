"""The line of an answer with the best step of each common trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.advice import trainers
from planner.advice.trainers import COMMON, MOST_GPUS, best_of_trainers
from planner.search.simplicity import CLOSE
from tests.planner.runs.recorded import machine
from tests.samples import make_scenario, sample_model


def test_the_line_of_trainers_shows_what_each_one_answers() -> None:
    """Within CLOSE, of which the trainer's own answer takes the simplest plan."""
    answer = planner.plan("llama-3.2-1b", "4xA100-80GB", seq_len=1024)
    assert {one.software for one in answer.trainers} == set(COMMON)
    steps = [one.step_seconds for one in answer.trainers]
    assert steps == sorted(steps)
    for one in answer.trainers:
        own = planner.plan("llama-3.2-1b", "4xA100-80GB", seq_len=1024, software=one.software)
        step = own.assessments[0].time.step_seconds
        assert one.step_seconds == pytest.approx(step, rel=CLOSE)
        assert own.trainers == ()
    assert f"Trainers   {answer.trainers[0].software} " in answer.text()
    assert answer.to_dict()["trainers"][0]["software"] == answer.trainers[0].software


def test_a_trainer_without_such_a_plan_is_left_out() -> None:
    fixed = {"pipeline_parallel": 2, "recompute": "none"}
    found = best_of_trainers(make_scenario("llama", "4xA100-80GB"), fixed)
    assert {one.software for one in found} == {"nemo", "torchtitan"}
    assert all(one.plan.pipeline_parallel == 2 for one in found)
    large = make_scenario("llama", f"{MOST_GPUS // 4}x8xA100-80GB")
    assert best_of_trainers(large, {}) == ()


def test_cpu_processes_have_no_other_trainers() -> None:
    scenario = make_scenario("llama", "4xA100-80GB")
    cpu = replace(scenario, cluster=machine(4))
    assert best_of_trainers(cpu, {}) == ()


@pytest.mark.slow
def test_a_trainer_has_stages_of_its_own_where_it_can_run_them() -> None:
    """No slower than what ``--software`` answers, and with the layers that it shows."""
    fixed = {"pipeline_parallel": 2, "tensor_parallel": 1}
    sizes = {"num_hidden_layers": 9, "hidden_size": 1024, "intermediate_size": 4096}
    model = sample_model("llama", **sizes, vocab_size=128_000)
    scenario = make_scenario(model, "4xA100-80GB", seq_len=1024, global_batch_size=32)
    found = {one.software: one for one in best_of_trainers(scenario, fixed)}
    for name in ("nemo", "torchtitan"):
        answer = planner.plan(
            model,
            "4xA100-80GB",
            seq_len=1024,
            global_batch_size=32,
            software=name,
            fix=fixed,
        )
        best = answer.ranked[0]  # type: ignore[union-attr]
        staged, step = best.staged, best.step.seconds
        assert found[name].step_seconds == pytest.approx(step, rel=CLOSE)
        assert (found[name].layers is None) == (staged is None)
    assert found["nemo"].layers is not None
    assert found["nemo"].to_dict()["layers"] == list(found["nemo"].layers)


@pytest.mark.slow
def test_trainers_have_orders_of_their_own_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it the answer says so, whatever order its own plan has."""
    box = tmp_path / "box.toml"
    levels = ("above = [0,1,2,3,4,5,0,1,2,3,4,5]", "each = 3", "each = 2")
    text = 'nodes = 1\ngpus_per_node = 12\naccelerator = "L40S"\n'
    for number, level in enumerate(levels):
        text += f'[[level]]\nname = "{number}"\n{level}\nbandwidth = {25e9 - number * 4e9}\n'
    box.write_text(text)
    asked: dict[str, Any] = {"global_batch_size": 24, "seq_len": 1024, "fix": "tp=2,pp=1"}
    answer = planner.plan("llama-3.2-1b", box, **asked)
    assert answer.ranked[0].placed is not None  # type: ignore[union-attr]
    assert all(one.order is not None for one in answer.trainers if one.plan.tensor_parallel > 1)
    assert "default order of ranks" not in answer.text()
    monkeypatch.setattr(trainers, "SMALL", 8)
    usual = planner.plan("llama-3.2-1b", box, **asked)
    assert "default order of ranks" in usual.text()
    steps = {one.software: one.step_seconds for one in usual.trainers}
    assert any(one.step_seconds < 0.99 * steps[one.software] for one in answer.trainers)
    assert all(one.step_seconds <= steps[one.software] for one in answer.trainers)
