"""What is written, by whom and when; what cannot be written loses nothing."""

import errno
import hashlib
import json
import re
import resource
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.activity import ACTIVITY
from executor.checkpoint.format import tensor_file
from executor.checkpoint.saving import writer
from executor.checkpoint.saving.assignment import PartCopy, assign_writers
from executor.checkpoint.saving.manager import CheckpointManager
from executor.processes.fork import run_forked
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError, RunError
from tests.executor.checkpoint.saving import begin, step, trained
from tests.executor.tiny import tiny

TWO = Plan(data_parallel=2, micro_batch_size=2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan",
    [
        Plan(4, zero_stage=0),
        pytest.param(Plan(1, 2, 2, num_microbatches=2, micro_batch_size=2), marks=pytest.mark.slow),
        pytest.param(Plan(2, 2, zero_stage=1, sequence_parallel=True), marks=pytest.mark.slow),
    ],
    ids=["replicas", "tensor and pipeline", "shards"],
)
def test_every_part_is_written_once_and_by_all(plan: Plan, tmp_path: Path):
    file = tiny(plan, "qwen3", tied=True, optimizer="adamw", num_layers=4)
    trained(file, tmp_path, 1, every=1)
    folder = tmp_path / "step-00000001"
    index = json.loads((folder / "index.json").read_text())
    assert index["state"] == ["exp_avg", "exp_avg_sq", "step"]
    assert index["trainer"]["steps_done"] == 1
    numel: dict[str, int] = {}
    written = []
    for name, entry in index["files"].items():
        content = (folder / name).read_bytes()
        assert len(content) == entry["bytes"]
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        if name.startswith("weights"):
            written.append(entry["bytes"])
            with safe_open(folder / name, "pt") as handle:
                for key in handle.keys():  # noqa: SIM118
                    size = handle.get_tensor(key).numel()
                    numel[key] = numel.get(key, 0) + size
    assert {n: torch.Size(t["shape"]).numel() for n, t in index["tensors"].items()} == numel
    assert sum(numel.values()) == file.model.num_parameters
    assert len(written) == 4
    # the balance that the parts allow: a stage with the embedding and the head has more to write
    assert max(written) < (1.3 if plan.pipeline_parallel == 1 else 2.0) * sum(written) / 4


def test_the_largest_parts_are_shared_out_first():
    sizes = {0: 8, 1: 5, 2: 4, 3: 3}
    copies = [PartCopy(p, p, n, n, rank) for p, n in sizes.items() for rank in (0, 1)]
    copies += [PartCopy(9, 9, 2, 2, 1)]  # held by one rank alone
    assert assign_writers(copies) == {0: 0, 1: 1, 2: 1, 3: 0, 9: 1}


def test_parts_that_do_not_make_up_a_tensor_are_our_bug():
    with pytest.raises(AssertionError, match="do not make up the whole model"):
        assign_writers([PartCopy(0, 0, 4, 8, rank=0)])


@pytest.mark.distributed
def test_the_newest_and_every_nth_are_kept(tmp_path: Path):
    run_forked(_kept, 1, tiny(Plan(), num_layers=1), str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-{n:08d}" for n in (3, 6, 7, 8)]


def _kept(rank: int, file: PlanFile, folder: str) -> None:
    trainer = Trainer(file)
    manager = CheckpointManager(trainer, Path(folder), every=1, keep=2, keep_every=3)
    for _ in range(8):
        step(trainer)
        manager.maybe_save()
    manager.wait()


# --- beside the training -----------------------------------------------------------------------


def _beside(rank: int, file: PlanFile, folder: str) -> list[Any]:
    """Train on while a disk that waits for us writes."""
    disk = threading.Event()
    real = writer.write_tensors

    def slow(*arguments: Any) -> Any:
        assert disk.wait(timeout=60)
        return real(*arguments)

    writer.write_tensors = slow
    trainer = Trainer(file, learning_rate=1.0)
    manager = CheckpointManager(trainer, Path(folder), every=2, keep=9)
    saved = []
    for _ in range(3):
        step(trainer)
        saved.append(manager.maybe_save())
    before = manager.latest()
    threading.Timer(2.5, disk.set).start()
    step(trainer)
    mark = ACTIVITY.progress()
    saved.append(manager.maybe_save())  # waits for the first one
    first = manager.latest()
    assert ACTIVITY.progress() != mark  # for the watchdog
    last = manager.save_now()
    assert manager.save_now() == last  # nothing new
    return [saved, before, str(first), str(last)]


@pytest.mark.slow
@pytest.mark.distributed
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path):
    file = tiny(TWO, num_layers=1)
    found = run_forked(_beside, 2, file, str(tmp_path / "beside"))
    names = [str(tmp_path / "beside" / f"step-0000000{n}") for n in (2, 4)]
    assert found == [[[False, True, False, True], None, *names]] * 2
    # it holds the state of its step, whatever the training did meanwhile
    (losses,) = {tuple(r["losses"]) for r in trained(file, tmp_path / "beside", 5)}
    assert len(losses) == 1


# --- failures ----------------------------------------------------------------------------------


def _failing(rank: int, file: PlanFile, folder: str, break_disk: Callable[[int], None]) -> str:
    """Save once, then break the disk and save again; return the error."""
    trainer = Trainer(file)
    manager = CheckpointManager(trainer, Path(folder), every=1)
    step(trainer)
    manager.save_now()
    break_disk(rank)
    step(trainer)
    try:
        manager.save_now()
    except RunError as error:
        return str(error)
    return "written"


class _FullDisk:
    """A file that takes nothing more."""

    def write(self, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        pass


def _full_on_rank_1(rank: int) -> None:
    begin = tensor_file.TensorFile.__init__

    def begun(self: tensor_file.TensorFile, *arguments: Any) -> None:
        begin(self, *arguments)
        self.handle = _FullDisk()  # type: ignore[assignment]

    if rank == 1:
        tensor_file.TensorFile.__init__ = begun  # type: ignore[method-assign]


def _files_of_20_kilobytes(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def _index_cannot_be_written(rank: int) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    writer.write_and_sync = full


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("break_disk", "message"),
    [
        (_full_on_rank_1, r"rank 1: \S+/weights-00001-of-00002.* No space left on device; "),
        (_files_of_20_kilobytes, r"\S+/weights-0000\d-of-00002\.safetensors: .*File too large; "),
        (_index_cannot_be_written, r"No space left on device: '\S+/index\.json'; "),
    ],
    ids=["one rank", "all ranks", "index"],
)
def test_a_disk_that_is_full_is_named_and_nothing_is_lost(
    break_disk: Callable[[int], None], message: str, tmp_path: Path
):
    file = tiny(TWO, num_layers=2, optimizer="adamw")
    first, second = run_forked(_failing, 2, file, str(tmp_path), break_disk)
    assert first == second
    assert first.startswith("checkpoint after step 2: ")
    assert re.search(message, first), first
    assert first.endswith(f"the last complete one is {tmp_path}/step-00000001")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert len(trained(file, tmp_path, 3)[0]["losses"]) == 2


def _made(rank: int, file: PlanFile, folder: str, free: int | None, hidden: bool) -> None:
    trainer = Trainer(file)
    if free is not None:
        usage = type("Usage", (), {"free": free})
        writer.shutil.disk_usage = lambda path: usage
    if hidden and rank == 1:
        Path.is_dir = lambda self: False  # type: ignore[method-assign]
    CheckpointManager(trainer, Path(folder), every=1)


@pytest.mark.distributed
def test_a_folder_that_cannot_be_used_is_refused_before_training(tmp_path: Path):
    file = tiny(TWO, num_layers=1)
    (tmp_path / "file").touch()

    def refused(message: str, folder: Path, free: int | None = None, hidden: bool = False) -> None:
        kind = RunError if "cannot be written" in message else InputError
        with pytest.raises(kind, match=message):
            run_forked(_made, 2, file, str(folder), free, hidden)

    refused("file/here: cannot be written: Not a directory", tmp_path / "file" / "here")
    refused(r"full: a checkpoint takes about .*, 1000 B are free on", tmp_path / "full", free=1000)
    refused(r"rank 1: \S+/other: rank 0 wrote there, but this", tmp_path / "other", hidden=True)
    assert not list((tmp_path / "other").iterdir())


def _scaled(rank: int, file: PlanFile, folder: str) -> list[float | None]:
    """Save with a scale that is not the first one; return those of resumed trainers."""
    trainer = Trainer(file)
    assert trainer.scaler is not None
    trainer.scaler.scale, trainer.scaler.skipped = 256.0, 3
    step(trainer)
    CheckpointManager(trainer, Path(folder), every=None).save_now()
    found = []
    for precision in ("fp16", "bf16"):
        other = replace(file, workload=replace(file.workload, precision=precision))
        resumed, _ = begin(other, Path(folder))
        assert resumed.steps_done == 1
        found.append(None if resumed.scaler is None else resumed.scaler.scale)
    return found


@pytest.mark.distributed
def test_the_scale_of_fp16_is_kept(tmp_path: Path):
    file = tiny(Plan(), num_layers=1, precision="fp16")
    assert run_forked(_scaled, 1, file, str(tmp_path)) == [[256.0, None]]
