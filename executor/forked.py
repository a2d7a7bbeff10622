"""Starts several processes on this machine by forking, joined by gloo; results come back as JSON.

A fork costs milliseconds, where a fresh interpreter that imports torch costs seconds. The parent
must not have run parallel torch operators or touched a GPU before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import RunError, ShardplanError

GRACE_SECONDS: Final = 5.0  # between the first failure and the end of the other ranks


def run_forked(
    function: Callable[..., Any],
    processes: int,
    *arguments: Any,
    timeout: float = 120.0,
    threads: int = 1,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in every process; return the results in rank order.

    Inside, the default process group (gloo) is ready. Results must be JSON values. Raises a
    RunError that names the rank and its error; the traceback is in its notes.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="shardplan-") as folder:
        store = Path(folder) / "store"
        workers, pipes = [], []
        for rank in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            target = (sender, store, rank, processes, threads, timeout, function, arguments)
            worker = context.Process(target=_work, args=target, daemon=True)
            worker.start()
            sender.close()
            workers.append(worker)
            pipes.append(receiver)
        answers: dict[int, dict[str, Any]] = {}
        try:
            answers = _collect(pipes, timeout)
        finally:
            healthy = len(answers) == processes and all("result" in a for a in answers.values())
            for worker in workers:
                worker.join(timeout=GRACE_SECONDS if healthy else 0)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
    return _results(answers, processes, timeout)


def _work(
    pipe: Connection,
    store: Path,
    rank: int,
    processes: int,
    threads: int,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Run one rank and leave the process without the parent's exit handlers."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=processes,
            timeout=datetime.timedelta(seconds=timeout),
        )
        answer = {"result": function(rank, *arguments)}
        dist.barrier()
        pipe.send_bytes(json.dumps(answer).encode())
        dist.destroy_process_group()
    except BaseException as error:
        text = (
            str(error) if isinstance(error, ShardplanError) else f"{type(error).__name__}: {error}"
        )
        failure = {"error": text, "traceback": traceback.format_exc(), "time": time.monotonic()}
        with contextlib.suppress(OSError):
            pipe.send_bytes(json.dumps(failure).encode())
        os._exit(1)
    os._exit(0)


def _collect(pipes: list[Connection], timeout: float) -> dict[int, dict[str, Any]]:
    """Return what each rank sent; ranks that died silently or are late are missing."""
    answers: dict[int, dict[str, Any]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = json.loads(pipe.recv_bytes())
            except EOFError:
                answers[rank] = {"error": "ended without an answer", "time": time.monotonic()}
            if "error" in answers[rank]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for pipe in pipes:
        pipe.close()
    return answers


def _results(answers: dict[int, dict[str, Any]], processes: int, timeout: float) -> list[Any]:
    """Return the results in rank order, or raise the failure that happened first."""
    failures = {rank: answer for rank, answer in answers.items() if "error" in answer}
    if failures:
        rank = min(failures, key=lambda failed: failures[failed]["time"])
        failed = RunError(f"rank {rank}: {failures[rank]['error']}")
        failed.add_note(failures[rank].get("traceback", ""))
        raise failed
    late = [str(rank) for rank in range(processes) if rank not in answers]
    if late:
        raise RunError(f"no answer within {timeout:.0f} s from rank {', '.join(late)}")
    return [answers[rank]["result"] for rank in range(processes)]
