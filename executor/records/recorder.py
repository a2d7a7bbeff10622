"""Recorder of a run's events: metrics.jsonl line by line, run.json, and the display.

Runs in the process that started the ranks, or on rank 0 of a torchrun that the user started. Its
memory does not grow with the number of steps.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from cost_models.pricing.observed import other_machine, with_predicted_names
from executor.launch.preflight import PreparedRun
from executor.records.metrics import METRICS_FILE, MetricsFile
from executor.records.report import (
    RUN_FILE,
    SCHEMA_VERSION,
    ComparisonRow,
    compare,
    overwrite_status,
    write_record,
    write_run,
)
from executor.records.tensorboard import TensorBoard
from executor.records.utilisation import peak_flops, utilisation
from hardware_profiles.errors import InputError, RunError, ShardplanError
from hardware_profiles.fields import read_json

MAX_RECORDS: Final = 200  # maximum number of step records in run.json; metrics.jsonl has all
MAX_TIMELINES: Final = 64  # ranks in timeline.json
TIMELINE_FILE: Final = "timeline.json"  # passes and waits of the last sampled step
TIMED_STEPS: Final = 1000  # number of last steps for medians
RUNNING: Final = "running"
FAILED: Final = "failed"
INTERRUPTED: Final = "interrupted"
STOPPED: Final = "stopped"  # on request, after a complete step


class Recorder:
    """Records a run; ``folder`` None: writes nothing."""

    def __init__(
        self,
        prepared: PreparedRun,
        options: Mapping[str, Any],
        notes: list[str],
        folder: Path | None,
        show: Callable[[Mapping[str, Any]], None],
        *,
        tensorboard: bool = False,
    ) -> None:
        self.prepared, self.options, self.notes = prepared, dict(options), notes
        self.folder, self.show = folder, show
        self.metrics = None if folder is None else MetricsFile(folder)
        self.with_board = tensorboard and folder is not None
        self.board: TensorBoard | None = None
        self.peak: float | None = None
        self.started = _now()
        self.ended: str | None = None
        self.status = RUNNING
        self.error: str | None = None
        self.environment: dict[str, Any] = {}
        self.ranks: list[Any] = []
        self.first_step = 0
        self.steps, self.evaluations = SampledRecords(), SampledRecords()
        self.samples: deque[list[dict[str, float]]] = deque(maxlen=TIMED_STEPS)
        self.timed: deque[dict[str, Any]] = deque(maxlen=TIMED_STEPS)
        self.timed_steps = 0
        self.earlier: dict[str, Any] = {}  # measured before the run was resumed

    @property
    def began(self) -> bool:
        """Whether the ranks reached their first step."""
        return bool(self.environment)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Process one event of rank 0."""
        record = dict(event)
        if event["kind"] == "start":
            self._start(record)
        elif event["kind"] == "measured":
            self.ranks = record["ranks"]
            self._write()
        elif event["kind"] == "step":
            self._step(record)
        elif event["kind"] == "evaluation":
            self._keep(record, self.evaluations)
        elif event["kind"] == "note":
            self.notes.append(record["text"])
            self.show(record)

    def _start(self, values: dict[str, Any]) -> None:
        """Start recording, or continue from a checkpoint after a restart."""
        first = not self.began
        self.environment, self.first_step = values["environment"], values["first_step"]
        if first and self.folder is not None:
            identity = self.prepared.identity()
            self.earlier, note = _earlier_measurement(self.folder, identity, self.environment)
            if note:
                self({"kind": "note", "text": note})
        self.peak = peak_flops(self.prepared.file, self.environment["device"])
        for kept in (self.steps, self.evaluations):
            kept.drop_after(self.first_step)
        if self.metrics is not None:
            self.metrics.begin(self.first_step)
        if self.with_board and self.folder is not None:
            self._close_board()
            self.board = TensorBoard(self.folder, self.first_step)
        self._write()

    def _step(self, record: dict[str, Any]) -> None:
        phases, ranks = record.pop("phases"), record.pop("ranks", None)
        if record.pop("timed"):
            self.timed_steps += 1
            self.timed.append({**phases, "step": record["seconds"]})
        record |= utilisation(self.prepared.file, self.peak, record["seconds"])
        if ranks is not None:
            waits = [rank["exposed_seconds"] for rank in ranks]
            self.samples.append(waits)
            record["exposed_communication_seconds"] = [sum(rank.values()) for rank in waits]
            record["memory_bytes"] = [rank["memory_bytes"] for rank in ranks]
            self._write_timeline(record["step"], phases, ranks)
        self._keep(record, self.steps)

    def _write_timeline(
        self, step: int, phases: Mapping[str, float], ranks: list[dict[str, Any]]
    ) -> None:
        """Write passes and waits of the last sampled step, for ``shardplan trace``."""
        if self.folder is not None:
            lines = [rank["timeline"] for rank in ranks[:MAX_TIMELINES]]
            document = {"schema_version": SCHEMA_VERSION, "step": step, "phases": phases}
            text = json.dumps({**document, "ranks": lines}, allow_nan=False)
            write_record(self.folder / TIMELINE_FILE, f"{text}\n")

    def _keep(self, record: dict[str, Any], where: SampledRecords) -> None:
        if self.metrics is not None:
            self.metrics.append(record)
        if self.board is not None:
            self.board.add(record)
        where.add(record)
        self.show(record)

    def _close_metrics(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def _write_began(self) -> None:
        if self.began:
            self._write()

    def _close_board(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None

    def finish(self, status: str, error: str | None = None) -> None:
        """Record the end of the run."""
        self.status, self.error, self.ended = status, error, _now()
        problems: list[Exception] = []  # of a full disk; the run's own error comes first
        for last in (self._close_metrics, self._close_board, self._write_began):
            try:
                last()
            except (ShardplanError, OSError) as problem:
                problems.append(problem)
        if problems and self.folder is not None:
            overwrite_status(self.folder, RUNNING, FAILED)
            if error is None:
                raise RunError(f"{self.folder}: cannot be written: {problems[0]}")

    def measured(self) -> dict[str, Any]:
        """Return the medians of the timed steps, and the ranks' counters.

        Of a resumed run, those of the session that timed the most steps.
        """
        if self.earlier.get("timed_steps", 0) > self.timed_steps:
            return {**self.earlier, "ranks": self.ranks or self.earlier.get("ranks", [])}
        phases = {name: _median(self.timed, name) for name in (self.timed[0] if self.timed else ())}
        seconds = phases.pop("step", None)
        file = self.prepared.file
        tokens = file.workload.tokens_per_step
        return {
            "step_seconds": seconds,
            "phase_seconds": phases,
            "timed_steps": self.timed_steps,
            "tokens_per_second": tokens / seconds if seconds else None,
            **(utilisation(file, self.peak, seconds) if seconds else {"mfu": None, "hfu": None}),
            "exposed_communication_seconds": self._exposed(),
            "ranks": self.ranks,
        }

    def _exposed(self) -> dict[str, float] | None:
        """Return the waiting seconds per step by operation.

        Mean of the ranks, median of the samples.

        None if no step was sampled.
        """
        if not self.samples:
            return None
        names = sorted({name for sample in self.samples for rank in sample for name in rank})
        return {
            name: statistics.median(
                statistics.fmean(rank.get(name, 0.0) for rank in sample) for sample in self.samples
            )
            for name in names
        }

    def rows(self) -> list[ComparisonRow]:
        """Return the comparison of predicted and measured values."""
        file, measured = self.prepared.file, self.measured()
        measured["ranks"] = [with_predicted_names(rank, file) for rank in self.ranks]
        same = self.other_machine() is None
        tokens = file.workload.tokens_per_step
        return compare(file.prediction, measured, tokens, same_machine=same)

    def other_machine(self) -> str | None:
        """Return in words that the run used other devices than the plan was priced for."""
        file = self.prepared.file
        device = self.environment.get("device", "unknown")
        return other_machine(file, device, file.plan.world_size)

    def document(self) -> dict[str, Any]:
        """Return the contents of run.json, which ``--json`` prints as well."""
        held_out = self.prepared.evaluation
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "error": self.error,
            "started": self.started,
            "ended": self.ended,
            "plan": self.prepared.identity(),
            "options": self.options,
            "data": self.prepared.corpus.summary(),
            "notes": self.notes,
            "environment": self.environment,
            "first_step": self.first_step,
            "steps_done": self.steps.last["step"] if self.steps.last else self.first_step,
            "evaluation_data": None if held_out is None else held_out.summary(),
            "metrics": None if self.metrics is None else METRICS_FILE,
            "steps": self.steps.records(),
            "evaluations": self.evaluations.records(),
            "measured": self.measured(),
            "comparison": [{**asdict(row), "difference": row.difference} for row in self.rows()],
        }

    def _write(self) -> None:
        if self.folder is not None:
            write_run(self.folder, self.document())


class SampledRecords:
    """At most MAX_RECORDS records, evenly spread over all added ones, and the last one."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.stride, self.added = 1, 0
        self.last: dict[str, Any] | None = None

    def add(self, record: dict[str, Any]) -> None:
        """Add a record."""
        self.last = record
        if self.added % self.stride == 0:
            self.kept.append(record)
        self.added += 1
        if len(self.kept) > MAX_RECORDS:
            self.kept = self.kept[::2]
            self.stride *= 2

    def drop_after(self, step: int) -> None:
        """Drop the records of steps that will be repeated."""
        self.kept = [record for record in self.kept if record["step"] <= step]
        self.last = self.kept[-1] if self.kept else None

    def records(self) -> list[dict[str, Any]]:
        """Return the records, in order."""
        ends_with_last = self.last is None or (self.kept and self.kept[-1] is self.last)
        return list(self.kept) if ends_with_last else [*self.kept, self.last or {}]


def _median(timed: deque[dict[str, Any]], name: str) -> float:
    return float(statistics.median(record[name] for record in timed))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _earlier_measurement(
    folder: Path, plan: Mapping[str, Any], environment: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return what earlier sessions in a folder measured (empty: nothing), and a note about it.

    Only of the same file of a plan in the same environment. The run.json of another one is renamed
    after the time when its session started, so that it stays for ``calibrate`` and ``compare``.
    """
    path = folder / RUN_FILE
    document: dict[str, Any] = {}
    with contextlib.suppress(InputError):  # there is none, or not a whole one
        document = read_json(path, "a run")
    measured = document.get("measured") or {}
    steps = measured.get("timed_steps")
    if not steps:
        return {}, ""
    before = document.get("plan", {}).get("sha256"), document.get("environment")
    if before == (plan.get("sha256"), environment):
        return measured, f"the {steps} steps timed before count until more are timed"
    other = folder / f"run-{re.sub(r'[^0-9]', '', str(document.get('started'))[:19])}.json"
    try:
        path.rename(other)
    except OSError as error:
        raise RunError(f"{path}: cannot be renamed: {error.strerror}") from None
    return {}, f"{other}: what was measured before, with another plan or in another environment"
