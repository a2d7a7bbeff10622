"""Text of ``fit --explain``: the memory of one step, moment by moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cost_models.memory.parts import PART_WORDS, MemoryParts
from cost_models.pricing.prediction import MEMORY_PARTS
from cost_models.units import format_bytes, format_gib
from planner.assessment.assess import Assessment, amounts
from planner.assessment.step_memory import StagePeak, StepMemory
from planner.text.bars import axis, legend, shown_scale, stacked_bar
from planner.text.paragraphs import hanging, labelled, plain, width

NAME: Final = 26
CELL: Final = 6  # of a table of GiB; a space between two cells
AXIS: Final = 7  # columns of the last number of the axis with its unit
SHORT: Final = {
    "weights": "weight",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "logits": "logits",
    "buffers": "temp.",
    "runtime": "CUDA",
}
SHORT_MOMENT: Final = {
    "loss_forward": "the loss, forward",
    "loss_backward": "the loss, backward",
    "head": "the head's gradient",
    "backward": "backward pass begins",
    "later_backward": "second backward pass",
    "last_layer": "backward pass ends",
    "embedding": "the embedding's gradient",
    "optimizer": "optimizer step",
}
# on a stage without the head
SHORT_WITHOUT_HEAD: Final = {
    "loss_forward": "forward pass ends",
    "loss_backward": "before the backward pass",
}
MOST_STAGES: Final = 16  # with more stages, only those that differ from the previous one


def moment_name(step: StepMemory, name: str) -> str:
    """Return a short name of a moment of the limiting stage."""
    words = {} if "head" in step.limiting_stage.end_blocks else SHORT_WITHOUT_HEAD
    return words.get(name, SHORT_MOMENT[name])


def memory_explanation_text(step: StepMemory, assessment: Assessment) -> str:
    """Return the explanation."""
    lines = [*_timeline(step, assessment.budget.size), ""]
    lines += labelled("Peak", f"{moment_name(step, assessment.memory.moment)}: {step.peak_words}")
    lines += labelled("In flight", step.schedule)
    lines += ["", *_terms(step)]
    lines += _layer(step)
    lines += ["", *_moments_table(step)]
    if len(step.stages) > 1:
        lines += ["", *_stages_table(step)]
    return "\n".join(lines)


def _timeline(step: StepMemory, budget: float) -> list[str]:
    whole = len(step.stages) == 1
    where = "" if whole else f", stage {step.stage} of {len(step.stages)} (the fullest)"
    largest = max(float(moment.parts.peak) for moment in step.moments)
    scale = shown_scale(largest, budget)
    line = "the line is" if budget <= scale else "beyond the right edge lies"
    union = {
        name: max(amounts(moment.parts)[name] for moment in step.moments) for name in MEMORY_PARTS
    }
    lines = [*plain(f"One step's memory{where}; {line} the budget, {format_bytes(budget)}"), ""]
    room = width() - NAME - CELL - AXIS - 3
    lines.append(f"{'':<{NAME}} {'GiB':>{CELL}}  {axis(scale, room)}")
    for moment in step.shown_moments:
        mark = "▶" if moment is step.moments[step.peak] else " "
        bar = stacked_bar(amounts(moment.parts), scale, room, budget)
        words = f"{mark} {moment_name(step, moment.name)}"
        lines.append(f"{words:<{NAME}} {format_gib(float(moment.parts.peak)):>{CELL}}  {bar}")
    return [*lines, "", *plain(legend(union), "  ")]


def _terms(step: StepMemory) -> list[str]:
    lines = ["The largest terms at the peak"]
    for term in step.terms:
        lines += hanging(f"  {term.size_words:>10}  ", f"{PART_WORDS[term.part]}: {term.name}")
        numbers = f" = {term.numbers}" if term.numbers else ""
        lines += labelled("", f"  {term.formula}{numbers}")
    return lines


def _layer(step: StepMemory) -> list[str]:
    """Return the saved tensors of a layer."""
    if not any(term.part == "activations" for term in step.terms):
        return []
    saved = sum(each.size for each in step.layer)
    shown = "; ".join(f"{e.name} {e.formula} = {e.size:,.0f}" for e in step.layer)
    words = f"saves {saved:,.0f} bytes a token where nothing is recomputed: {shown}"
    return ["", *labelled("A layer", words)]


def _moments_table(step: StepMemory) -> list[str]:
    rows = [
        (
            moment_name(step, moment.name),
            moment.parts,
            "▶" if moment is step.moments[step.peak] else " ",
        )
        for moment in step.shown_moments
    ]
    shown = _shown([parts for _, parts, _ in rows])
    lines = [_row(f"{mark} {name}", parts, shown) for name, parts, mark in rows]
    return [_heads("GiB at each moment", shown), *lines]


def _stages_table(step: StepMemory) -> list[str]:
    shown = _shown([stage.parts for stage in step.stages])
    lines = [_heads("GiB of each stage's peak", shown)]
    before: StagePeak | None = None
    for stage in step.stages:
        same = before is not None and (stage.parts, stage.layers) == (before.parts, before.layers)
        if len(step.stages) > MOST_STAGES and same and stage.stage != step.stage:
            continue
        before = stage
        mark = "▶" if stage.stage == step.stage else " "
        held = f"{mark} {stage.stage}: {stage.layers} layers × {stage.in_flight:.3g}"
        holds = ("emb." if name == "embedding" else name for name in stage.end_blocks)
        lines.append(_row(" + ".join((held, *holds)), stage.parts, shown))
    if len(lines) - 1 < len(step.stages):
        lines.append("  stages that are not listed equal the one above them")
    lines.append("  (layers × micro-batches whose activations the stage keeps)")
    return lines


def _shown(parts: Sequence[MemoryParts]) -> list[str]:
    """Return the parts that a table has room for, the largest ones, in their usual order."""
    largest = {name: max(amounts(one)[name] for one in parts) for name in MEMORY_PARTS}
    room = max(1, (width() - NAME) // (CELL + 1) - 1)
    kept = sorted(largest, key=lambda name: -largest[name])[:room]
    return [name for name in MEMORY_PARTS if name in kept and largest[name] > 0.0]


def _heads(first: str, shown: Sequence[str]) -> str:
    cells = [*(SHORT[name] for name in shown), "peak"]
    return f"{first:<{NAME}.{NAME}}" + "".join(f" {cell:>{CELL}}" for cell in cells)


def _row(first: str, parts: MemoryParts, shown: Sequence[str]) -> str:
    values = [*(amounts(parts)[name] for name in shown), float(parts.peak)]
    cells = "".join(f" {format_gib(value) if value else '–':>{CELL}}" for value in values)
    return f"{first:<{NAME}.{NAME}}{cells}"
