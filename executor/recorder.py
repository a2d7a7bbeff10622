"""Takes the events of a run and keeps them: metrics.jsonl line by line, run.json, what is shown.

It works where the run was started: in the process that started the ranks, or on rank 0 of a
torchrun that the user started. What it holds does not grow with the number of steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from executor.metrics import METRICS_FILE, MetricsFile
from executor.preflight import Prepared
from executor.report import SCHEMA_VERSION, Row, compare, write_run

KEPT_STEPS: Final = 200  # records of steps in run.json at most; all are in metrics.jsonl
TIMED_STEPS: Final = 1000  # the last ones, over which medians are taken
RUNNING: Final = "running"
FAILED: Final = "failed"
INTERRUPTED: Final = "interrupted"


class Recorder:
    """Keeps a run; ``folder`` None: nothing is written."""

    def __init__(
        self,
        prepared: Prepared,
        options: Mapping[str, Any],
        notes: list[str],
        folder: Path | None,
        show: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.prepared, self.options, self.notes = prepared, dict(options), notes
        self.folder, self.show = folder, show
        self.metrics = None if folder is None else MetricsFile(folder)
        self.started = _now()
        self.status = RUNNING
        self.error: str | None = None
        self.environment: dict[str, Any] = {}
        self.ranks: list[Any] = []
        self.first_step = self.last_step = 0
        self.steps: list[dict[str, Any]] = []
        self.stride = 1
        self.last: dict[str, Any] | None = None
        self.timed: deque[dict[str, Any]] = deque(maxlen=TIMED_STEPS)
        self.timed_steps = 0

    @property
    def began(self) -> bool:
        """Whether the ranks came as far as their first step."""
        return bool(self.environment)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of rank 0."""
        kind = event["kind"]
        values = {key: value for key, value in event.items() if key != "kind"}
        if kind == "start":
            self._start(values)
        elif kind == "measured":
            self.ranks = values["ranks"]
            self._write()
        elif kind == "step":
            self._step(values)
        elif kind == "note":
            self.notes.append(values["text"])
            self.show(values)

    def _start(self, values: dict[str, Any]) -> None:
        """Begin, or begin again from a checkpoint where ranks were started anew."""
        self.environment, self.first_step = values["environment"], values["first_step"]
        self.steps = [record for record in self.steps if record["step"] <= self.first_step]
        if self.metrics is not None:
            self.metrics.begin(self.first_step)
        self._write()

    def _step(self, record: dict[str, Any]) -> None:
        if record.pop("timed"):
            self.timed_steps += 1
            self.timed.append({**record.pop("phases"), "step": record["seconds"]})
        record.pop("phases", None)
        if self.metrics is not None:
            self.metrics.append(record)
        self.last = record
        if (record["step"] - 1) % self.stride == 0:
            self.steps.append(record)
            if len(self.steps) > KEPT_STEPS:
                self.stride *= 2
                self.steps = [r for r in self.steps if (r["step"] - 1) % self.stride == 0]
        self.show(record)

    def finish(self, status: str, error: str | None = None) -> None:
        """Write down how the run ended."""
        self.status, self.error = status, error
        if self.metrics is not None:
            self.metrics.close()
        if self.began:
            self._write()

    def measured(self) -> dict[str, Any]:
        """Return the medians of the timed steps, and what the ranks counted."""
        phases = {name: _median(self.timed, name) for name in (self.timed[0] if self.timed else ())}
        seconds = phases.pop("step", None)
        tokens = self.prepared.file.workload.tokens_per_step
        return {
            "step_seconds": seconds,
            "phase_seconds": phases,
            "timed_steps": self.timed_steps,
            "tokens_per_second": tokens / seconds if seconds else None,
            "ranks": self.ranks,
        }

    def rows(self) -> list[Row]:
        """Return what was predicted beside what was measured."""
        file = self.prepared.file
        return compare(file.prediction, self.measured(), file.workload.tokens_per_step)

    def document(self) -> dict[str, Any]:
        """Return the contents of run.json, and of what ``--json`` prints."""
        thinned = list(self.steps)
        if self.last is not None and (not thinned or thinned[-1] is not self.last):
            thinned.append(self.last)
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "error": self.error,
            "started": self.started,
            "ended": None if self.status == RUNNING else _now(),
            "plan": self.prepared.identity(),
            "options": self.options,
            "data": self.prepared.corpus.summary(),
            "notes": self.notes,
            "environment": self.environment,
            "first_step": self.first_step,
            "steps_done": self.first_step if self.last is None else self.last["step"],
            "metrics": None if self.metrics is None else METRICS_FILE,
            "steps": thinned,
            "measured": self.measured(),
            "comparison": [{**asdict(row), "difference": row.difference} for row in self.rows()],
        }

    def _write(self) -> None:
        if self.folder is not None:
            write_run(self.folder, self.document())


def _median(timed: deque[dict[str, Any]], name: str) -> float:
    return float(statistics.median(record[name] for record in timed))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
