"""docs/how-to/walks.md: public files in, verdict, better plan, file out, the trainer's loader.

Loaders are those of installed packages; a step without its package is skipped at the end.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, read_plan_file
from planner.api.export import export
from planner.exchange.job import Job
from planner.exchange.megatron_fields import fields_of
from planner.exchange.megatron_model import model_fields
from planner.exchange.registry import read_config, target

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "walks.md"
BLOCKS = (
    r"## (.+)\n(?:(?!## )[^\0])*?\$ shardplan (fit .+)\n(?:(?!## )[^\0])*?\$ shardplan (plan .+)\n"
)
WALKS = re.findall(BLOCKS, PAGE.read_text(encoding="utf-8"))
VERDICTS = {"fits", "tight", "does_not_fit"}


def answer(command: str, folder: Path) -> dict[str, Any]:
    """Return the JSON answer of a command of the page; files that it writes go to a folder."""
    words = [str(folder / word) if word == "plan.json" else word for word in shlex.split(command)]
    done = subprocess.run(
        [sys.executable, "-m", "planner", *words, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 3, 4, 7), done.stderr  # verdicts
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow(seconds=20)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk[0])
def test_a_public_file_is_walked(
    walk: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fit, plan = walk
    today = answer(fit, tmp_path)
    assert today["verdict"] in VERDICTS
    answer(plan, tmp_path)
    file = read_plan_file(tmp_path / "plan.json")
    (name,) = re.findall(r"--to (\S+)", plan)
    for path, text in export(file, name).files.items():
        (tmp_path / path).write_text(text)
    written = target(name).file
    back = read_config(f"{name}:{tmp_path / written}")
    assert (back.unknown, back.notes) == ((), ())
    stated = {f.name for f in fields(Plan)} & back.settings.keys()
    assert stated >= {"zero_stage", "micro_batch_size"} - {*target(name).elsewhere}
    for part in stated - {"num_microbatches"}:
        assert back.settings[part] == getattr(file.plan, part), part
    assert today["verdict"] != "fits" or today["time"]["step_seconds"] >= 0.99 * seconds(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    LOADERS[name](file, tmp_path / written)


def seconds(file: PlanFile) -> float:
    """Return the predicted step time of a plan file."""
    assert file.prediction is not None
    return float(file.prediction["time"]["step_seconds"])


def load_torchtitan(file: PlanFile, path: Path) -> None:
    pytest.importorskip("torchtitan.trainer")
    import importlib

    job = importlib.import_module(path.stem).shardplan_job()
    assert job.training.global_batch_size == file.workload.global_batch_size
    assert job.parallelism.tensor_parallel_degree == file.plan.tensor_parallel


def load_deepspeed(file: PlanFile, path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    from unittest import mock

    document = json.loads(path.read_text())
    document.pop("shardplan")
    ranks = file.plan.world_size
    with (
        mock.patch.object(config.dist, "get_rank", return_value=0),
        mock.patch.object(config.dist, "get_world_size", return_value=ranks),
    ):
        read = config.DeepSpeedConfig(document)
    assert read.zero_config.stage == file.plan.zero_stage


def load_megatron(file: PlanFile, path: Path) -> None:
    pytest.importorskip("megatron.core")
    import torch
    from megatron.core.transformer import TransformerConfig

    job = Job(file)
    known = {f.name for f in fields(TransformerConfig)}
    given = {**model_fields(job.model), **fields_of(job), "pipeline_dtype": torch.bfloat16}
    taken = {key: value for key, value in given.items() if key in known and value is not None}
    read = TransformerConfig(**taken)
    assert read.tensor_model_parallel_size == file.plan.tensor_parallel


def load_axolotl(file: PlanFile, path: Path) -> None:
    validate = pytest.importorskip("axolotl.utils.config").validate_config
    import yaml
    from axolotl.utils.dict import DictDefault

    gpu = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": file.plan.world_size, "n_node": 1}
    data = {"datasets": [{"path": "x", "type": "alpaca"}], "learning_rate": 1e-4}
    read = validate(
        DictDefault({**yaml.safe_load(path.read_text()), **data}),
        capabilities={**gpu, "compute_capability": "sm_89"},
        env_capabilities={"torch_version": "2.13.0"},
    )
    assert read.micro_batch_size == file.plan.micro_batch_size


def load_transformers(file: PlanFile, path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import HfArgumentParser, TrainingArguments

    document = {**json.loads(path.read_text()), "use_cpu": True}
    (read,) = HfArgumentParser(TrainingArguments).parse_dict(document)
    assert read.per_device_train_batch_size == file.plan.micro_batch_size


def load_llamafactory(file: PlanFile, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DISABLE_VERSION_CHECK", "1")
        parser = pytest.importorskip("llamafactory.hparams.parser")
        import yaml

        document = {**yaml.safe_load(path.read_text()), "use_cpu": True}
        _, data, training, *_ = parser._parse_train_args(document)
    assert training.per_device_train_batch_size == file.plan.micro_batch_size
    assert data.cutoff_len == file.workload.seq_len


def load_accelerate(file: PlanFile, path: Path) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args")
    assert config.load_config_from_file(str(path)).num_processes == file.plan.world_size


LOADERS: dict[str, Callable[[PlanFile, Path], None]] = {
    "torchtitan": load_torchtitan,
    "deepspeed": load_deepspeed,
    "megatron": load_megatron,
    "nemo": load_megatron,  # NeMo itself needs CUDA: its recipes set the same fields
    "axolotl": load_axolotl,
    "transformers": load_transformers,
    "llamafactory": load_llamafactory,
    "accelerate": load_accelerate,
}


def test_the_page_has_eight_walks() -> None:
    assert [re.findall(r"--to (\S+)", plan) for _, _, plan in WALKS] == [[one] for one in TARGETS]


TARGETS = (
    *("torchtitan", "deepspeed", "megatron", "axolotl"),
    *("transformers", "llamafactory", "accelerate", "nemo"),
)
