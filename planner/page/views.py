"""Figures of answers as the templates show them: words, and bars in thousandths of a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cost_models.memory.parts import PART_WORDS
from cost_models.pricing.prediction import TimePrediction
from cost_models.step_time.parts import TIME_WORDS
from cost_models.units import GIB, format_bytes, format_gib, format_per_second, format_seconds
from planner.assessment.assess import Assessment, amounts
from planner.text.bars import ORDER, shown_scale, tick
from planner.text.paragraphs import MOMENT_WORDS

WHOLE: Final = 1000.0  # units of a bar
MOST_STAGES: Final = 32  # bars; of more stages an even selection with the fullest
LEAST_SHARE: Final = 0.001  # of a step


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A part of a bar."""

    part: str  # the class of its colour
    words: str
    amount: str
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class StackedBar:
    """One bar of several parts."""

    name: str
    total: str
    segments: tuple[BarSegment, ...]
    strong: bool = False

    @property
    def amounts(self) -> dict[str, str]:
        """The amount of each part."""
        return {segment.part: segment.amount for segment in self.segments}


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """Peak memory of every pipeline stage on one scale, and the budget."""

    bars: tuple[StackedBar, ...]
    legend: tuple[tuple[str, str], ...]  # class of the colour, words
    budget: float  # its position; above WHOLE: beyond the scale
    budget_words: str
    ticks: tuple[tuple[float, str], ...]
    left_out: int  # stages without a bar


def memory_chart(assessment: Assessment) -> MemoryChart:
    """Return the bars of all stages, each at its own peak."""
    stages, fullest = assessment.memory.stages, assessment.memory.limiting_stage
    budget = assessment.budget.size
    every = -(-len(stages) // MOST_STAGES)
    chosen = [
        one for one in stages if one.stage % every == 0 or one.stage in (fullest, stages[-1].stage)
    ]
    scale = 1.02 * shown_scale(max(one.peak_bytes for one in stages), budget)
    bars = tuple(
        StackedBar(
            name=f"stage {one.stage}" if len(stages) > 1 else MOMENT_WORDS[one.moment],
            total=f"{format_gib(one.peak_bytes)} GiB",
            segments=_segments(amounts(one.parts), scale),
            strong=one.stage == fullest,
        )
        for one in chosen
    )
    shown = {segment.part for bar in bars for segment in bar.segments}
    ticks: list[tuple[float, str]] = []
    step, value = tick(scale), 0.0
    while value <= scale:
        ticks.append((WHOLE * value / scale, f"{value / GIB:g}"))
        value += step
    return MemoryChart(
        bars=bars,
        legend=tuple((name, PART_WORDS[name]) for name in ORDER if name in shown),
        budget=WHOLE * budget / scale,
        budget_words=format_bytes(budget),
        ticks=tuple(ticks),
        left_out=len(stages) - len(chosen),
    )


def _segments(parts: Mapping[str, float], scale: float) -> tuple[BarSegment, ...]:
    found: list[BarSegment] = []
    start = 0.0
    for name in ORDER:
        size = parts[name]
        if size <= 0.0:
            continue
        width = WHOLE * size / scale
        found.append(BarSegment(name, PART_WORDS[name], format_bytes(size), start, width))
        start += width
    return tuple(found)


def time_bar(time: TimePrediction) -> tuple[BarSegment, ...]:
    """Return the parts of a step, largest first."""
    found: list[BarSegment] = []
    start = 0.0
    seconds = amounts(time.parts)
    for name in sorted(seconds, key=lambda part: -seconds[part]):
        share = seconds[name] / time.step_seconds
        if share < LEAST_SHARE:
            continue
        width = WHOLE * share
        words = f"{format_seconds(seconds[name])} ({100 * share:.1f} %)"
        found.append(BarSegment(f"time-{name}", TIME_WORDS[name], words, start, width))
        start += width
    return tuple(found)


Figure = tuple[str, str, str]  # label, value, more about it


def time_figures(time: TimePrediction) -> list[Figure]:
    """Return step time with its interval, rates and utilisation."""
    low, high = format_seconds(time.low_seconds), format_seconds(time.high_seconds)
    each = format_per_second(time.tokens_per_second_per_gpu)
    figures = [
        ("Step", format_seconds(time.step_seconds), f"{low} to {high}"),
        ("Tokens per second", format_per_second(time.tokens_per_second), f"{each} each"),
    ]
    if time.mfu is not None:
        figures.append(("MFU", f"{100 * time.mfu:.1f} %", ""))
    return figures


def memory_figures(assessment: Assessment) -> list[Figure]:
    """Return peak, interval, budget and margin of the fullest stage."""
    memory = assessment.memory
    low, high = format_gib(memory.low_bytes), format_gib(memory.high_bytes)
    margin = assessment.margin_bytes
    share = f"{100 * abs(margin) / assessment.budget.size:.0f} %"
    return [
        ("Peak", format_bytes(memory.peak_bytes), f"{low} to {high}"),
        ("Budget", format_bytes(assessment.budget.size), "each"),
        ("Margin" if margin >= 0 else "Short of", format_bytes(abs(margin)), share),
    ]


def plan_cells(assessments: Sequence[Assessment]) -> list[tuple[str, str, str, str, str]]:
    """Return memory, margin, step, rate and utilisation of plans."""
    return [
        (
            f"{format_gib(one.memory.peak_bytes)} GiB",
            f"{100 * one.margin_bytes / one.budget.size:.0f} %",
            format_seconds(one.time.step_seconds),
            format_per_second(one.time.tokens_per_second_per_gpu),
            "–" if one.time.mfu is None else f"{100 * one.time.mfu:.1f} %",
        )
        for one in assessments
    ]
