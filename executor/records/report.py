"""Comparison of predictions and measurements: as rows, as text, and as the file run.json."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cost_models.memory.parts import PART_WORDS
from cost_models.pricing.observed import (
    CONSTANT_PARTS,
    TRANSIENT_PARTS,
    collectives_side_by_side,
    peak_bytes,
)
from cost_models.text_tables import comparison_table, relative_difference
from hardware_profiles.errors import InputError, RunError
from hardware_profiles.fields import write_text_atomically

SCHEMA_VERSION: Final = 1
RUN_FILE: Final = "run.json"
LINE: Final = 80
HEAD: Final = ("predicted", "measured", "prediction is")


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One number, predicted and measured; None: unknown."""

    name: str
    unit: str  # seconds, bytes, tokens_per_second or collectives
    predicted: float | None
    measured: float | None
    comparable: bool = True  # False: a time of another machine than the plan was priced for

    @property
    def difference(self) -> float | None:
        """Signed relative error of the prediction; None where the two are not comparable."""
        return relative_difference(self.predicted, self.measured) if self.comparable else None


def compare(
    prediction: Mapping[str, Any],
    measured: Mapping[str, Any],
    tokens_per_step: int,
    *,
    same_machine: bool = True,
) -> list[ComparisonRow]:
    """Return the rows of the comparison; values that a plan.json does not predict are None.

    A run that ended before its ranks were measured has only times to compare. ``same_machine``:
    whether the run used the devices that the plan was priced for.
    """
    times = _time_rows(prediction.get("time", {}), measured, tokens_per_step)
    times = [replace(row, comparable=same_machine) for row in times]
    if not measured["ranks"]:
        return times
    return [
        *times,
        *_memory_rows(prediction.get("memory", {}), measured["ranks"]),
        *_communication_rows(prediction.get("communication", []), measured["ranks"]),
    ]


def _time_rows(
    predicted: Mapping[str, Any], measured: Mapping[str, Any], tokens: int
) -> Iterable[ComparisonRow]:
    seconds = predicted.get("step_seconds")
    rate = tokens / seconds if seconds else None
    yield ComparisonRow("step time", "seconds", seconds, measured["step_seconds"])
    yield ComparisonRow(
        "tokens per second", "tokens_per_second", rate, measured["tokens_per_second"]
    )


def _memory_rows(predicted: Mapping[str, Any], ranks: list[Any]) -> Iterator[ComparisonRow]:
    """Compare live tensors stage by stage, and by category on the fullest rank."""
    stages = {entry["stage"]: entry for entry in predicted.get("stages", [])}
    found = sorted({rank["stage"] for rank in ranks})
    for stage in found:
        fullest = max(peak_bytes(rank) for rank in ranks if rank["stage"] == stage)
        name = f"peak memory, pipeline rank {stage}" if len(found) > 1 else "peak memory"
        yield ComparisonRow(name, "bytes", _allocated(stages.get(stage, {})), float(fullest))
    worst = max(ranks, key=peak_bytes)
    parts = stages.get(worst["stage"], {}).get("parts", predicted.get("parts", {}))
    for part in CONSTANT_PARTS:
        name = f"  {PART_WORDS[part]}"
        yield ComparisonRow(name, "bytes", parts.get(part), _part(worst, [part]))
    rest = [part for part in worst["memory"]["parts"] if part not in CONSTANT_PARTS]
    known = [parts[part] for part in TRANSIENT_PARTS if part in parts]
    predicted_rest = float(sum(known)) if known else None
    yield ComparisonRow("  others", "bytes", predicted_rest, _part(worst, rest))


def _allocated(stage: Mapping[str, Any]) -> float | None:
    value = stage.get("allocated_bytes", stage.get("peak_bytes"))
    return None if value is None else float(value)


def _part(rank: Mapping[str, Any], parts: Iterable[str]) -> float:
    return float(sum(rank["memory"]["parts"].get(part, 0) for part in parts))


def _communication_rows(predicted: Any, ranks: list[Any]) -> Iterator[ComparisonRow]:
    """Compare the bytes of a step by axis and kind: summed over one rank of each pipeline rank."""
    for (axis, kind), expected, counted in collectives_side_by_side(predicted, ranks):
        known = float(expected) if predicted else None
        yield ComparisonRow(f"{kind} ({axis})", "bytes", known, float(counted))


def as_text(
    rows: Iterable[ComparisonRow], *, on_gpu: bool, other: str | None = None, busy: str = ""
) -> str:
    """Return the comparison as a plain-text table with an explanation below.

    ``other``: that the run used other devices than the plan was priced for, in words; ``busy``:
    that other programs ran before it, which matters only to times on a CPU.
    """
    listed = list(rows)
    figures = [(row.name, row.unit, row.predicted, row.measured) for row in listed]
    apart = {row.unit for row in listed if not row.comparable}
    lines = comparison_table(figures, HEAD, "high", "low", apart)
    return "\n".join([*lines, "", _what_is_compared(on_gpu, other, busy)])


def _what_is_compared(on_gpu: bool, other: str | None, busy: str) -> str:
    memory = (
        "Memory is what the CUDA allocator gave to tensors (max_memory_allocated)."
        if on_gpu
        else "Memory is the bytes of live tensors, without allocator slack, Python and libraries."
    )
    times = ""
    if other is not None:
        times = f"Times are not comparable: {other}. "
    elif busy and not on_gpu:
        times = f"Just before the run the machine was {busy}: steps take longer then. "
    others = ", ".join(PART_WORDS[name] for name in TRANSIENT_PARTS)
    return textwrap.fill(
        f"{times}{memory} Its parts are those of the fullest rank at its peak; others: {others}. "
        "Collectives are the bytes of whole tensors that one rank of every pipeline stage moves in "
        "a step, added up. "
        "Step time is the median, without the first two steps.",
        width=LINE,
    )


def write_run(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write run.json and return its path."""
    path = folder / RUN_FILE
    write_record(path, json.dumps(document, indent=2, allow_nan=False) + "\n")
    return path


def write_record(path: Path, text: str) -> None:
    """Write a file of a run, over an earlier state of the same run; a RunError if it fails."""
    try:
        write_text_atomically(path, text, force=True)
    except InputError as error:
        raise RunError(str(error)) from None


def overwrite_status(folder: Path, before: str, after: str) -> None:
    """Replace the status in run.json in place by one as short, which needs no room on the disk."""
    old, new = (f'"status": "{status}"'.encode() for status in (before, after))
    with contextlib.suppress(OSError), (folder / RUN_FILE).open("r+b") as file:
        place = file.read(1000).find(old)
        if place >= 0:
            file.seek(place)
            file.write(new.ljust(len(old)))
