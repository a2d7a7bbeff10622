"""Starts the ranks of a run: with torchrun, or on a CPU by forking, which starts quicker.

Ranks that torchrun starts for us report to this process in lines on stderr that begin with MARK;
whatever else comes along there is kept for ``--traceback``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cost_models.plan_file import PlanFile
from executor.forked import end_with, failure, raise_failure, run_forked
from executor.machine import threads_per_process
from hardware_profiles.errors import RunError

MARK: Final = "\x1eshardplan "
REPORT_TO: Final = "SHARDPLAN_REPORT_TO"  # in a rank's environment: the pid of torchrun's starter
STOP_SECONDS: Final = 15.0
KEPT_LINES: Final = 300
TRACEBACK_CHARACTERS: Final = 3000  # a line below 4 KiB is written at once, whoever else writes

Emit = Callable[[dict[str, Any]], None]
Task = Callable[[Emit], Any]  # what every rank does; rank 0 returns the answer


def by_fork(file: PlanFile, task: Task, emit: Emit) -> Any:
    """Run a task on CPU processes of this machine and return rank 0's answer."""
    from executor import session  # noqa: F401  what every process needs is imported once, before

    processes = file.plan.world_size
    threads = threads_per_process(processes)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return run_forked(_forked_task, processes, task, timeout=None, threads=threads, on_event=emit)[
        0
    ]


def _forked_task(rank: int, task: Task) -> Any:
    from executor.forked import emit

    return task(emit)


def by_torchrun(file: PlanFile, arguments: Sequence[str], emit: Emit, *, gpus: int) -> Any:
    """Run ``python -m executor`` with the same arguments under torchrun; return rank 0's answer."""
    processes = file.plan.world_size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "executor", *arguments]
    threads = {"OMP_NUM_THREADS": str(threads_per_process(processes))}
    environment = {**threads, **os.environ, REPORT_TO: str(os.getpid())}
    if not gpus:
        environment |= threads  # with so many the machine was measured
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # an interruption reaches it through this process alone
        preexec_fn=partial(end_with, os.getpid()),
    )
    try:
        return _follow(started, emit)
    finally:
        _stop(started)


def _follow(started: subprocess.Popen[str], emit: Emit) -> Any:
    """Pass events on until torchrun ends; return the answer or raise the first failure."""
    answers: list[Any] = []
    failures: list[tuple[int, dict[str, Any]]] = []
    others: deque[str] = deque(maxlen=KEPT_LINES)
    assert started.stderr is not None
    for line in started.stderr:
        _, mark, message = line.partition(MARK)
        if not mark:
            others.append(line)
            continue
        report = json.loads(message)
        if "event" in report:
            emit(report["event"])
        elif "failure" in report:
            failures.append((report["rank"], report["failure"]))
        else:
            answers.append(report["answer"])
    code = started.wait()
    log = "".join(others)
    if (killed := _killed_rank(log)) is not None:  # the cause of what the other ranks report
        raise killed
    if failures:
        raise_failure(*min(failures, key=lambda item: item[1]["time"]))
    if code or not answers:
        error = RunError(f"torchrun ended with exit code {code}")
        error.add_note(log)
        raise error
    return answers[0]


def _killed_rank(log: str) -> RunError | None:
    """Return the error for a rank that a signal ended, unless torchrun sent it."""
    for found in re.finditer(r"rank +: (\d+) .*\n +exitcode +: -(\d+)", log):
        number = int(found[2])
        if number != signal.SIGTERM:
            hint = " (often: out of memory)" if number == signal.SIGKILL else ""
            error = RunError(f"rank {found[1]}: ended by signal {number}{hint}")
            error.add_note(log)
            return error
    return None


def _stop(started: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its workers; they also end with it."""
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
    if started.stderr is not None:
        started.stderr.close()


def as_reporting_rank(rank: int, task: Task) -> int:
    """Run a task in a rank that ``by_torchrun`` started; report to it and return the exit code."""
    end_with(os.getppid())
    try:
        answer = task(lambda event: _report({"event": event}))
    except BaseException as error:
        described = failure(error)
        described["traceback"] = described["traceback"][-TRACEBACK_CHARACTERS:]
        _report({"rank": rank, "failure": described})
        return int(described["exit_code"])
    if rank == 0:
        _report({"answer": answer})
    return 0


def _report(message: dict[str, Any]) -> None:
    data = (MARK + json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(sys.stderr.fileno(), data) :]
