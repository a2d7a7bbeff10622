"""metrics.jsonl: one line per step, appended during the run.

Every line is flushed, so a killed run loses at most the current line. A run resumed from a
checkpoint continues the same file: lines of steps to be repeated, and a truncated last line, are
dropped first.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from hardware_profiles.errors import RunError
from hardware_profiles.fields import write_text_atomically

METRICS_FILE: Final = "metrics.jsonl"


class MetricsFile:
    """Appends records to a file in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE
        self.file: TextIO | None = None

    def begin(self, first_step: int) -> None:
        """Open the file for a run whose first ``first_step`` steps are done."""
        self.close()
        with _named(self.path):
            if self.path.exists():
                kept = [line for line, record in _lines(self.path) if record["step"] <= first_step]
                write_text_atomically(self.path, "".join(kept), force=True)
            self.file = self.path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        assert self.file is not None, "begin first"
        with _named(self.path):
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield complete lines and their records."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line, json.loads(line)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an OSError into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
