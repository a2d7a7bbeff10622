"""Memory of one step as SVG: a stacked bar for each moment and stage, and the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cost_models.memory.parts import PART_WORDS
from cost_models.units import GIB, format_bytes, format_gib
from planner.answer.memory_explanation import moment_name
from planner.assessment.assess import Assessment, amounts
from planner.assessment.step_memory import StagePeak, StepMemory
from planner.text.bars import ORDER, shown_scale, tick
from planner.text.html_page import escape

# Okabe and Ito's colours, which most colour-blind readers tell apart, and a grey
COLOURS: Final = {
    "weights": "#0072b2",
    "optimizer": "#56b4e9",
    "runtime": "#bbbbbb",
    "gradients": "#e69f00",
    "activations": "#009e73",
    "logits": "#d55e00",
    "buffers": "#cc79a7",
}
OTHER: Final = "#666666"
WIDTH: Final = 920
LEFT, RIGHT = 210, 90  # room for names and for sums
ROW, BAR = 30, 20
MOST_BARS: Final = 32  # of stages
# of the drawing alone: a notebook shows drawings of several libraries
STYLE: Final = (
    ".drawn text{font:13px system-ui,sans-serif;fill:#222;fill:var(--ink,#222)}"
    ".drawn .small{font-size:12px;fill:#555;fill:var(--soft,#555)}"
    ".drawn .strong{font-weight:600}"
    ".drawn .grid{stroke:#ddd;stroke:var(--line,#ddd)}"
    ".drawn .budget{stroke:#b00;stroke:var(--alarm,#b00);stroke-width:2}"
    ".drawn .ground{fill:#fff;fill:var(--ground,#fff)}"
)


def memory_svg(step: StepMemory, assessment: Assessment, title: str) -> str:
    """Return a self-contained drawing; bars, axis and budget share one scale from 0."""
    budget = assessment.budget.size
    stages = _drawn_stages(step)
    peaks = [moment.parts for moment in step.moments] + [stage.parts for stage in stages]
    scale = 1.02 * shown_scale(max(float(parts.peak) for parts in peaks), budget)
    shown = [name for name in ORDER if any(amounts(parts)[name] > 0.0 for parts in peaks)]
    body = [_text(LEFT, 22, title, "strong")]
    y = 44 + _legend(body, shown, 44)
    where = f" of stage {step.stage}, the fullest" if len(step.stages) > 1 else ""
    y = _heading(body, f"The moments of one step{where}", y)
    top = y
    for moment in step.shown_moments:
        strong = "strong" if moment is step.moments[step.peak] else ""
        y = _bar(body, moment_name(step, moment.name), amounts(moment.parts), y, scale, strong)
    _axis(body, top, y, scale, budget)
    y += 34
    if stages:
        y = _heading(body, "Every stage at its own peak", y + 10)
        top = y
        for stage in stages:
            name = f"stage {stage.stage}: {stage.layers} layers × {stage.in_flight:.3g}"
            strong = "strong" if stage.stage == step.stage else ""
            y = _bar(body, name, amounts(stage.parts), y, scale, strong)
        _axis(body, top, y, scale, budget)
        y += 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" viewBox="0 0 {WIDTH} {y}" '
        f'width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        f'<rect class="ground" width="{WIDTH}" height="{y}"/>' + "".join(body) + "</svg>"
    )


def _drawn_stages(step: StepMemory) -> list[StagePeak]:
    """Return the stages to draw: all, or an even selection with the limiting one."""
    if len(step.stages) == 1:
        return []
    every = -(-len(step.stages) // MOST_BARS)
    last = len(step.stages) - 1
    return [s for s in step.stages if s.stage % every == 0 or s.stage in (step.stage, last)]


def _text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    kind = f' class="{css}"' if css else ""
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{side}>{escape(words)}</text>'


def _heading(body: list[str], words: str, y: int) -> int:
    body.append(_text(LEFT, y, words, "small"))
    return y + 8


def _legend(body: list[str], shown: list[str], y: int) -> int:
    """Draw colours with their names in one line; return its height."""
    wide = [34 + round(6.5 * len(PART_WORDS[name])) for name in shown]
    x = max(0, min(LEFT, WIDTH - sum(wide)))
    for name, room in zip(shown, wide, strict=True):
        body.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS.get(name, OTHER)}"/>'
        )
        body.append(_text(x + 17, y, PART_WORDS[name], "small"))
        x += room
    return 30


def _bar(
    body: list[str], name: str, parts: Mapping[str, float], y: int, scale: float, css: str
) -> int:
    body.append(_text(LEFT - 10, y + 15, name, css, "end"))
    width, x = WIDTH - LEFT - RIGHT, float(LEFT)
    for part in ORDER:
        size = parts.get(part, 0.0)
        if size <= 0.0:
            continue
        wide = width * size / scale
        body.append(
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{BAR}" '
            f'fill="{COLOURS.get(part, OTHER)}">'
            f"<title>{escape(name)}: {PART_WORDS[part]} {format_bytes(size)}</title></rect>"
        )
        x += wide
    total = f"{format_gib(sum(parts.values()))} GiB"
    body.append(_text(WIDTH - RIGHT + 8, y + 15, total, css))
    return y + ROW


def _axis(body: list[str], top: int, bottom: int, scale: float, budget: float) -> None:
    """Draw the axis below the bars, and the line of the budget."""
    width = WIDTH - LEFT - RIGHT
    step, value = tick(scale), 0.0
    drawn = budget <= scale
    at = LEFT + width * (budget / scale if drawn else 1.0)
    while value <= scale:
        x = LEFT + width * value / scale
        body.insert(
            0, f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom - 6}"/>'
        )
        if abs(x - at) > (60 if drawn else 110):
            body.append(_text(x, bottom + 8, f"{value / GIB:g}", "small", "middle"))
        value += step
    if not drawn:
        beyond = f"budget {format_bytes(budget)} →"
        body.append(_text(WIDTH - RIGHT, bottom + 8, beyond, "small", "end"))
        return
    body.append(f'<line class="budget" x1="{at:.2f}" y1="{top}" x2="{at:.2f}" y2="{bottom - 6}"/>')
    body.append(_text(at, bottom + 8, f"budget {format_bytes(budget)}", "small", "middle"))
