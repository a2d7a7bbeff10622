"""An explanation in a notebook: bars of time and memory, and other plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from cost_models.units import format_bytes, format_seconds
from planner.advice.ways_out import WayOut
from planner.answer.notebook import memory_bars, time_bars
from planner.explanation.glossary import MEMORY_EXPLANATIONS
from planner.explanation.why_not import WhyNot
from planner.text.html_page import Html, element, listed, table

NOT_POSSIBLE: Final = "not possible"
KINDS: Final = {
    "illegal": NOT_POSSIBLE,
    "too_large": "too large",
    "tight": "may run out of memory",
    "same": "this plan",
}


def where_it_goes(
    seconds: Mapping[str, float], words: Mapping[str, str], sizes: Mapping[str, float]
) -> Iterator[Html]:
    """Yield bars of the parts of a step, with words below each, and of the peak, folded."""
    yield element("p", element("b", "Where the step goes"))
    yield time_bars(seconds, words)
    title = element("summary", "Where the memory goes")
    yield element("details", title, memory_bars(sizes, MEMORY_EXPLANATIONS))


def other_plans(why_not: Sequence[WhyNot], ways_out: Sequence[WayOut]) -> Iterator[Html]:
    """Yield the plans that were asked for, and changes that would fit."""
    if why_not:
        yield element("p", element("b", "Other plans"))
        rows = [_against(reason) for reason in why_not]
        yield table(rows, ("asked", "its best completion", "step", "peak", "verdict"))
    if ways_out:
        yield element("p", element("b", "What would fit"))
        yield listed(f"{w.change}: {format_bytes(w.peak_bytes)} ({w.options})" for w in ways_out)


def _against(reason: WhyNot) -> tuple[str, str, str, str, str]:
    plan = "–" if reason.plan is None else reason.options
    step = peak = "–"
    if reason.assessment is not None:
        step = format_seconds(reason.assessment.time.step_seconds)
        peak = format_bytes(reason.assessment.memory.peak_bytes)
    said = KINDS.get(reason.kind, reason.kind)
    if reason.kind == "illegal" and reason.rules:
        said = f"{NOT_POSSIBLE}: {reason.rules[0][1]}"
    return reason.requested, plan, step, peak, said
