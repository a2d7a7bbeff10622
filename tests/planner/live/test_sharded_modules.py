"""FSDP1 and FSDP2 on real ranks: stage, replicas and parameters are read from the modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.live.wrappers import ranks_of_run

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("sharded_modules.py")


@pytest.mark.slow(seconds=30)
@pytest.mark.distributed
def test_fsdp_is_read_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, "2", str(SCRIPT), str(tmp_path / "found.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "FULL_SHARD": ["fsdp1", 3, 1, True],
        "SHARD_GRAD_OP": ["fsdp1", 2, 1, True],
        "NO_SHARD": ["fsdp1-no-shard", 0, 1, True],
        "kept": ["fsdp2", 2, 1, True],
        "after a step": ["fsdp2", 3, 1, True],
        "replicas": ["fsdp2", 3, 2, True],
    }


@pytest.mark.parametrize(
    "name",
    ["LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"],
)
def test_ranks_of_a_machine_are_those_that_its_launcher_states(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv(name, "8")
    assert ranks_of_run() == (16, 8)
