"""The drawings of a report: memory over the step, passes, roofline, front of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cost_models.memory.parts import PART_WORDS
from cost_models.units import GIB, format_bytes, format_gib, format_seconds
from planner.answer.memory_svg import COLOURS
from planner.assessment.assess import Assessment, amounts
from planner.reports.alternatives import Alternatives
from planner.reports.plot import LEFT, TOP, Plot, legend
from planner.reports.roofline import Roofline, RooflinePoint
from planner.reports.simulated_step import SimulatedStep
from planner.text.bars import ORDER, shown_scale
from planner.text.html_page import Html, joined

# Okabe and Ito's colours
PASS_COLOURS: Final = {
    "forward": ("forward pass", "#0072b2"),
    "backward": ("backward pass", "#009e73"),
    "backward_input": ("backward pass, gradients of inputs", "#56b4e9"),
    "backward_weight": ("gradients of weights", "#e69f00"),
    "data": ("exposed data-parallel communication", "#cc79a7"),
    "optimizer": ("optimizer", "#d55e00"),
}
ROW, BOX = 26, 20
MOST_ROWS: Final = 16
ROOM: Final = 1.04  # between the largest value and the end of an axis
MARGIN: Final = 0.05  # on both sides of an axis of times, of their range
CLOSE: Final = 1.1  # ratio below which points of a roofline hide each other
OWN, FRONT, USUAL = "#d55e00", "#0072b2", "#666666"


def seconds_tick(value: float) -> str:
    """Return a time below an axis.

    >>> seconds_tick(0.0), seconds_tick(0.25)
    ('0', '250 ms')
    """
    return format_seconds(value) if value else "0"


def memory_over_step(step: SimulatedStep, assessment: Assessment) -> Html:
    """Draw the parts of the memory of the fullest rank over time as stacked areas."""
    rank = assessment.memory.limiting_stage
    samples, budget = step.ranks[rank].memory, assessment.budget.size
    scale = ROOM * shown_scale(max(float(s.parts.peak) for s in samples), budget)
    plot = Plot((0.0, step.seconds), (0.0, scale / GIB))
    shown = [name for name in ORDER if any(amounts(s.parts)[name] > 0.0 for s in samples)]
    lower = [(sample.seconds, 0.0) for sample in samples]
    for name in shown:
        sizes = [amounts(sample.parts)[name] / GIB for sample in samples]
        upper = [(x, y + size) for (x, y), size in zip(lower, sizes, strict=True)]
        plot.area(upper, lower, COLOURS[name])
        lower = upper
    plot.axes("time", "GiB", seconds_tick, lambda value: f"{value:g}")
    if budget <= scale:
        plot.budget(budget / GIB, f"budget {format_bytes(budget)}")
    top = max(samples, key=lambda sample: float(sample.parts.peak))
    words = f"peak {format_bytes(float(top.parts.peak))}"
    plot.mark(top.seconds, float(top.parts.peak) / GIB, "", "#b00000", words, size=4)
    words = f"Memory over the step of pipeline rank {rank}; the peak is {words[5:]}"
    return joined([plot.html(words), legend([(PART_WORDS[n], COLOURS[n]) for n in shown])])


def passes(step: SimulatedStep) -> Html:
    """Draw the passes of every pipeline rank over time."""
    count = len(step.ranks)
    every = -(-count // MOST_ROWS)
    rows = [n for n in range(count) if n % every == 0 or n == count - 1]
    plot = Plot((0.0, step.seconds), (0.0, 1.0), height=ROW * len(rows) + 60)
    plot.axes("time", "", seconds_tick)
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    labels = []
    for place, number in enumerate(rows):
        rank, top = step.ranks[number], TOP + ROW * place
        plot.text(LEFT - 6, top + 14, f"rank {number}", "small", "end")
        for (kind, _, microbatch), start, end in rank.passes:
            found.setdefault(kind, []).append((start, end, top, BOX))
            if plot.x(end) - plot.x(start) > 18.0:
                labels.append((0.5 * (plot.x(start) + plot.x(end)), top + 14, str(microbatch)))
        if rank.exposed > 0.0:
            end = rank.passes_end
            found.setdefault("data", []).append((end, end + rank.exposed, top, BOX))
        update = step.seconds - rank.optimizer
        found.setdefault("optimizer", []).append((update, step.seconds, top, BOX))
    shown = [name for name in PASS_COLOURS if name in found]
    for name in shown:
        plot.boxes(found[name], PASS_COLOURS[name][1])
    for x, y, words in labels:
        plot.text(x, y, words, "mark", "middle")
    words = f"Passes of {len(rows)} pipeline ranks over one step of {format_seconds(step.seconds)}"
    return joined([plot.html(words), legend([PASS_COLOURS[name] for name in shown])])


def roofline_drawing(found: Roofline) -> Html:
    """Draw the rates of operators below the roof of bandwidth and peak."""
    points = found.points
    ridge = found.peak / found.bandwidth
    low = 0.5 * min([ridge / 8.0, *(point.intensity for point in points)])
    high = 2.0 * max([ridge * 8.0, *(point.intensity for point in points)])
    least = 0.5 * min([low * found.bandwidth, *(point.rate for point in points)])
    plot = Plot((low, high), (least / 1e12, 2.0 * found.peak / 1e12), logarithmic=True)
    plot.axes("FLOP a byte", "TFLOP/s", lambda v: f"{v:g}", lambda v: f"{v:g}")
    roof = [(low, low * found.bandwidth), (ridge, found.peak), (high, found.peak)]
    plot.line([(x, y / 1e12) for x, y in roof], style="stroke:var(--ink);stroke-width:2")
    reached = [(found.reached / found.bandwidth, found.reached), (high, found.reached)]
    plot.line(
        [(x, y / 1e12) for x, y in reached],
        style="stroke:var(--soft);stroke-width:1.5;stroke-dasharray:5 4",
    )
    for alike in _close_points(points):
        first = points[alike[0]]
        label = ",".join(str(number + 1) for number in alike)
        words = ", ".join(points[number].name for number in alike)
        words += f": {first.rate / 1e12:.3g} TFLOP/s"
        size = 5 + 3 * len(alike)
        plot.mark(first.intensity, first.rate / 1e12, label, FRONT, words, size=size)
    return plot.html(
        f"Roofline: {len(points)} operators below {found.peak / 1e12:.4g} TFLOP/s and "
        f"{found.bandwidth / 1e12:.3g} TB/s"
    )


def _close_points(points: Sequence[RooflinePoint]) -> list[list[int]]:
    """Return the numbers of points, together those that would hide each other."""
    found: list[list[int]] = []
    for number, point in enumerate(points):
        for alike in found:
            other = points[alike[0]]
            ratios = point.intensity / other.intensity, point.rate / other.rate
            if all(1.0 / CLOSE < ratio < CLOSE for ratio in ratios):
                alike.append(number)
                break
        else:
            found.append([number])
    return found


def front_drawing(own: Assessment, others: Alternatives, letters: Sequence[str]) -> Html:
    """Draw step time and peak of the front, of this plan and of usual setups; bytes from zero."""
    usual = [
        (letter, setup.name, setup.found.assessment)
        for letter, setup in zip(letters, others.usual, strict=True)
        if setup.found.assessment is not None
    ]
    budget = own.budget.size
    drawn = [own, *others.front, *(found for _, _, found in usual)]
    slowest = min(
        max(each.time.step_seconds for each in drawn),
        4.0 * own.time.step_seconds,  # slower ones would push all others together
    )
    largest = min(max(each.memory.peak_bytes for each in drawn), 2.0 * budget)
    fastest = min(each.time.step_seconds for each in drawn)
    margin = (ROOM - 1.0) * slowest + MARGIN * (slowest - fastest)
    ends = max(0.0, fastest - margin), slowest + margin
    plot = Plot(ends, (0.0, ROOM * max(largest, budget) / GIB))
    plot.axes("step time", "GiB", seconds_tick, lambda value: f"{value:g}")
    plot.budget(budget / GIB, f"budget {format_bytes(budget)}")

    def place(found: Assessment) -> tuple[float, float]:
        return found.time.step_seconds, found.memory.peak_bytes / GIB

    front = [place(found) for found in others.front if found.time.step_seconds <= slowest]
    if len(front) > 1:
        plot.line(front, style=f"stroke:{FRONT};stroke-width:2")
    for x, y in front:
        plot.mark(x, y, "", FRONT, f"{format_seconds(x)}, {y:.1f} GiB", size=4)
    outside: list[str] = []
    for letter, name, found in usual:
        x, y = place(found)
        if x <= slowest and y <= plot.y_range[1]:
            words = f"{name}: {format_seconds(x)}, {format_gib(found.memory.peak_bytes)} GiB"
            plot.mark(x, y, letter, USUAL, words)
        else:
            outside.append(letter)
    plot.mark(*place(own), "★", OWN, "this plan", size=10)
    setups = "usual setups" + (f" (outside: {', '.join(outside)})" if outside else "")
    colours = [("this plan (★)", OWN), ("best of each memory", FRONT), (setups, USUAL)]
    return joined([plot.html("Step time and peak memory of alternatives"), legend(colours)])
