"""Answers in notebooks: verdict, parts of memory and time as bars, plans and fixes as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from cost_models.memory.parts import PART_WORDS
from cost_models.step_time.parts import TIME_WORDS
from cost_models.units import format_bytes, format_gib, format_seconds
from hardware_profiles.cluster.schema import Cluster
from planner.answer.ranked_table import ranked_rows, usual_cells
from planner.answer.text import cluster_words, time_line
from planner.assessment.assess import Assessment, MemoryAssessment, PeakMemory, amounts
from planner.assessment.verdict import WORDS
from planner.text.fixes import NEXT, Fix
from planner.text.html_page import Html, bar, element, joined, note, table
from planner.text.notebook import headline
from planner.text.tables import without_columns

SMALL: Final = 0.005  # share of a step or a peak; smaller parts are left out
MOST_ROWS: Final = 20  # of a table of plans


def verdict(found: MemoryAssessment[PeakMemory], *after: str) -> Html:
    """Return the verdict with peak, budget, interval and margin, and sentences after it."""
    memory, margin = found.memory, found.margin_bytes
    spare = f"{format_bytes(abs(margin))} {'left' if margin >= 0 else 'too much'}"
    words = (
        f"peak {format_gib(memory.peak_bytes)} of {format_bytes(found.budget.size)} on the fullest "
        f"accelerator (likely {format_gib(memory.low_bytes)} to {format_gib(memory.high_bytes)}; "
        f"{spare})."
    )
    return headline(WORDS[found.verdict], " ".join([words, *after]), found.verdict)


def step_sentence(assessment: Assessment) -> str:
    """Return step time, interval and rates in a sentence."""
    return f"A step takes {time_line(assessment.time)}."


def about(question: Iterable[str], cluster: Cluster, plan: str) -> Html:
    """Return what repeats the question; ``question``: lines that are wrapped for a terminal."""
    words = " ".join(line.strip() for line in question)
    return note(f"{words} · {cluster_words(cluster)} · {plan}")


def memory_bars(parts: Mapping[str, float], words: Mapping[str, str] | None = None) -> Html:
    """Return the parts of a peak in bytes as bars, largest first; ``words``: below each."""
    return _bars(parts, PART_WORDS, format_bytes, words or {})


def time_bars(parts: Mapping[str, float], words: Mapping[str, str] | None = None) -> Html:
    """Return the parts of a step in seconds as bars, largest first; ``words``: below each."""
    return _bars(parts, TIME_WORDS, format_seconds, words or {})


def _bars(
    parts: Mapping[str, float], names: Mapping[str, str], amount: Any, words: Mapping[str, str]
) -> Html:
    whole = sum(parts.values())
    shown = [name for name in sorted(parts, key=lambda n: -parts[n]) if parts[name] > 0.0]
    return joined(
        bar(
            names[name],
            f"{amount(parts[name])} · {100 * parts[name] / whole:.0f} %",
            parts[name] / whole,
            words.get(name, ""),
        )
        for name in shown
        if parts[name] >= SMALL * whole
    )


def step_bars(assessment: Assessment) -> Html:
    """Return the parts of the step time, folded."""
    title = element("summary", "Where the step goes")
    return element("details", title, time_bars(amounts(assessment.time.parts)))


def fixes_table(fixes: Sequence[Fix]) -> Html:
    """Return changes with which it fits, with memory, pace and options."""
    if not fixes:
        return Html("")
    rows = [("fix", "peak", "pace", "options")]
    rows += [(one.change, f"{format_gib(one.peak)} GiB", one.pace, one.options) for one in fixes]
    head, *shown = without_columns(rows, {"pace": ""})
    found = table(shown, head)
    return joined([found, note(f"Next: {NEXT}.")])


def plans_table(
    assessments: Sequence[Assessment], before: Mapping[str, Sequence[str]] | None = None
) -> Html:
    """Return ranked plans, a row each; ``before``: more columns of the plans, in front."""
    (head, *others), _ = ranked_rows(assessments[:MOST_ROWS])
    more = before or {}
    rows = [[*more, *head]]
    rows += [[*(cells[at] for cells in more.values()), *other] for at, other in enumerate(others)]
    usual = {**usual_cells(), **{name: cells[0] for name, cells in more.items()}}
    shown = without_columns(rows, usual if len(rows) > 2 else usual_cells())
    hidden = len(assessments) - len(others)
    more_rows = note(f"and {hidden:,} more: .table") if hidden > 0 else Html("")
    return joined([table(shown[1:], shown[0]), more_rows])
