"""Exposed communication: who waits, for what, and how long."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from executor.counters.exposed_waits import ExposedCommunication
from executor.processes.fork import run_forked

pytestmark = pytest.mark.distributed
LATE = 0.3


def _waiting(rank: int) -> dict[str, Any]:
    cpu, x = torch.device("cpu"), torch.ones(4)
    original = dist.Work.wait
    dist.all_reduce(x)
    with ExposedCommunication(cpu) as blocking:
        time.sleep(LATE * rank)
        dist.all_reduce(x)
    with ExposedCommunication(cpu) as overlapped:
        work = dist.all_reduce(x, async_op=True)
        time.sleep(LATE)  # computation, meanwhile
        work.wait()
    with ExposedCommunication(cpu) as message:
        if rank == 0:
            time.sleep(LATE)
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    assert dist.Work.wait is original
    found = (blocking, overlapped, message)
    return {"seconds": [waits.seconds() for waits in found]}


def test_only_what_is_waited_for_counts():
    (punctual, late) = (found["seconds"] for found in run_forked(_waiting, 2))
    assert punctual[0]["all_reduce"] == pytest.approx(LATE, abs=0.1)
    assert late[0]["all_reduce"] < 0.1
    for rank in (punctual, late):
        assert rank[1]["all_reduce"] < 0.1  # arrived while it computed
    assert late[2]["recv"] == pytest.approx(LATE, abs=0.1)
