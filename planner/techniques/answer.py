"""The answer of ``compare-techniques``: one line a technique, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cost_models.legality.capabilities import targets
from cost_models.scenario import Scenario
from cost_models.text_tables import UNKNOWN, aligned
from cost_models.units import format_bytes, format_seconds
from planner.answer.answers import header
from planner.answer.text import short_head
from planner.assessment.verdict import budget_bytes
from planner.techniques.line import LEVELS, TechniqueLine
from planner.text.answer import DetailedAnswer
from planner.text.assumed import assumed
from planner.text.paragraphs import hanging, plain, width

if TYPE_CHECKING:
    import pandas as pd

HEAD: Final = ("technique", "memory", "receives", "exposed", "step", "shardplan", "exports")
LEAST_FIRST: Final = ("exports", "exposed", "receives")
WHY: Final = 100  # characters of a reason


@dataclass(frozen=True, slots=True, repr=False)
class TechniquesAnswer(DetailedAnswer):
    """Techniques compared: those that fit by step, the others by memory, then the impossible."""

    scenario: Scenario
    lines: tuple[TechniqueLine, ...]
    assumptions: tuple[str, ...]

    @property
    def table(self) -> pd.DataFrame:
        """One technique a row, in SI units."""
        import pandas as pd

        rows = [line.to_dict() for line in self.lines]
        for row in rows:
            row.pop("plan")
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            **header(self.scenario),
            "budget_bytes": budget_bytes(self.scenario.cluster),
            "techniques": [line.to_dict() for line in self.lines],
            "assumptions": list(self.assumptions),
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with layouts, notes, trainers and assumptions."""
        budget = format_bytes(budget_bytes(self.scenario.cluster))
        possible = [line for line in self.lines if line.why_not is None]
        table, headings = _table(possible)
        lines = [*short_head(self.scenario, f"{budget} each"), "", *table]
        impossible = [line for line in self.lines if line.why_not is not None]
        if impossible:
            lines += ["", "Not possible here", *_reasons(impossible, verbose=verbose)]
        if verbose:
            lines += ["", "Layouts"]
            for line in possible:
                words = "; ".join(filter(None, (line.layout, line.note, ", ".join(line.exports))))
                lines += hanging(f"  {line.title}: ", words)
        legend = _legend(headings, possible, verbose=verbose)
        return "\n".join(
            [*lines, "", *legend, *(assumed(self.assumptions, verbose=True) if verbose else [])]
        )


def _table(lines: list[TechniqueLine]) -> tuple[list[str], list[str]]:
    """Return the table as wide as the terminal at most, in groups by verdict, and its headings."""
    titles = {"fits": "Fits, fastest first", "tight": "Tight"}
    titles["does_not_fit"] = "Does not fit, smallest first"
    cells = [list(HEAD), *(list(_row(line)) for line in lines)]
    for heading in (None, *LEAST_FIRST):
        if heading in cells[0]:
            at = cells[0].index(heading)
            cells = [[*row[:at], *row[at + 1 :]] for row in cells]
        shown = [f"  {line}".rstrip() for line in aligned(cells, left=[0])]
        if max(map(len, shown)) <= width():
            break
    found, group = [shown[0]], ""
    for line, text in zip(lines, shown[1:], strict=True):
        title = titles[line.verdict or "does_not_fit"]
        found += [text] if title == group else [title, text]
        group = title
    return found, cells[0]


def _reasons(lines: list[TechniqueLine], *, verbose: bool) -> list[str]:
    """Return the techniques that are not possible, those with the same reason together."""
    titles: dict[str, list[str]] = {}
    for line in lines:
        why = str(line.why_not).splitlines()[0]
        titles.setdefault(why, []).append(line.title)
    found = []
    for why, names in titles.items():
        shown = why if verbose or len(why) <= WHY else why[: WHY - 1].rstrip() + "…"
        found += hanging("  ", f"{', '.join(names)}: {shown}")
    return found


def _row(line: TechniqueLine) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return UNKNOWN if value is None else format_seconds(value)

    def size(value: float | None) -> str:
        return UNKNOWN if value is None else format_bytes(value)

    return (
        line.title,
        size(line.peak_bytes),
        size(line.received_bytes),
        seconds(line.exposed_seconds),
        seconds(line.step_seconds),
        line.level,
        str(len(line.exports)) if line.level != "compares" else UNKNOWN,
    )


def _legend(headings: list[str], lines: list[TechniqueLine], *, verbose: bool) -> list[str]:
    """Return the meaning of the columns and words that are shown."""
    columns = {
        "memory": "peak of an accelerator",
        "receives": "bytes by an accelerator in a step",
        "exposed": "seconds that links add",
        "exports": f"trainers, of {len(targets())}, whose files state it",
    }
    words = [f"{name}: {columns[name]}" for name in headings if name in columns]
    used = {line.level for line in lines}
    words += [f"{level}: {meaning}" for level, meaning in LEVELS.items() if level in used]
    words += [] if verbose else ["-v: layouts, notes, assumptions"]
    return plain("; ".join(words))
