"""``learn``: what it recovers, the file it writes, and its errors."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.assessment.confidence import confidence_words
from planner.learning.effects import log_predictions
from planner.validation.rows.case import case_of
from planner.validation.rows.runs_file import read_runs
from tests.samples import make_scenario

ROW: dict[str, Any] = {
    "framework": "torchtitan",
    "model": "llama-3-8b",
    "gpu": "H100-SXM-80GB",
    "num_gpus": 8,
    "gpus_per_node": 8,
    "seq_len": 4096,
    "micro_batch_size": 1,
    "zero_stage": 3,
    "recompute": "none",
    "precision": "bf16",
    "flash_attention": 1,
    "memory_definition": "torch allocated",
}
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": 2, "recompute": "full"},
    {"seq_len": 8192, "recompute": "full"},
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(rows)
    return path


def made(folder: Path, figures: dict[str, Any], plans: Any = PLANS) -> Path:
    """Write runs of a trainer whose profile has other figures."""
    rows = [{**ROW, **plan, "row_id": f"run {n}"} for n, plan in enumerate(plans)]
    cases = [case_of(row) for row in read_runs(write(folder / "plain.csv", rows))]
    logs = np.exp(log_predictions(cases, figures))
    for row, (step, _) in zip(rows, logs, strict=True):
        row["step_time_s"] = f"{step:.6g}"
    return write(folder / "RUNS.csv", rows)


@pytest.mark.slow
def test_a_slower_machine_is_learned(tmp_path: Path) -> None:
    path = made(tmp_path, {"kernels.rate_share": 0.8})
    output = tmp_path / "mine.toml"
    answer = planner.learn(path, output)
    found = software_profile(str(output))
    assert found.kernels.rate_share == pytest.approx(0.8, abs=0.06)
    assert (found.inherits, found.learned.runs) == ("eager-fsdp2", 3)  # type: ignore[union-attr]
    assert "learned from 3 runs in RUNS.csv on 20" in found.sources["kernels.rate_share"]
    for run in answer.runs:
        assert run.step is not None
        assert abs(run.step_after / run.step - 1.0) < 0.05 < run.step / run.step_before - 1.0
    rates = next(one for one in answer.conclusions if one.mechanism == "matmul and memory rates")
    assert rates.verdict in ("concluded", "leaning")
    assert str(output) in str(answer)
    assert answer.to_dict()["runs"][0]["run"] == "run 0"


@pytest.mark.slow
def test_a_run_that_nothing_explains_is_named_and_does_not_turn_the_others(tmp_path: Path) -> None:
    """A step twenty times too long: the learned profile is no further off than the first one."""
    rows = list(csv.DictReader(made(tmp_path, {}).read_text().splitlines()))
    rows[2]["step_time_s"] = f"{20.0 * float(rows[2]['step_time_s']):.6g}"
    died = {**rows[0], "row_id": "died", "micro_batch_size": 16, "outcome": "oom"}
    path = write(tmp_path / "RUNS.csv", [*rows, {**died, "step_time_s": ""}])
    output = tmp_path / "mine.toml"
    answer = planner.learn(path, output)
    wrong = answer.runs[2]
    assert wrong.step is not None
    assert wrong.step_before < wrong.step_after < wrong.step
    assert "Not explained: " in str(answer)
    words = str(answer).replace("\n", " ")
    assert "Left out: died: ran out of memory, which is no figure to learn from" in words
    named = write(tmp_path / "named.csv", [{**row, "software": str(output)} for row in rows])
    steps = np.exp(log_predictions([case_of(row) for row in read_runs(named)], {})[:, 0])
    assert steps == pytest.approx([run.step_after for run in answer.runs], rel=2e-3)
    assert answer.spreads["time"].above > 1.0


@pytest.mark.slow
def test_the_file_prices_other_plans(tmp_path: Path) -> None:
    path = made(tmp_path, {"kernels.rate_share": 0.8})
    output = tmp_path / "mine.toml"
    planner.learn(path, output)
    request: dict[str, Any] = {"seq_len": 4096, "zero_stage": 2, "micro_batch_size": 1}
    request |= {"data_parallel": 8, "recompute": "none"}
    usual = planner.fit("llama-3-8b", "8xH100-SXM-80GB", software="eager-fsdp2", **request)
    own = planner.fit("llama-3-8b", "8xH100-SXM-80GB", software=str(output), **request)
    steps = [answer.to_dict()["time"]["step_seconds"] for answer in (usual, own)]
    assert 1.1 < steps[1] / steps[0] < 1.35
    words = confidence_words(make_scenario("llama", "8xH100-SXM-80GB", software=str(output)))
    assert "of your own on H100-SXM-80GB; steps of plans like them include" in words


@pytest.mark.slow
def test_the_next_run_is_none_of_those_measured(tmp_path: Path) -> None:
    answer = planner.learn(made(tmp_path, {}, PLANS[:1]), tmp_path / "mine.toml")
    assert len(answer.next_runs) > 1
    nats = [run.nats for run in answer.next_runs]
    assert nats == sorted(nats, reverse=True)
    assert min(nats) >= 0.0
    assert "Next run" in str(answer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ({}, {"framework": "litgpt"}),
            "runs of 2 trainers: eager-fsdp2 (run 0), litgpt (run 1) (must be one",
        ),
        (
            ({}, {"gpu": "A100-SXM-80GB"}),
            "runs of 2 accelerators: A100-SXM-80GB (run 1), H100-SXM-80GB (run 0)",
        ),
        (({"step_time_s": ""},), "no run to learn from: run 0: neither step time nor peak memory"),
        (({"num_gpus": 6, "tensor_parallel": 4},), "no run to learn from: run 0: 4 model-parallel"),
        (({},) * 21, "21 runs (must be 1 to 20"),
        (({"step_time_s": 0},), "run 0: step_time_s = 0 (must be above 0, or empty)"),
        (({"step_time_s": 1000},), "run 0: a step of 1,000 s, predicted 0.5"),
        (({"step_time_s": 0.001},), "(step_time_s must be in seconds, of an optimizer step"),
        (({"peak_memory_gib": 31000},), "a peak of 3.1e+04 GiB on H100-SXM-80GB with 79.65 GiB"),
        (({"peak_memory_gib": 0.031},), "(peak_memory_gib must be in GiB, of one accelerator"),
        (({}, {"step_time_s": 1.3}), "run 0 and run 1 have the same plan, but take 1 and 1.3 s"),
    ],
)
def test_unusable_runs_are_named(
    tmp_path: Path, changes: tuple[dict[str, Any], ...], words: str
) -> None:
    rows = [
        {**ROW, "step_time_s": 1.0, **change, "row_id": f"run {n}"}
        for n, change in enumerate(changes)
    ]
    path = write(tmp_path / "RUNS.csv", rows)
    with pytest.raises(InputError) as found:
        planner.learn(path, tmp_path / "mine.toml")
    assert words in str(found.value)


@pytest.mark.slow
def test_a_peak_without_its_definition_is_said_to_be_left_out(tmp_path: Path) -> None:
    row = {**ROW, "step_time_s": 0.6, "peak_memory_gib": 50, "memory_definition": ""}
    answer = planner.learn(write(tmp_path / "RUNS.csv", [row]), tmp_path / "mine.toml")
    assert list(answer.skipped.values()) == ["no memory_definition: the peak is not compared"]
    assert "the peak is not compared" in str(answer)


def test_the_output_is_a_new_toml(tmp_path: Path) -> None:
    path = made(tmp_path, {}, PLANS[:1])
    with pytest.raises(InputError, match=r"mine: must end in \.toml"):
        planner.learn(path, tmp_path / "mine")
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(InputError, match="exists already; choose another name or add --force"):
        planner.learn(path, tmp_path / "mine.toml")
    assert planner.learn(path, tmp_path / "mine.toml", force=True).runs
    with pytest.raises(InputError, match="needs a file to write"):
        planner.learn(path)


def test_a_changed_case_is_priced_by_itself(tmp_path: Path) -> None:
    case = case_of(read_runs(made(tmp_path, {}, PLANS[:1]))[0])
    twice = replace(case, plan=case.plan)
    slow, fast = (log_predictions([twice], {"kernels.rate_share": x})[0, 0] for x in (0.5, 1.0))
    assert slow > fast
