"""Exported files in real runs of toy size on two CPU processes: the runs are recorded and learnt.

``pytest -m slow tests/planner/exchange/test_real_runs.py`` in an environment with accelerate,
datasets, deepspeed, lightning and torchtitan; what is not installed is skipped.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import planner
from planner.api.export import export
from planner.observation.answer import observe
from planner.validation.rows.runs_file import Row, read_runs

ROOT = Path(__file__).parents[3]
TOY = Path(__file__).parent / "toy_runs"
MODEL = ROOT / "examples" / "tiny-llama"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"),
    *("--config_file", "accelerate.yaml", str(TOY / "train_accelerate.py")),
)
TITAN = (
    *("--module", "torchtitan_job", "--config", "shardplan_job", "--training.steps", "8"),
    *("--training.seq_len", "128", "--metrics.log_freq", "1"),
    *("--parallelism.spmd_backend", "partial_dtensor"),  # torch 2.13 has no types of SPMD
)
DEEPSPEED = (
    *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"),
    *("--master_port", "29517", str(TOY / "train_deepspeed.py")),
    *("--deepspeed", "--deepspeed_config", "ds_config.json"),
)
pytestmark = [
    pytest.mark.slow(seconds=60),
    pytest.mark.distributed,
    pytest.mark.filterwarnings("default"),
]


@dataclass(frozen=True)
class ToyRun:
    """A target, the plan, and the command that runs its exported file."""

    target: str
    package: str
    command: tuple[str, ...]
    fix: str
    software: str  # in the profile of the recorded row
    model: str = str(MODEL)
    cluster: str = "here:2"
    observed: Mapping[str, Any] = field(default_factory=dict)  # options of ``observe``


RUNS = {
    "accelerate, FSDP2": ToyRun(
        "accelerate", "accelerate", (*ACCELERATE, "fsdp"), "zero=3", "fsdp2", cluster="2xA100-80GB"
    ),
    "accelerate, DDP": ToyRun("accelerate", "accelerate", ACCELERATE, "zero=0,dp=2", "hf-trainer"),
    "deepspeed, ZeRO 3": ToyRun("deepspeed", "deepspeed", DEEPSPEED, "zero=3", "deepspeed-zero3"),
    "deepspeed, ZeRO 1": ToyRun("deepspeed", "deepspeed", DEEPSPEED, "zero=1", "deepspeed-zero1"),
    "lightning, DDP": ToyRun(
        "lightning", "lightning", (*TORCHRUN, str(TOY / "train_lightning.py")), "zero=0,dp=2", "ddp"
    ),
    "transformers": ToyRun(
        "transformers",
        "accelerate",
        (*TORCHRUN, "train.py", "training_args.json"),
        "zero=0,dp=2,mbs=4",
        "",
        observed={"model": str(MODEL), "seq_len": 128, "global_batch_size": 8},
    ),
    "torchtitan, FSDP2": ToyRun(
        "torchtitan",
        "torchtitan",
        (*TORCHRUN, str(TOY / "train_torchtitan.py"), *TITAN),
        "zero=3,pp=1,dp=2",
        "",
        model="llama-3.2-1b",
        cluster="2xH100-SXM",
        observed={"model": str(MODEL)},
    ),
}


def run_exported(case: ToyRun, folder: Path) -> str:
    """Plan, export, and run the exported file; return what the run prints."""
    answer = planner.plan(
        case.model,
        case.cluster,
        seq_len=128,
        global_batch_size=8,
        precision="fp32",
        to=case.target,
        fix=case.fix,
    )
    for name, text in export(answer.plan_file(), case.target).files.items():
        text = text.replace(f'"{MODEL}"', '"model"')  # of scripts: the folder with weights
        (folder / name).write_text(text)
    sys.path.insert(0, str(TOY))
    try:
        import toy_model
    finally:
        sys.path.remove(str(TOY))
    toy_model.save_model(folder / "model")
    toy_model.save_tokenizer(folder / "tests" / "assets" / "tokenizer")
    if case.target in ("transformers", "lightning"):
        pytest.importorskip("datasets")
        toy_model.save_rows(folder / "data")
    path = os.pathsep.join([str(ROOT), str(TOY), str(folder)])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        case.command,
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=600,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-6000:]
    return printed


def recorded(case: ToyRun, folder: Path, printed: str) -> Row:
    """Return the row of the callback, or of ``observe`` for programs without one."""
    runs = folder / "runs.csv"
    if case.observed:
        log = folder / "out" / "trainer_state.json"
        if not log.exists():
            log = folder / "train.log"
            log.write_text(printed)
        seen = observe(log, cluster="here:2", output=runs, **case.observed)
        assert seen.prediction is not None, seen.reason
    (row,) = read_runs(runs)
    return row


@pytest.mark.parametrize("name", RUNS)
def test_an_exported_file_trains_and_its_run_is_learnt(name: str, tmp_path: Path) -> None:
    case = RUNS[name]
    pytest.importorskip(case.package)
    row = recorded(case, tmp_path, run_exported(case, tmp_path))
    assert row.step_time_s is not None
    assert row.num_gpus == 2
    assert case.software in (row.software or "")
    stage = re.search(r"zero=(\d)", case.fix)
    assert stage is not None
    if not case.observed:
        assert row.zero_stage == int(stage[1])
        assert f"measured {row.step_time_s:.4g}" in (row.check or "")
    found = planner.validate(tmp_path / "runs.csv")
    assert found.summary["priced"] == 1
    # runs on CPUs are not learnt from: the same row, as of an accelerator
    accelerated = tmp_path / "accelerated.csv"
    accelerated.write_text((tmp_path / "runs.csv").read_text().replace(",here,", ",A100-80GB,"))
    assert planner.learn(accelerated, tmp_path / "mine.toml").runs[0].run == row.row_id
    print(name, row.software, row.check or row.step_time_s)
