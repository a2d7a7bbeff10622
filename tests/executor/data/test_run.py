"""Runs on real data: what they say, and that no layout of ranks changes what is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost_models.plan.plan import Plan
from cost_models.plan_file import write_plan_file
from executor.__main__ import main
from hardware_profiles.cluster.parse import parse_cluster
from tests.executor.tiny import tiny

pytestmark = pytest.mark.distributed
LAYOUTS = {
    "single": Plan(micro_batch_size=4),
    "data and pipeline": Plan(data_parallel=2, pipeline_parallel=2, num_microbatches=2),
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write documents of many lengths, one of them no JSON."""
    path = tmp_path / "documents.jsonl"
    rows = [json.dumps({"text": "word " * (1 + number % 7)}) for number in range(60)]
    path.write_text("\n".join([*rows[:30], "no JSON", *rows[30:]]))
    return path


def _run(tmp_path: Path, plan: Plan, *arguments: str) -> int:
    file = tiny(plan, vocab_size=256, precision="fp32", optimizer="adamw", num_layers=2)
    write_plan_file(
        tmp_path / "plan.json", replace(file, cluster=parse_cluster("8xA100-80GB")), force=True
    )
    command = ["run", str(tmp_path / "plan.json"), "--launcher", "fork", "--steps", "3", "--json"]
    return main([*command, "--dry-run", *arguments])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("packing", ["concat", "documents", "none"])
def test_every_layout_of_ranks_reads_the_same(
    tmp_path: Path, corpus: Path, packing: str, capsys: Any
):
    losses = {}
    for name, plan in LAYOUTS.items():
        data = ("--data", str(corpus), "--packing", packing, "--skip-bad-rows")
        assert _run(tmp_path, plan, *data) == 0
        out, err = capsys.readouterr()
        assert "note: 1 bad rows of the data were skipped" in err
        document = json.loads(out)
        assert document["data"]["skipped_rows"] == 1
        assert document["data"]["identity"]["packing"] == packing
        assert document["options"]["data"] == [str(corpus)]
        losses[name] = [step["loss"] for step in document["steps"]]
    assert losses["single"] == pytest.approx(losses["data and pipeline"], rel=1e-6)
    assert losses["single"][0] == pytest.approx(np.log(256), rel=0.05)


def test_what_is_wrong_with_the_data_is_one_line(tmp_path: Path, corpus: Path, capsys: Any):
    assert _run(tmp_path, LAYOUTS["single"], "--data", str(corpus)) == 2
    err = capsys.readouterr().err
    assert "documents.jsonl, line 31: not JSON: Expecting value (column 1)" in err
    assert len(err.splitlines()) == 1


def test_what_the_reading_thread_finds_ends_the_run(tmp_path: Path, capsys: Any):
    tokens = np.zeros(300, dtype=np.uint16)
    tokens[::20] = 999
    np.save(tmp_path / "a.npy", tokens)
    assert _run(tmp_path, LAYOUTS["data and pipeline"], "--data", str(tmp_path / "a.npy")) == 2
    assert "a.npy: token 999 (the model's vocab_size = 256" in capsys.readouterr().err
