"""Memory of one step as a self-contained HTML page: verdict, drawing, terms."""

from __future__ import annotations

from cost_models.memory.parts import PART_WORDS
from cost_models.units import format_bytes, format_gib
from planner.answer.memory_explanation import moment_name
from planner.answer.memory_svg import memory_svg
from planner.assessment.assess import Assessment
from planner.assessment.step_memory import StepMemory
from planner.assessment.verdict import WORDS
from planner.text.html_page import Html, element, escape, page, scrolling, table


def drawing_title(name: str, assessment: Assessment) -> str:
    """Return the title of the drawing: name and verdict."""
    return (
        f"{name}: {WORDS[assessment.verdict]}, peak {format_gib(assessment.memory.peak_bytes)} of "
        f"{format_bytes(assessment.budget.size)}"
    )


def fragment(step: StepMemory, assessment: Assessment, title: str) -> str:
    """Return the drawing with an explanation of the peak, for a page or a notebook."""
    when = moment_name(step, assessment.memory.moment)
    return (
        scrolling(Html(memory_svg(step, assessment, title)))
        + f"<p><b>Peak: {escape(when)}</b>: {escape(step.peak_words)}. "
        + f"{escape(step.schedule[:1].upper() + step.schedule[1:])}.</p>"
    )


def memory_html(step: StepMemory, assessment: Assessment, title: str, answer: str) -> str:
    """Return the whole page; ``answer``: the text of the answer."""
    return page(
        title,
        Html(fragment(step, assessment, title)),
        element("h2", "The largest terms at the peak"),
        terms_table(step),
        element("h2", "The answer"),
        element("pre", answer),
    )


def terms_table(step: StepMemory) -> Html:
    """Return the largest terms at the peak with their formulas."""
    rows = [
        (
            term.size_words,
            f"{PART_WORDS[term.part]}: {term.name}",
            f"{term.formula}{' = ' if term.numbers else ''}{term.numbers}",
        )
        for term in step.terms
    ]
    return table(rows, css="")
