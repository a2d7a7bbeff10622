"""``validate``: the function and its result for Python, the terminal and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec.structs import asdict
from msgspec.structs import replace as changed

from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import names_in, write_text_atomically
from hardware_profiles.progress import tracked
from hardware_profiles.software.trainer import software_profile
from planner.text.answer import SCHEMA_VERSION, Answer
from planner.validation.measurement import (
    MeasuredMemory,
    denied_by,
    faster_than_peak,
    is_partial,
    lacks_definition,
    measured_memory,
    measured_mfu,
    measured_step,
    rates,
    tests_memory,
    tests_time,
)
from planner.validation.pricing import CasePrediction, predict_cases
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.implied import with_named_ends
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import (
    PUBLISHED,
    BadCell,
    Row,
    bad_cells_text,
    read_runs_file,
    without_formula,
)
from planner.validation.rows.words import kind_of

if TYPE_CHECKING:
    import pandas as pd

What = Literal["time", "memory"]
FILES: Final = ("rows.csv", "groups.csv", "validation.json")
GIVEN: Final = ("gpu", "num_gpus", "global_batch_size", "seq_len", "precision", "peft")  # columns
# of a row in the JSON document; the table has more columns
ROW_KEYS: Final = names_in("""
    row_id line source_group predicted_step_seconds measured_step_seconds time_error time_inside
    predicted_tokens_per_second_per_gpu measured_tokens_per_second_per_gpu predicted_mfu
    measured_mfu predicted_peak_bytes measured_peak_bytes memory_kind memory_error memory_inside
    verdict outcome partial impossible lacks_definition defaults not_understood skipped
""")


@dataclass(frozen=True, slots=True, repr=False)
class ValidateAnswer(Answer):
    """Predictions and measurements of every row, and error statistics over them."""

    rows: pd.DataFrame  # one row of RUNS.csv each
    summary: Mapping[str, Any]
    what: tuple[What, ...]
    path: Path | None = None  # a RUNS.csv of one's own
    bad_cells: tuple[BadCell, ...] = ()  # of rows that are left out

    @property
    def groups(self) -> pd.DataFrame:
        """The figures of every group as a table."""
        import pandas as pd

        found = []
        for what in self.what:
            for grouping, groups in self.summary[what].get("by", {}).items():
                for name, figures in groups.items():
                    found.append({"what": what, "grouping": grouping, "group": name, **figures})
        return pd.DataFrame(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        records = self.rows[list(ROW_KEYS)].astype(object)
        records = records.where(records.notna(), None)
        return {
            "schema_version": SCHEMA_VERSION,
            "rows": records.to_dict("records"),
            "bad_cells": [asdict(cell) for cell in self.bad_cells],
            "summary": dict(self.summary),
        }

    def notebook_parts(self) -> Iterator[str]:
        """Yield errors over all runs, and those of every source as a table."""
        from planner.validation.notebook import validation_parts

        return validation_parts(self.summary, self.what)

    def write(self, folder: Path, *, force: bool = False) -> None:
        """Write rows.csv, groups.csv and validation.json into a folder."""
        from planner.text.answer import json_text

        refuse_existing_files(folder, force=force)
        folder.mkdir(exist_ok=True)
        lists = ("defaults", "not_understood")
        flat = self.rows.assign(**{name: self.rows[name].map("; ".join) for name in lists})
        texts = (
            flat.map(without_formula).to_csv(index=False),
            self.groups.map(without_formula).to_csv(index=False),
            json_text(self.to_dict()),
        )
        for name, text in zip(FILES, texts, strict=True):
            write_text_atomically(folder / name, text, force=force)

    def without_bad_cells(self) -> str:
        """Return the comparison as text, without the list of bad cells."""
        from planner.validation.text import MOST_ROWS, rows_text, validation_text

        if self.path is None:
            return validation_text(self.summary, self.what)
        many = len(self.rows) > MOST_ROWS
        summary = validation_text(self.summary, self.what, with_reasons=many)
        return f"{rows_text(self.to_dict()['rows'])}\n\n{summary}"

    def __str__(self) -> str:
        if self.path is None or not self.bad_cells:
            return self.without_bad_cells()
        return f"{self.without_bad_cells()}\n\n{bad_cells_text(self.path, self.bad_cells)}"


def refuse_existing_files(folder: Path, *, force: bool) -> None:
    """Raise before anything is priced if the results cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a folder")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder}: the folder {folder.parent} does not exist")
    there = [name for name in FILES if (folder / name).exists()]
    if there and not force:
        raise InputError(f"{folder / there[0]}: exists already; name another folder or add --force")


@names_arguments("planner.validate")
def validate(
    runs: str | Path | None = None,
    *,
    only: str | Sequence[str] | None = None,
    what: What | None = None,
    software: str | None = None,
) -> ValidateAnswer:
    """Compare measured runs with predictions.

    ``runs``: a RUNS.csv (docs/reference/validate.md); None: the runs that shardplan contains.
    ``only``: source groups; ``what``: time or memory alone; ``software``: the profile of all rows,
    whatever their cells name. Rows with bad cells are left out; the answer lists the cells.
    """
    path = PUBLISHED if runs is None else Path(runs)
    file = read_runs_file(path)
    chosen = _chosen(
        with_named_ends(file.rows), [only] if isinstance(only, str) else list(only or ()), path
    )
    if software is not None:
        software_profile(software)  # an unknown one is refused once, not row by row
        chosen = [changed(row, software=software) for row in chosen]
    if what not in (None, "time", "memory"):
        raise InputError(f"what = {what!r} (must be time, memory or None for both)")
    quantities: tuple[What, ...] = ("time", "memory") if what is None else (what,)
    cases, skipped = _cases(chosen, quantities)
    predictions, refused = predict_cases(list(cases.values()))
    skipped |= refused
    table = _table(chosen, cases, predictions, skipped, quantities)
    from planner.validation.statistics import summary_of

    summary = summary_of(table, quantities)
    own = None if runs is None else path
    return ValidateAnswer(table, summary, quantities, own, file.bad_cells)


def _chosen(rows: Sequence[Row], only: Sequence[str], path: Path) -> list[Row]:
    known = {row.group for row in rows}
    for name in only:
        if name not in known:
            hint = did_you_mean(name, known) or f"Known: {', '.join(sorted(known))}"
            raise InputError(f"{path}: no source_group is {name!r}. {hint}")
    return [row for row in rows if not only or row.group in only]


def _cases(rows: list[Row], quantities: Sequence[What]) -> tuple[dict[str, Case], dict[str, str]]:
    """Return the cases of rows that can be priced, and the reasons of those that cannot."""
    cases, skipped = {}, {}
    for row in tracked(rows, "reading row {number} of {total}"):
        if not any(_is_tested(what, row) for what in quantities):
            skipped[row.name] = f"tests no {' or '.join(quantities)}"
            continue
        try:
            cases[row.name] = case_of(row)
        except Unpriceable as reason:
            skipped[row.name] = str(reason)
    return cases, skipped


def _is_tested(what: What, row: Row) -> bool:
    """Return whether a quantity is compared; those of partial rows are, and reported separately."""
    return is_partial(row) or (tests_time(row) if what == "time" else tests_memory(row))


def _table(
    rows: Sequence[Row],
    cases: Mapping[str, Case],
    predictions: Mapping[str, CasePrediction],
    skipped: Mapping[str, str],
    quantities: Sequence[What],
) -> pd.DataFrame:
    import pandas as pd

    records = []
    for row in rows:
        case, predicted = cases.get(row.name), predictions.get(row.name)
        tested = [what for what in quantities if _is_tested(what, row)]
        records.append(_record(row, case, predicted, skipped.get(row.name), tested))
    return pd.DataFrame(records)


def _record(
    row: Row,
    case: Case | None,
    predicted: CasePrediction | None,
    skipped: str | None,
    tested: Sequence[What],
) -> dict[str, Any]:
    denied = denied_by(row)
    step = measured_step(row, case) if "time" in tested else None
    memory = measured_memory(row) if "memory" in tested else None
    size = None if memory is None else memory.size
    impossible = None if case is None else faster_than_peak(case, step)
    steps = peaks = None
    tokens = mfu = None
    if predicted is not None:
        peaks = (predicted.peak, predicted.peak_low, predicted.peak_high)
        if not impossible:
            steps = (predicted.step, predicted.step_low, predicted.step_high)
        if case is not None:
            tokens, mfu = rates(case, predicted.step)
    time_error, time_inside, time_half_width = _against(step, steps)
    memory_error, memory_inside, memory_half_width = _against(size, peaks)
    return {
        "row_id": row.name,
        "line": row.line,
        "source_group": row.group,
        "framework": row.get("framework"),
        "model": row.get("model"),
        "model_kind": _kind(row, case),
        **{name: row.get(name) for name in GIVEN},
        "plan": None if case is None else case.plan_words,
        "method": None if case is None else case.method,
        "software": None if case is None else case.scenario.software.name,
        "predicted_step_seconds": None if predicted is None else predicted.step,
        "measured_step_seconds": step,
        "time_error": time_error,
        "time_inside": time_inside,
        "time_half_width": time_half_width,
        "predicted_tokens_per_second_per_gpu": tokens,
        "measured_tokens_per_second_per_gpu": (
            None if step is None else row.get("tokens_per_second_per_gpu")
        ),
        "predicted_mfu": mfu,
        "measured_mfu": None if step is None else measured_mfu(row),
        "predicted_peak_bytes": None if predicted is None else predicted.peak,
        "measured_peak_bytes": size,
        "memory_kind": None if memory is None else memory.kind,
        "memory_is_stated": memory is not None and memory.is_stated,
        "memory_error": memory_error,
        "memory_inside": memory_inside,
        "memory_half_width": memory_half_width,
        "verdict": None if predicted is None else predicted.verdict,
        "outcome": row.get("outcome"),
        "exceeds_accelerator": _exceeds_accelerator(case, memory),
        "tests_memory": tests_memory(row),
        "partial": is_partial(row),
        "left_out": row.left_out,
        "defaults": [*(() if case is None else case.defaults), *([denied] if denied else [])],
        "impossible": impossible,
        "lacks_definition": lacks_definition(row, tested),
        "not_understood": not_understood(row),
        "skipped": skipped,
    }


def _exceeds_accelerator(case: Case | None, memory: MeasuredMemory | None) -> bool:
    """Return whether tensors took more than the accelerator has: the driver moved them to the host.

    What the driver reports of a whole device is at most its memory, but for rounding.
    """
    if case is None or memory is None or memory.kind == "device":
        return False
    return memory.size > case.scenario.cluster.accelerator.memory_capacity.value


def _kind(row: Row, case: Case | None) -> str:
    """Return the kind of a row's model; a preset that the row names may be a mixture."""
    if row.model_kind is None and case is not None:
        layers = case.scenario.model.kinds
        if any(layer.feed_forward.num_experts for layer in layers):
            return "moe"
    return kind_of(row)


def _against(
    measured: float | None, predicted: tuple[float, float, float] | None
) -> tuple[float | None, bool | None, float | None]:
    """Return signed error, whether the interval contains the measurement, and its half-width.

    ``predicted``: with the ends of its interval; None: not compared.
    """
    if predicted is None:
        return None, None, None
    value, low, high = predicted
    half = 0.5 * (high - low) / value
    if measured is None or measured <= 0.0:
        return None, None, half
    return value / measured - 1.0, low <= measured <= high, half
