"""Killed with SIGKILL at any moment, a run continues as if it had never stopped."""

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.checkpoint.format import tensor_file
from executor.checkpoint.format.folder import CheckpointFolder
from executor.checkpoint.loading.checkpoint_reader import Checkpoint
from executor.checkpoint.saving.manager import CheckpointManager
from executor.processes.fork import emit, run_forked
from hardware_profiles.errors import RunError
from tests.executor.checkpoint.saving import begin, digest, step, trained
from tests.executor.tiny import tiny

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]

TWO = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2)
ENDLESS = 10**9


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


# --- at random moments -------------------------------------------------------------------------


def _until_killed(rank: int, file: PlanFile, folder: str, steps: int) -> str:
    """Train with a checkpoint after every step; rank 0 notes each loss in a file."""
    emit({"pid": os.getpid()})
    trainer, found = begin(file, Path(folder) / "checkpoints")
    manager = CheckpointManager(trainer, Path(folder) / "checkpoints", every=1)
    if found:
        manager.resumed_from(found.checkpoint.folder)
    with (Path(folder) / "losses").open("a", buffering=1) as losses:
        while trainer.steps_done < steps:
            loss = step(trainer)
            if rank == 0:
                losses.write(f"{trainer.steps_done} {loss.hex()}\n")
                emit({"step": trainer.steps_done})
            manager.maybe_save()
    manager.wait()
    return digest(trainer)


def _killed(chance: random.Random, file: PlanFile, folder: Path) -> None:
    """Start a run and kill its ranks, or one of them, at a random moment."""
    pids: list[int] = []
    steps, seconds = chance.randrange(6), chance.uniform(0.0, 0.05)
    victims = slice(None) if chance.random() < 0.8 else slice(1)

    def kill() -> None:
        for pid in pids[victims]:
            os.kill(pid, signal.SIGKILL)

    def follow(event: dict[str, int]) -> None:
        nonlocal steps
        pids.extend(event.values() if "pid" in event else ())
        steps -= "step" in event
        if len(pids) == file.plan.world_size and steps <= 0:
            steps = ENDLESS
            threading.Timer(seconds, kill).start()

    with pytest.raises(RunError):
        run_forked(_until_killed, file.plan.world_size, file, str(folder), ENDLESS, on_event=follow)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, tmp_path: Path):
    file = tiny(TWO, "gpt2", tied=True, optimizer="adamw", num_layers=1, precision="fp32")
    chance = random.Random(kills)
    progress = []
    for _ in range(kills):
        _killed(chance, file, tmp_path)
        complete = CheckpointFolder(tmp_path / "checkpoints").complete()
        if complete:
            progress.append(Checkpoint(complete[0]).index.step)
    assert progress == sorted(progress)
    assert progress[-1] >= kills / 2
    steps = progress[-1] + 2
    ended = run_forked(_until_killed, 2, file, str(tmp_path), steps)
    whole = trained(file, tmp_path / "whole", steps)
    assert ended == [rank["digest"] for rank in whole]
    lines = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert len(lines) >= steps
    for number, loss in lines[-steps:]:
        assert float.fromhex(loss) == whole[0]["losses"][int(number) - 1], number


# --- at every step of writing ------------------------------------------------------------------


class _KilledAt:
    """Ends the process before the n-th thing that the thread of a checkpoint does on the disk."""

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

    def __init__(self, moment: int) -> None:
        self.left = moment
        self.armed = False
        fsync, write = os.fsync, tensor_file.TensorFile._write

        def counted_fsync(descriptor: int) -> None:
            self._count()
            fsync(descriptor)

        def half_written(file: tensor_file.TensorFile, data: memoryview) -> None:
            if self.left == 1 and self._is_writing():
                file.handle.write(data[: len(data) // 2])
            self._count()
            write(file, data)

        sys.addaudithook(lambda event, _: self._count() if event in self.EVENTS else None)
        os.fsync = counted_fsync
        tensor_file.TensorFile._write = half_written  # type: ignore[method-assign]

    def _is_writing(self) -> bool:
        return self.armed and threading.current_thread().name == "checkpoint"

    def _count(self) -> None:
        if self._is_writing():
            self.left -= 1
            if self.left == 0:
                _die()


def _killed_at(rank: int, file: PlanFile, folder: str, victim: int, moment: int) -> None:
    """Save twice, which deletes the first one; die in the second time."""
    trainer, _ = begin(file, Path(folder))
    manager = CheckpointManager(trainer, Path(folder), every=1, keep=1)
    killed = _KilledAt(moment if rank == victim else ENDLESS)
    step(trainer)
    manager.save_now()
    step(trainer)
    killed.armed = True
    manager.save_now()


def _moments(file: PlanFile, folder: Path, victim: int, stride: int) -> int:
    """Kill at one moment after the other until none is left; return how many there were."""
    whole = tuple(trained(file, folder / "whole", 4)[0]["losses"])
    moment = 1
    while True:
        here = folder / f"{victim}-{moment}"
        try:
            run_forked(_killed_at, file.plan.world_size, file, str(here), victim, moment)
        except RunError:
            pass
        else:
            return moment
        newest = CheckpointFolder(here).complete()[0]
        assert Checkpoint(newest).index.step in (1, 2)
        (resumed,) = {tuple(r["losses"]) for r in trained(file, here, 4, every=1)}
        assert resumed == whole[-len(resumed) :]
        assert not [path.name for path in here.iterdir() if "." in path.name]
        shutil.rmtree(here)
        moment += stride


@pytest.mark.slow
def test_killed_at_every_step_of_writing(tmp_path: Path):
    file = tiny(Plan(micro_batch_size=2), num_layers=1, optimizer="adamw")
    assert _moments(file, tmp_path, 0, 4) > 15


@pytest.mark.slow(seconds=30)
def test_a_rank_that_is_killed_while_it_writes_its_share(tmp_path: Path):
    file = tiny(TWO, num_layers=1, optimizer="adamw")
    assert _moments(file, tmp_path, 1, 4) > 5
