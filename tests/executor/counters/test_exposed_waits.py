"""Exposed communication: who waits, for what, and how long."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from executor.counters import exposed_waits
from executor.counters.exposed_waits import ExposedCommunication
from executor.processes.fork import run_forked

pytestmark = pytest.mark.distributed
LATE = 300  # ticks of the clock


class Clock:
    """A clock that all ranks read and that only ``advance`` moves, so that no load disturbs it."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.store = dist.FileStore(str(folder / "clock"), 2)

    def perf_counter(self) -> float:
        now = self.store.add("now", 0)
        self.store.add(f"reads of {self.rank}", 1)
        return float(now)

    def reads(self, rank: int) -> int:
        return self.store.add(f"reads of {rank}", 0)

    def advance(self) -> None:
        self.store.add("now", LATE)

    def advance_while_waiting(self, rank: int, before: int) -> None:
        """Advance after ``rank`` has begun to wait (it reads the clock then)."""
        while self.reads(rank) == before:
            time.sleep(0.001)
        self.advance()


def _waiting(rank: int, folder: Path) -> dict[str, Any]:
    cpu, x = torch.device("cpu"), torch.ones(4)
    clock = Clock(rank, folder)
    exposed_waits.time = SimpleNamespace(perf_counter=clock.perf_counter)  # type: ignore[assignment]
    original = dist.Work.wait
    dist.all_reduce(x)
    with ExposedCommunication(cpu) as blocking:
        if rank == 1:
            clock.advance_while_waiting(0, before=0)
        dist.all_reduce(x)
    dist.barrier()
    with ExposedCommunication(cpu) as overlapped:
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():  # computation, meanwhile
            time.sleep(0.001)
        clock.advance()
        dist.barrier()
        work.wait()
    dist.barrier()
    before = clock.reads(1)
    dist.barrier()
    with ExposedCommunication(cpu) as message:
        if rank == 0:
            clock.advance_while_waiting(1, before=before)
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    assert dist.Work.wait is original
    found = (blocking, overlapped, message)
    return {"seconds": [waits.seconds() for waits in found]}


def test_only_what_is_waited_for_counts(tmp_path: Path):
    punctual, late = (found["seconds"] for found in run_forked(_waiting, 2, tmp_path))
    assert punctual[0]["all_reduce"] == LATE
    assert late[0]["all_reduce"] == 0
    for rank in (punctual, late):
        assert rank[1]["all_reduce"] == 0  # arrived while it computed
    assert late[2]["recv"] == LATE
