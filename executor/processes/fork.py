"""Forked processes on this machine, joined by gloo; messages are JSON.

A fork costs milliseconds, a fresh interpreter that imports torch costs seconds. The parent must not
have run parallel torch operators or used a GPU before.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from executor.processes.signals import Relay, StopSignals
from hardware_profiles.errors import InputError, RunError, ShardplanError

GRACE_SECONDS: Final = 1.5  # for other ranks to report an earlier failure and to end
PR_SET_PDEATHSIG: Final = 1  # Linux: signal sent to a process when its parent ends
_to_parent: list[Connection] = []  # in a forked process: pipe to the parent
_installed: list[StopSignals] = []  # in a forked process with signal handlers


@dataclass(frozen=True, slots=True)
class ForkedTask:
    """The task of all forked processes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    processes: int
    threads: int
    timeout: float | None
    store: Path
    stop_signals: Sequence[int] | None  # None: no signal handlers


def run_forked(
    function: Callable[..., Any],
    processes: int,
    *arguments: Any,
    timeout: float | None = 120.0,
    threads: int = 1,
    on_event: Callable[[Any], None] | None = None,
    relay: Relay | None = None,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in every process; return the results in rank order.

    Inside, the default process group (gloo) is ready, and ``emit`` sends an event to ``on_event``.
    Results and events must be JSON values. The first failure ends all processes: a ShardplanError
    is raised again unchanged, other errors as a RunError that names the rank; the notes contain the
    traceback. An interruption of the parent ends them as well. ``relay``: passes signals on to
    them, which they receive through ``stop_signals``.
    """
    with tempfile.TemporaryDirectory(prefix="shardplan-") as folder:
        numbers = None if relay is None else sorted(relay.numbers)
        store = Path(folder) / "store"
        job = ForkedTask(function, arguments, processes, threads, timeout, store, numbers)
        workers, pipes = _start(job)
        if relay is not None:
            for rank, worker in enumerate(workers):
                relay.add(rank, worker.pid or 0)
        answers: dict[int, dict[str, Any]] = {}
        try:
            answers = _collect(pipes, timeout, on_event)
        finally:
            healthy = len(answers) == processes and all("result" in a for a in answers.values())
            for worker in workers:
                worker.join(timeout=GRACE_SECONDS if healthy else 0)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
    return _results(answers, job)


def emit(event: Any) -> None:
    """Send an event from a forked process to its parent."""
    _to_parent[0].send_bytes(json.dumps({"event": event}).encode())


def fail(error: ShardplanError) -> None:
    """Send a failure to the parent, from a thread that is about to end the process."""
    with contextlib.suppress(OSError):
        _to_parent[0].send_bytes(json.dumps(describe_failure(error)).encode())


def stop_signals() -> StopSignals | None:
    """Return the signal handlers of this forked process."""
    return _installed[0] if _installed else None


def _start(job: ForkedTask) -> tuple[list[BaseProcess], list[Connection]]:
    context = multiprocessing.get_context("fork")
    workers: list[BaseProcess] = []
    pipes: list[Connection] = []
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks of multi-threaded processes: torch's threads are idle and hold
        # no lock
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for rank in range(job.processes):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(sender, rank, job, os.getpid()))
            worker.daemon = True
            worker.start()
            sender.close()
            workers.append(worker)
            pipes.append(receiver)
    return workers, pipes


def _work(pipe: Connection, rank: int, job: ForkedTask, parent: int) -> None:
    """Run one rank and leave the process without the parent's exit handlers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if job.stop_signals is not None:
        _installed[:] = [StopSignals(job.stop_signals)]
    end_with_parent(parent)
    _to_parent[:] = [pipe]
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(job.threads)
        limit = {} if job.timeout is None else {"timeout": datetime.timedelta(seconds=job.timeout)}
        dist.init_process_group(
            "gloo", init_method=f"file://{job.store}", rank=rank, world_size=job.processes, **limit
        )
        result = job.function(rank, *job.arguments)
        if dist.is_initialized():
            dist.barrier()  # the group itself ends with the process, see mesh.disconnect
        pipe.send_bytes(json.dumps({"result": result}).encode())
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(json.dumps(describe_failure(error)).encode())
        os._exit(1)
    os._exit(0)


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Describe an error as JSON values."""
    known = isinstance(error, ShardplanError)
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return {
        "error": str(error) if known else f"{type(error).__name__}: {first_line}",
        "says_it_all": known,
        "exit_code": error.exit_code if isinstance(error, ShardplanError) else RunError.exit_code,
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }


def error_from_failure(rank: int, failed: dict[str, Any]) -> ShardplanError:
    """Return a rank's reported failure as an error of this process."""
    words = failed["error"] if failed.get("says_it_all") else f"rank {rank}: {failed['error']}"
    bad_input = failed.get("exit_code") == InputError.exit_code
    error: ShardplanError = InputError(words) if bad_input else RunError(words)
    error.add_note(failed.get("traceback", ""))
    return error


def end_with_parent(parent: int) -> None:
    """Have Linux end this process when its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # ended before that call
            os._exit(1)


def _collect(
    pipes: list[Connection], timeout: float | None, on_event: Callable[[Any], None] | None
) -> dict[int, dict[str, Any]]:
    """Return each rank's answer; ranks that exceed the timeout are missing."""
    answers: dict[int, dict[str, Any]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = None if timeout is None else time.monotonic() + timeout
    while waiting:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        for pipe in wait(list(waiting), timeout=left):
            assert isinstance(pipe, Connection)
            message = _receive(pipe)
            if "event" in message:
                if on_event is not None:
                    on_event(message["event"])
                continue
            answers[waiting.pop(pipe)] = message
            if "error" in message:
                soon = time.monotonic() + GRACE_SECONDS
                deadline = soon if deadline is None else min(deadline, soon)
    for pipe in pipes:
        pipe.close()
    return answers


def _receive(pipe: Connection) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        # a rank that dies without a message is the cause of the others' errors, not their effect
        return {"error": "ended without a message (killed, or out of memory)", "time": 0.0}
    return message


def _results(answers: dict[int, dict[str, Any]], job: ForkedTask) -> list[Any]:
    """Return the results in rank order, or raise the failure that happened first."""
    failures = {rank: answer for rank, answer in answers.items() if "error" in answer}
    if failures:
        first = min(failures, key=lambda rank: failures[rank]["time"])
        raise error_from_failure(first, failures[first])
    late = [str(rank) for rank in range(job.processes) if rank not in answers]
    if late:
        raise RunError(f"no answer within {job.timeout:.0f} s from rank {', '.join(late)}")
    return [answers[rank]["result"] for rank in range(job.processes)]
