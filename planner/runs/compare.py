"""``compare``: a plan against another one, or against a run of it, term by term."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from cost_models.legality.rules import require_legal
from cost_models.memory.parts import PART_WORDS
from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.observed import (
    CONSTANT_PARTS,
    TRANSIENT_PARTS,
    collectives_side_by_side,
    other_machine,
    peak_bytes,
    with_predicted_names,
)
from cost_models.pricing.prediction import (
    MEMORY_PARTS,
    TIME_PARTS,
    Collective,
    MemoryPrediction,
    Prediction,
    TimePrediction,
    predict,
    scenario_of,
)
from cost_models.step_time.parts import TIME_WORDS
from cost_models.text_tables import aligned, comparison_rows, relative_difference
from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError
from hardware_profiles.record import to_json
from planner.runs.run_record import KILLED, RUN_FILE, RunRecord, read_run
from planner.text.answer import SCHEMA_VERSION, Answer
from planner.text.paragraphs import USUAL, plain, width

WIDEST_NAME: Final = 26  # columns of a term in a narrow terminal
SHOWN_REST: Final = 0.005  # of a step
EM_SPACE: Final = "\u2003"  # in HTML, where others at the begin of a cell vanish
# what the phases of a measured step hold of the predicted one
PASSES: Final = tuple(name for name in TIME_PARTS if name != "optimizer")
WAITING: Final = tuple(n for n in TIME_PARTS if n.endswith("_communication") or n == "bubble")


@dataclass(frozen=True, slots=True)
class ComparedTerm:
    """One number of both sides; None: unknown."""

    name: str
    unit: str  # seconds or bytes
    left: float | None
    right: float | None
    comparable: bool = True  # False: times of two machines

    @property
    def difference(self) -> float | None:
        """Left over right, less one; None where the two are not comparable."""
        return relative_difference(self.left, self.right) if self.comparable else None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Answer):
    """Terms of both sides, differing plan fields, and explanations of the differences."""

    left: str
    right: str
    changes: tuple[tuple[str, Any, Any], ...]  # field, left, right
    terms: tuple[ComparedTerm, ...]
    explanation: tuple[str, ...]

    def __str__(self) -> str:
        return comparison_text(self)

    def notebook_parts(self) -> Iterator[str]:
        """Yield the explanation, both sides of every term, and the fields that differ."""
        from planner.text.html_page import listed, note, table
        from planner.text.notebook import headline

        first, *others = (words.strip() for words in self.explanation)
        yield headline(f"{first[:1].upper()}{first[1:]}.", "")
        yield listed(others)
        head, *rows = comparison_cells(self)
        indented = [(name.replace("  ", EM_SPACE), *cells) for name, *cells in rows]
        yield table(indented, head)
        yield note(f"left: {self.left}; right: {self.right}")
        if self.changes:
            found = [(name, str(a), str(b)) for name, a, b in self.changes]
            yield table(found, ("field", "left", "right"))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "left": self.left,
            "right": self.right,
            "changes": [{"field": f, "left": a, "right": b} for f, a, b in self.changes],
            "terms": [{**asdict(term), "difference": term.difference} for term in self.terms],
            "explanation": list(self.explanation),
        }


@names_arguments("planner.compare")
def compare(first: str | Path, second: str | Path) -> Comparison:
    """Compare a plan.json with another one, or with the folder of a run."""
    first, second = Path(first), Path(second)
    plan = _legal(first)
    if not second.exists():
        raise InputError(
            f"{second}: no such file (another plan.json or the folder of a run expected)"
        )
    if second.is_dir() or second.name == RUN_FILE:
        return compare_run(first, plan, read_run(second))
    return _plans(first, plan, second, _legal(second))


def _legal(path: Path) -> PlanFile:
    file = read_plan_file(path)
    require_legal(scenario_of(file), file.plan, path)
    return file


def _prediction(file: PlanFile) -> Prediction:
    """Return a new prediction: the file may have been edited, or written by another version."""
    return predict(scenario_of(file), file.plan, file.layer_ranges)


# --- two plans ---


def _plans(first: Path, left: PlanFile, second: Path, right: PlanFile) -> Comparison:
    a, b = _prediction(left), _prediction(right)
    terms = [ComparedTerm("step time", "seconds", a.time.step_seconds, b.time.step_seconds)]
    terms += [
        ComparedTerm(
            f"  {name}", "seconds", getattr(a.time.parts, name), getattr(b.time.parts, name)
        )
        for name in TIME_PARTS
        if getattr(a.time.parts, name) or getattr(b.time.parts, name)
    ]
    terms.append(ComparedTerm("peak memory", "bytes", a.memory.peak_bytes, b.memory.peak_bytes))
    terms += [
        ComparedTerm(
            f"  {name}", "bytes", getattr(a.memory.parts, name), getattr(b.memory.parts, name)
        )
        for name in MEMORY_PARTS
    ]
    slower, faster = terms[0].left or 0.0, terms[0].right or 0.0
    return Comparison(
        left=str(first),
        right=str(second),
        changes=tuple(_changes(left, right)),
        terms=tuple(terms),
        explanation=tuple(_why_slower(a.time, b.time, slower - faster)),
    )


def _changes(left: PlanFile, right: PlanFile) -> Iterable[tuple[str, Any, Any]]:
    sides = []
    for file in (left, right):
        sides.append(
            {
                "model": file.model.name,
                "cluster": file.cluster.name,
                "software": file.software,
                **file.workload.to_dict(),
                **file.plan.to_dict(),
                "layer_ranges": [list(pair) for pair in file.layer_ranges],
                "stage_recompute_layers": file.stage_recompute_layers,
                "rank_order": file.rank_order,
            }
        )
    a, b = sides
    for name in a:
        if a[name] != b.get(name):
            yield name, a[name], b.get(name)


def _why_slower(a: TimePrediction, b: TimePrediction, seconds: float) -> Iterable[str]:
    if seconds == 0.0:
        yield "both take the same time"
        return
    word = "slower" if seconds > 0 else "faster"
    parts = {n: getattr(a.parts, n) - getattr(b.parts, n) for n in TIME_PARTS}
    most = sorted(parts, key=lambda name: -abs(parts[name]))
    shown = [name for name in most if abs(parts[name]) >= 0.05 * abs(seconds)]
    words = ", ".join(f"{TIME_WORDS[name]} {_signed(parts[name])}" for name in shown)
    yield f"the left one is {_signed(abs(seconds)).lstrip('+')} {word} a step: {words}"


def _signed(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:+.3g} {unit}"
    return f"{seconds / 1e-6:+.3g} µs"


# --- a plan and a run of it ---


def compare_run(path: Path, file: PlanFile, run: RunRecord) -> Comparison:
    """Compare the prediction of a plan with the measurements of a run of it."""
    ran = run.plan_file
    differing = [name for name, _, _ in _changes(file, ran) if name != "cluster"]
    if differing:
        raise InputError(
            f"{run.folder}: is a run of another plan: {', '.join(differing)} differ from {path}"
        )
    predicted = _prediction(file)
    same = _other_machine(run) is None
    terms = [replace(term, comparable=same) for term in _time_terms(predicted.time, run)]
    terms += _memory_terms(predicted.memory, run)
    terms += _traffic_terms(predicted.communication, run)
    return Comparison(
        left=f"predicted by {path}",
        right=f"measured in {run.folder}",
        changes=(),
        terms=tuple(terms),
        explanation=tuple(_why_off(predicted, run)),
    )


def _other_machine(run: RunRecord) -> str | None:
    """Return in words that a run used other devices than its plan was priced for."""
    return other_machine(run.plan_file, run.device, run.plan_file.plan.world_size)


def predicted_phases(time: TimePrediction) -> dict[str, float]:
    """Return the predicted seconds of the phases that a run measures."""
    return {
        "forward and backward": sum(getattr(time.parts, name) for name in PASSES),
        "gradient norm, clipping, update": float(time.parts.optimizer),
    }


def measured_phases(run: RunRecord) -> dict[str, float | None]:
    """Return the measured seconds of the same phases."""
    phases = run.phase_seconds
    update = [phases[name] for name in ("gradients", "optimizer") if name in phases]
    return {
        "forward and backward": phases.get("forward_backward"),
        "gradient norm, clipping, update": sum(update) if update else None,
    }


def exposed(time: TimePrediction) -> float:
    """Return the predicted seconds in which a step waits for communication alone."""
    return float(sum(getattr(time.parts, n) for n in WAITING))


def _time_terms(time: TimePrediction, run: RunRecord) -> Iterable[ComparedTerm]:
    yield ComparedTerm("step time", "seconds", time.step_seconds, run.step_seconds)
    measured = measured_phases(run)
    for name, seconds in predicted_phases(time).items():
        yield ComparedTerm(f"  {name}", "seconds", seconds, measured[name])
    if run.exposed_seconds is not None:
        yield ComparedTerm(
            "  of it waiting for communication", "seconds", exposed(time), run.exposed_seconds
        )


def _memory_terms(memory: MemoryPrediction, run: RunRecord) -> Iterable[ComparedTerm]:
    stages = {entry.stage: entry for entry in memory.stages}
    for stage, rank in run.busiest.items():
        entry = stages[stage]
        parts = with_predicted_names(rank, run.plan_file)["memory"]["parts"]
        where = f", pipeline rank {stage}" if len(stages) > 1 else ""
        yield ComparedTerm(
            f"peak memory{where}", "bytes", entry.allocated_bytes, float(peak_bytes(rank))
        )
        for name in CONSTANT_PARTS:
            yield ComparedTerm(
                f"  {name}", "bytes", getattr(entry.parts, name), float(parts.get(name, 0))
            )
        rest = sum(float(size) for name, size in parts.items() if name not in CONSTANT_PARTS)
        predicted = sum(getattr(entry.parts, name) for name in TRANSIENT_PARTS)
        yield ComparedTerm("  others", "bytes", predicted, rest)


def _traffic_terms(records: tuple[Collective, ...], run: RunRecord) -> Iterable[ComparedTerm]:
    if run.ranks:
        for (axis, kind), left, right in collectives_side_by_side(
            to_json(records), list(run.ranks)
        ):
            yield ComparedTerm(f"{kind} ({axis})", "bytes", float(left), float(right))


def _why_off(predicted: Prediction, run: RunRecord) -> Iterable[str]:
    if run.status == KILLED:
        yield f"the run was killed: {run.folder} holds what it wrote until then"
    other = _other_machine(run)
    if other is not None:
        yield f"times are not comparable: {other}"
        return
    if run.step_seconds is None:
        yield (
            "the run timed no step (at least three are needed: the first and the watched one do "
            "not count)"
        )
        return
    time = predicted.time
    missing = run.step_seconds - time.step_seconds
    word = "longer" if missing > 0 else "shorter"
    yield (
        f"the measured step is {_signed(abs(missing)).lstrip('+')} {word} than predicted "
        f"({100 * missing / time.step_seconds:+.0f} %)"
    )
    measured = measured_phases(run)
    gaps = {
        name: (measured[name] or 0.0) - seconds
        for name, seconds in predicted_phases(time).items()
        if measured[name] is not None
    }
    if run.exposed_seconds is not None and "forward and backward" in gaps:
        gap = run.exposed_seconds - exposed(time)
        gaps["forward and backward, computing"] = gaps.pop("forward and backward") - gap
        gaps["waiting for communication"] = gap
    rest = missing - sum(gaps.values())
    for name, gap in sorted(gaps.items(), key=lambda item: -abs(item[1])):
        yield f"  {name}: {_signed(gap)}"
    if abs(rest) >= SHOWN_REST * run.step_seconds:
        yield f"  the rest (each of these is a median of its own): {_signed(rest)}"
    low, high = time.low_seconds, time.high_seconds
    inside = "inside" if low <= run.step_seconds <= high else "outside"
    yield f"that is {inside} the stated interval"
    if missing > 0.05 * time.step_seconds or inside == "outside":
        yield f"to plan with what this run showed: shardplan calibrate --from {run.folder}"


# --- as text ---


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as lines."""
    lines = []
    for field, left, right in comparison.changes:
        lines.append(f"{field}: {left} | {right}")
    if comparison.changes:
        lines.append("")
    lines += [f"left:  {comparison.left}", f"right: {comparison.right}", ""]
    cells = comparison_cells(comparison)
    lines += aligned(_with_short_names(cells) if width() < USUAL else cells, left=[0])
    lines.append("")
    for words in comparison.explanation:
        lines += plain(words.lstrip(), " " * (len(words) - len(words.lstrip())))
    return "\n".join(lines)


def _with_short_names(cells: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return cells with long names on several lines, for a narrow terminal."""
    found: list[tuple[str, ...]] = []
    for name, *figures in cells:
        indent = " " * (len(name) - len(name.lstrip()))
        *before, last = textwrap.wrap(
            name.strip(), WIDEST_NAME, initial_indent=indent, subsequent_indent=f"{indent}  "
        ) or [""]
        found += [(part, *("" for _ in figures)) for part in before]
        found.append((last, *figures))
    return found


def comparison_cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the table of both sides, its head first, without terms that are zero on both."""
    rows = [
        (term_name(term), term.unit, term.left, term.right)
        for term in comparison.terms
        if term.left or term.right
    ]
    apart = {term.unit for term in comparison.terms if not term.comparable}
    return comparison_rows(rows, ("left", "right", "left is"), "more", "less", apart)


def term_name(term: ComparedTerm) -> str:
    """Return the name of a term in words, indented under the term that it is a part of."""
    words = TIME_WORDS if term.unit == "seconds" else PART_WORDS
    part = term.name.strip()
    return term.name.replace(part, words.get(part, part))
