"""What is kept of a run: lines that survive, files that do not grow, and what went wrong."""

import errno
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from executor.data.corpus import MarkovCorpus
from executor.records.metrics import METRICS_FILE, MetricsFile
from executor.records.recorder import MAX_RECORDS, Recorder, SampledRecords
from executor.records.utilisation import peak_flops, utilisation
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import RunError
from tests.executor.tiny import tiny


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the complete lines."""
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _record(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, "loss": 1.0, **values}


def test_a_resumed_run_goes_on_in_the_file_without_doubles(tmp_path):
    file = MetricsFile(tmp_path)
    file.begin(0)
    for step in range(1, 8):
        file.append(_record(step))
    file.close()
    with (tmp_path / METRICS_FILE).open("a") as handle:
        handle.write('{"kind": "step", "st')  # killed within a line
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    again = MetricsFile(tmp_path)
    again.begin(5)
    again.append(_record(6, loss=2.0))
    again.close()
    records = list(read_metrics(tmp_path))
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["loss"] == 2.0


def test_every_line_is_there_at_once(tmp_path):
    file = MetricsFile(tmp_path)
    file.begin(0)
    file.append(_record(1))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    file.close()


def test_a_folder_that_is_gone_is_one_line(tmp_path):
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written: No such file"):
        MetricsFile(tmp_path / "gone").begin(0)


def test_many_records_are_thinned_evenly():
    thinned = SampledRecords()
    for step in range(1, 10_001):
        thinned.add(_record(step))
        assert len(thinned.kept) <= MAX_RECORDS
    steps = [record["step"] for record in thinned.records()]
    assert steps[0] == 1
    assert steps[-1] == 10_000
    gaps = {after - before for before, after in pairwise(steps[:-1])}
    assert len(gaps) == 1
    thinned.drop_after(100)
    assert thinned.records()[-1]["step"] <= 100


def _event(step: int, **values: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "loss": 3.0 / step,
        "learning_rate": 1e-3,
        "gradient_norm": 1.0,
        "tokens": 32 * step,
        "seconds": 0.5,
        "tokens_per_second": 64.0,
        "phases": {"data": 0.1, "forward_backward": 0.4},
        "timed": step > 2,
        **values,
    }


def _recorder(tmp_path: Any, cluster: str = "2xA100-80GB", **options: Any) -> Recorder:
    from dataclasses import replace

    file = replace(tiny(Plan(2), precision="bf16"), cluster=parse_cluster(cluster))
    corpus = MarkovCorpus(file.model.vocab_size, 16, 0)
    prepared: Any = SimpleNamespace(
        file=file, corpus=corpus, evaluation=None, identity=lambda: {"model": "tiny"}
    )
    return Recorder(prepared, {}, [], tmp_path, lambda record: None, **options)


START = {"kind": "start", "first_step": 0, "environment": {"device": "NVIDIA A100-SXM4-80GB"}}
WAITS = [
    {
        "exposed_seconds": {"recv": 0.1, "all_reduce": 0.05},
        "memory_bytes": 10 + n,
        "timeline": {"rank": n, "stage": 0, "passes": [], "waits": []},
    }
    for n in (0, 2)
]


def test_a_run_is_kept_while_it_goes_on(tmp_path):
    recorder = _recorder(tmp_path)
    recorder(START)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    for step in range(1, 6):
        recorder(_event(step, **({"ranks": WAITS} if step == 4 else {})))
    recorder({"kind": "evaluation", "step": 5, "loss": 0.5, "perplexity": 1.65})
    recorder.finish("failed", "step 6: the loss is nan")
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["status"] == "failed"
    assert document["error"] == "step 6: the loss is nan"
    assert document["steps_done"] == 5
    assert [step["step"] for step in document["steps"]] == [1, 2, 3, 4, 5]
    measured = document["measured"]
    assert measured["timed_steps"] == 3
    assert measured["phase_seconds"] == {"data": 0.1, "forward_backward": 0.4}
    assert measured["exposed_communication_seconds"] == {"all_reduce": 0.05, "recv": 0.1}
    assert 0 < measured["mfu"] == measured["hfu"]
    assert document["evaluations"] == [
        {"kind": "evaluation", "step": 5, "loss": 0.5, "perplexity": 1.65}
    ]
    lines = list(read_metrics(tmp_path))
    assert [(line["kind"], line["step"]) for line in lines[-2:]] == [("step", 5), ("evaluation", 5)]
    assert lines[3]["memory_bytes"] == [10, 12]
    assert lines[3]["exposed_communication_seconds"] == pytest.approx([0.15, 0.15])
    assert "phases" not in lines[3]


def test_a_full_disk_is_recorded_in_place_and_its_error_kept(tmp_path, monkeypatch):
    recorder = _recorder(tmp_path)
    recorder(START)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: Any, **__: Any) -> Any:
        raise full

    monkeypatch.setattr("tempfile.mkstemp", fail)
    monkeypatch.setattr(recorder.metrics.file, "flush", fail, raising=False)
    with pytest.raises(RunError, match=r"run\.json: cannot be written: No space left"):
        recorder({"kind": "measured", "ranks": []})
    recorder.finish("failed", "the disk is full")  # raises nothing: the caller has the error
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    with pytest.raises(RunError, match=r"cannot be written: .*No space left"):
        recorder.finish("finished")


def test_every_key_is_in_the_docs(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "reference" / "run_json.md").read_text()
    recorder = _recorder(tmp_path)
    recorder(START)
    for step in range(1, 5):
        recorder(_event(step, ranks=WAITS, loss_scale=None, skipped_steps=0))
    recorder({"kind": "evaluation", "step": 4, "loss": 0.5, "perplexity": 1.65, "tokens": 3})
    recorder.finish("finished")
    document = json.loads((tmp_path / "run.json").read_text())
    records = [*document["steps"], *document["evaluations"]]
    for keys in (document, document["measured"], *records):
        for key in keys:
            assert f"`{key}`" in text or key in ("kind", "step"), key


def test_ranks_that_start_again_train_some_steps_again(tmp_path):
    recorder = _recorder(tmp_path)
    recorder(START)
    for step in range(1, 6):
        recorder(_event(step))
    recorder({**START, "first_step": 3})
    recorder(_event(4, loss=9.0))
    recorder.finish("finished")
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)][-2:] == [(3, 1.0), (4, 9.0)]
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["first_step"] == 3
    assert [step["step"] for step in document["steps"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("steps", [2, 6])
def test_a_resumed_run_keeps_what_was_timed_before(tmp_path, steps):
    first = _recorder(tmp_path)
    first(START)
    for step in range(1, 6):
        first(_event(step, **({"ranks": WAITS} if step == 4 else {})))
    first.finish("finished")
    before = json.loads((tmp_path / "run.json").read_text())["measured"]
    assert before["timed_steps"] == 3
    second = _recorder(tmp_path)
    second({**START, "first_step": 5})
    second({"kind": "measured", "ranks": []})
    for step in range(1, steps + 1):
        second(_event(5 + step, seconds=0.25, timed=step > 2))
    second.finish("finished")
    document = json.loads((tmp_path / "run.json").read_text())
    measured = document["measured"]
    assert document["notes"] == ["the 3 steps timed before count until more are timed"]
    if steps == 2:
        assert measured == before
        return
    assert (measured["timed_steps"], measured["step_seconds"]) == (4, 0.25)


def test_what_was_timed_elsewhere_stays_in_a_file_of_its_own(tmp_path):
    first = _recorder(tmp_path)
    first(START)
    for step in range(1, 6):
        first(_event(step))
    first.finish("finished")
    text = (tmp_path / "run.json").read_text()
    for _ in range(2):  # a session that timed nothing leaves nothing behind
        second = _recorder(tmp_path)
        second({"kind": "start", "first_step": 5, "environment": {"device": "cpu"}})
        second.finish("finished")
    assert json.loads((tmp_path / "run.json").read_text())["measured"]["timed_steps"] == 0
    (kept,) = tmp_path.glob("run-*.json")
    assert kept.read_text() == text


def test_utilisation_needs_a_known_device():
    from dataclasses import replace

    file = replace(tiny(Plan(2), precision="bf16"), cluster=parse_cluster("2xA100-80GB"))
    assert peak_flops(file, "NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops(file, "NVIDIA H100 80GB HBM3") == 989e12  # where it really ran
    assert peak_flops(file, "cpu") is None
    assert peak_flops(file, "Some GPU") is None
    assert utilisation(file, None, 1.0) == {"mfu": None, "hfu": None}
    slow, fast = (utilisation(file, 312e12, seconds)["mfu"] for seconds in (2.0, 1.0))
    assert fast == 2 * slow > 0
    file = replace(file, prediction={"time": {"mfu": 0.3, "hfu": 0.4}})
    found = utilisation(file, 312e12, 1.0)
    assert found["hfu"] == pytest.approx(found["mfu"] * 4 / 3)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = _recorder(tmp_path, tensorboard=True)
    recorder(START)
    for step in range(1, 4):
        recorder(_event(step, ranks=WAITS))
    recorder({"kind": "evaluation", "step": 3, "loss": 0.5, "perplexity": 1.65})
    recorder.finish("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [(e.step, round(e.value, 4)) for e in losses] == [(1, 3.0), (2, 1.5), (3, 1.0)]
    assert events.Scalars("memory/bytes")[0].value == 12.0
    ranks = [events.Scalars(f"memory_of_rank/{rank:02d}")[0].value for rank in range(len(WAITS))]
    assert ranks == [rank["memory_bytes"] for rank in WAITS]
    assert events.Scalars("evaluation/perplexity")[0].value == pytest.approx(1.65)
