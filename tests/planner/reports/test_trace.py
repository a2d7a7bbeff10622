"""The trace of a step agrees with the prediction of the plan."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cost_models.plan.plan import SCHEDULES, Plan
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from planner.cli import app as cli
from planner.reports import trace as module
from planner.reports.reported_plan import read_reported
from planner.reports.trace import trace
from tests.planner.runs.recorded import machine, plan_file, write_plan, write_run

GPUS = parse_cluster("1x8xA100-SXM-80GB")
PLANS = {
    "one rank": (Plan(num_microbatches=3), parse_cluster("1xA100-SXM-80GB")),
    "fsdp": (Plan(data_parallel=8, zero_stage=3, num_microbatches=2, recompute="full"), GPUS),
    "offload": (
        Plan(data_parallel=8, zero_stage=3, recompute="full", offload="activations"),
        GPUS,
    ),
    "tensor": (Plan(data_parallel=4, tensor_parallel=2, sequence_parallel=True), GPUS),
    "cpu": (Plan(pipeline_parallel=2, num_microbatches=4), machine()),
    **{
        schedule: (
            Plan(
                data_parallel=2,
                pipeline_parallel=4,
                virtual_stages=1 if schedule in ("gpipe", "1f1b", "zero_bubble") else 2,
                pipeline_schedule=schedule,
                num_microbatches=8,
            ),
            GPUS,
        )
        for schedule in SCHEDULES
    },
}


def by_thread(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_the_trace_ends_with_the_step_and_peaks_at_the_predicted_peak(
    name: str, tmp_path: Path
) -> None:
    plan, cluster = PLANS[name]
    path = write_plan(tmp_path / "plan.json", plan_file(cluster, plan))
    found, predicted = trace(path), read_reported(path).assessment
    events = json.loads(found.file_text())["traceEvents"]
    ends = [(event["ts"] + event["dur"]) / 1e6 for event in events if event["ph"] == "X"]
    step = predicted.time.step_seconds
    assert max(ends) == pytest.approx(step, rel=1e-9)
    counted = [event["args"]["bytes"] for event in events if event["name"] == "device memory"]
    assert max(counted) == pytest.approx(predicted.memory.peak_bytes, rel=1e-12)
    for line in by_thread(events).values():  # slices of one thread follow each other
        assert all(event["dur"] >= 0 for event in line)
        for before, after in pairwise(line):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6 * step * 1e6
    for number, stage in enumerate(predicted.memory.stages):
        mine = [e for e in events if e["name"] == "device memory" and e["pid"] == number]
        peak = max(event["args"]["bytes"] for event in mine)
        assert peak == pytest.approx(stage.peak_bytes, rel=1e-12)
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)


def test_of_many_passes_the_first_and_last_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_plan(tmp_path / "plan.json", plan_file(*reversed(PLANS["1f1b"])))
    whole = trace(path)
    monkeypatch.setattr(module, "MOST_PASSES", 16)
    few = trace(path)
    assert len(few.events) < len(whole.events)
    assert "first and last 16 of 64 passes" in str(few)
    last = max(e["ts"] + e["dur"] for e in few.events if e["ph"] == "X")
    assert last == pytest.approx(1e6 * whole.step_seconds)


def test_a_run_adds_its_measured_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plan_file(), machine())
    assert not trace(folder).measured
    each = {"kind": "forward", "stage": 0, "microbatch": 0, "begin": 0.5, "end": 1.5}
    wait = {"operation": "all_reduce", "begin": 0.75, "end": 1.0}
    rank = {"rank": 1, "stage": 0, "passes": [each], "waits": [wait]}
    document = {"schema_version": 1, "step": 9, "phases": {"optimizer": 0.25}, "ranks": [rank]}
    (folder / "timeline.json").write_text(json.dumps(document))
    found = trace(folder)
    assert "the measured step" in str(found)
    measured = [e for e in found.events if e["pid"] == module.MEASURED + 1 and e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in measured] == [
        ("forward 0", 0.5e6, 1e6),
        ("all_reduce", 0.75e6, 0.25e6),
    ]
    assert {e["pid"] for e in found.events} == {0, module.MEASURED + 1}
    each["end"] = 0.25
    (folder / "timeline.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="before its begin"):
        trace(folder)


def test_a_file_is_kept_and_errors_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_plan(tmp_path / "plan.json", plan_file())
    output = tmp_path / "trace.json"
    cli.app.main(["trace", str(path), "-o", str(output)], standalone_mode=False)
    assert "perfetto" in capsys.readouterr().out
    with pytest.raises(InputError, match="exists already"):
        cli.app.main(["trace", str(path), "-o", str(output)], standalone_mode=False)
    with pytest.raises(InputError, match="exists already"):
        trace(path).save(output)
    with pytest.raises(SystemExit) as stop:
        cli.main(["trace", str(tmp_path / "none.json"), "-o", str(tmp_path / "other.json")])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) <= 2
