"""Starts the ranks of a run: with torchrun, or on a CPU by forking, which is faster.

Ranks started through torchrun report to this process in lines on stderr that begin with MARK; other
output is stored for ``--traceback``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cost_models.plan_file import PlanFile
from executor.launch.hang_report import HANG
from executor.launch.preflight import TorchrunRank
from executor.machine.measure import threads_per_process
from executor.processes.fork import (
    describe_failure,
    end_with_parent,
    error_from_failure,
    run_forked,
)
from executor.processes.reporter import Reporter, Supervision
from executor.processes.signals import Relay, StopSignals
from hardware_profiles.errors import RunError, ShardplanError
from hardware_profiles.terminal import say

MARK: Final = "\x1eshardplan "
REPORT_TO: Final = (
    "SHARDPLAN_REPORT_TO"  # in a rank's environment: pid of the process that started torchrun
)
ATTEMPT: Final = "SHARDPLAN_ATTEMPT"  # number of earlier attempts on all nodes
STOP_SECONDS: Final = 15.0
OWN_END_SECONDS: Final = 3.0  # for torchrun to report a failure of its own ranks
MAX_LOG_LINES: Final = 300
# formats in which torchrun's table of failures, and its line before a restart, name a rank ended by
# a signal
_EXIT: Final = re.compile(r"rank +: (?P<rank>\d+) .*\n +exitcode +: -(?P<signal>\d+)")
_EXIT_BEFORE_RESTART: Final = re.compile(r"exitcode: -(?P<signal>\d+)\) local_rank: (?P<rank>\d+)")
TRACEBACK_CHARACTERS: Final = 3000  # lines below 4 KiB are written atomically

Emit = Callable[[dict[str, Any]], None]
Task = Callable[[Reporter], Any]  # runs on every rank; rank 0 returns the answer


def run_by_fork(
    file: PlanFile, task_of: Callable[[int], Task], emit: Emit, supervision: Supervision
) -> Any:
    """Run a task on CPU processes of this machine and return rank 0's answer.

    ``task_of``: returns the task of an attempt; failed ranks are started again, as by torchrun.
    """
    processes = file.plan.world_size
    threads = threads_per_process(processes)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for attempt in itertools.count():
        with supervision.relay(processes) as relay:
            try:
                return run_forked(
                    *(_forked_task, processes, task_of(attempt)),
                    timeout=None,
                    threads=threads,
                    on_event=emit,
                    relay=relay,
                )[0]
            except RunError as error:
                if attempt >= supervision.max_restarts or relay.received is not None:
                    raise
                emit({"kind": "note", "text": f"restart {attempt + 1}: {error}"})
    raise AssertionError("unreachable")


def _forked_task(rank: int, task: Task) -> Any:
    from executor.processes.fork import emit, fail, stop_signals

    return task(Reporter(emit, fail, stop_signals()))


@dataclass(slots=True)
class LocalRanks:
    """The ranks that torchrun starts on this machine."""

    count: int
    torchrun: tuple[str, ...]  # torchrun's options for this node
    environment: Mapping[str, str]
    has_rank_0: bool = True
    alone: bool = True  # single-node run
    started: subprocess.Popen[str] | None = None
    relay: Relay | None = None
    were_ended: bool = False  # by ``end``: their failure is an effect, not a cause

    def end(self) -> None:
        """End the ranks unless they end by themselves in time, from any thread."""
        if self.started is None or self.relay is None:
            return
        try:
            self.started.wait(timeout=OWN_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.were_ended = True
            self.started.send_signal(signal.SIGTERM)
            self.relay.kill()


def single_node(file: PlanFile, supervision: Supervision) -> LocalRanks:
    """Return the ranks of a single-node run, which torchrun itself restarts."""
    options = ("--max-restarts", str(supervision.max_restarts))
    return LocalRanks(file.plan.world_size, options, {})


def run_by_torchrun(
    arguments: Sequence[str], emit: Emit, supervision: Supervision, local: LocalRanks, *, gpus: bool
) -> Any:
    """Run ``python -m executor`` with the same arguments under torchrun.

    Returns the answer of rank 0, None where rank 0 is on another machine.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *local.torchrun]
    command += ["--nproc-per-node", str(local.count)]
    threads = {"OMP_NUM_THREADS": str(threads_per_process(local.count))}
    environment = {**threads, **os.environ, **local.environment, REPORT_TO: str(os.getpid())}
    if not gpus:
        environment |= threads  # as when the machine was measured
        if local.alone and sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(parent)
        signal.signal(supervision.preemption_signal, signal.SIG_IGN)  # meant for the ranks

    with (
        tempfile.TemporaryDirectory(prefix="shardplan-") as folder,
        supervision.relay(local.count) as local.relay,
    ):
        if local.alone:
            command += local_rendezvous(folder)
        local.started = subprocess.Popen(
            [*command, "-m", "executor", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # interruptions reach it only through this process
            preexec_fn=prepare,
        )
        try:
            return _TorchrunOutput(emit, local.relay, local.has_rank_0).follow(local.started)
        finally:
            _stop(local.started, local.relay)


def local_rendezvous(folder: str) -> list[str]:
    """Return torchrun's options with which the ranks of one machine meet in a file.

    With --standalone its state, which it unpickles, would be on a port that all machines reach.
    """
    return [
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
        *("--rdzv-endpoint", f"{folder}/store", "--local-addr", "127.0.0.1"),
    ]


class _TorchrunOutput:
    """Reads the ranks' reports and torchrun's output until torchrun ends."""

    def __init__(self, emit: Emit, relay: Relay, has_rank_0: bool) -> None:
        self.emit, self.relay, self.has_rank_0 = emit, relay, has_rank_0
        self.attempt = 0
        self.answers: list[Any] = []
        self.failures: list[tuple[int, dict[str, Any]]] = []
        self.others: deque[str] = deque(maxlen=MAX_LOG_LINES)

    def follow(self, started: subprocess.Popen[str]) -> Any:
        """Return rank 0's answer, or raise the first failure of the last attempt."""
        assert started.stderr is not None
        for line in started.stderr:
            _, mark, message = line.partition(MARK)
            if mark:
                self._take(json.loads(message))
            else:
                self.others.append(line)
        code = started.wait()
        if not self.has_rank_0 and code == 0:
            return None
        if self.answers and (code == 0 or self.relay.received is not None):
            return self.answers[0]
        raise self._failure() or self._unknown(code)

    def _take(self, report: dict[str, Any]) -> None:
        if "event" in report:
            self.emit(report["event"])
        elif "failure" in report:
            self.failures.append((report["rank"], report["failure"]))
            if _is_hang(report["failure"]):  # torchrun would wait 30 s for a stopped rank
                self.relay.kill()
        elif "process" in report:
            if report["attempt"] > self.attempt:
                self._begin_again(report["attempt"])
            self.relay.add(report["local_rank"], report["process"])
        else:
            self.answers.append(report["answer"])

    def _begin_again(self, attempt: int) -> None:
        """Report that torchrun restarted the ranks, and the reason."""
        reason = self._failure() or RunError("a rank ended")
        self.attempt = attempt
        self.failures.clear()
        self.others.clear()
        self.emit({"kind": "note", "text": f"restart {attempt}: {reason}"})

    def _failure(self) -> ShardplanError | None:
        """Return the first known failure."""
        hangs = [(rank, failed) for rank, failed in self.failures if _is_hang(failed)]
        if hangs:  # this process sent the signal that ended the unresponsive rank
            return error_from_failure(*hangs[0])
        log = "".join(self.others)
        if (killed := _killed_rank(log)) is not None:  # the cause of the other ranks' failures
            return killed
        if self.failures:
            return error_from_failure(*min(self.failures, key=lambda item: item[1]["time"]))
        return None

    def _unknown(self, code: int) -> RunError:
        error = RunError(f"torchrun ended with exit code {code}")
        error.add_note("".join(self.others))
        return error


def _is_hang(failed: Mapping[str, Any]) -> bool:
    return bool(failed["error"].startswith(HANG))


def _killed_rank(log: str) -> RunError | None:
    """Return the error for a rank that a signal ended, unless torchrun sent it."""
    for found in (*_EXIT.finditer(log), *_EXIT_BEFORE_RESTART.finditer(log)):
        number = int(found["signal"])
        if number != signal.SIGTERM:
            hint = " (often: out of memory)" if number == signal.SIGKILL else ""
            error = RunError(f"rank {found['rank']}: ended by signal {number}{hint}")
            error.add_note(log)
            return error
    return None


def _stop(started: subprocess.Popen[str], relay: Relay) -> None:
    """End torchrun and its workers at once; the workers also end with torchrun."""
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
        relay.kill()
        try:
            started.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
    if started.stderr is not None:
        started.stderr.close()


def restarts() -> int:
    """Return the number of restarts by torchrun on this node."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_restarted() -> bool:
    """Return whether this rank continues a run after a restart."""
    return restarts() > 0 or int(os.environ.get(ATTEMPT, "0")) > 0


def run_as_launched_rank(place: TorchrunRank, task: Task, supervision: Supervision) -> int:
    """Run a task in a rank of ``run_by_torchrun``; report to it and return the exit code."""
    end_with_parent(os.getppid())
    stop = StopSignals(supervision.stop_numbers())
    _report({"local_rank": place.local_rank, "process": os.getpid(), "attempt": restarts()})

    def fail(error: BaseException) -> dict[str, Any]:
        described = describe_failure(error)
        described["traceback"] = described["traceback"][-TRACEBACK_CHARACTERS:]
        _report({"rank": place.rank, "failure": described})
        return described

    try:
        answer = task(Reporter(lambda event: _report({"event": event}), fail, stop))
    except BaseException as error:
        return int(fail(error)["exit_code"])
    if place.rank == 0:
        _report({"answer": answer})
    return 0


def run_as_torchrun_rank(
    place: TorchrunRank, task: Task, emit: Emit, supervision: Supervision
) -> Any:
    """Run a task in a rank of a torchrun that the user started; return its answer."""

    def fail(error: RunError) -> None:
        say(f"shardplan: rank {place.rank}: {error}")

    return task(Reporter(emit, fail, StopSignals(supervision.stop_numbers())))


def _report(message: dict[str, Any]) -> None:
    data = (MARK + json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(sys.stderr.fileno(), data) :]
