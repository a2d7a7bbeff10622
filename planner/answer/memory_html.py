"""Memory of one step as a self-contained HTML page: verdict, drawing, terms."""

from __future__ import annotations

from html import escape
from typing import Final

from cost_models.memory.parts import PART_WORDS
from cost_models.units import format_bytes, format_gib
from planner.answer.memory_explanation import moment_name
from planner.answer.memory_svg import memory_svg
from planner.assessment.assess import Assessment
from planner.assessment.step_memory import StepMemory
from planner.assessment.verdict import WORDS

STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:940px;"
    "margin:2em auto;padding:0 1em}h1{font-size:1.3em}h2{font-size:1.05em;margin-top:2em}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse}"
    "td,th{padding:.25em .8em .25em 0;text-align:left;vertical-align:top}"
    "td:first-child{text-align:right;white-space:nowrap}tr{border-top:1px solid #eee}"
    "pre{white-space:pre-wrap;background:#f7f7f7;padding:1em;font-size:13px}"
)


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
        memory_svg(step, assessment, title)
        + f"<p><b>Peak: {escape(when)}</b>: {escape(step.peak_words)}. "
        + f"{escape(step.schedule)}.</p>"
    )


def memory_html(step: StepMemory, assessment: Assessment, title: str, answer: str) -> str:
    """Return the whole page; ``answer``: the text of the answer."""
    rows = "".join(
        f"<tr><td>{format_bytes(term.size)}</td>"
        f"<td>{PART_WORDS[term.part]}: {escape(term.name)}</td>"
        f"<td>{escape(term.formula)}{' = ' if term.numbers else ''}{escape(term.numbers)}</td></tr>"
        for term in step.terms
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{fragment(step, assessment, title)}"
        f"<h2>The largest terms at the peak</h2><table>{rows}</table>"
        f"<h2>The answer</h2><pre>{escape(answer)}</pre></body></html>\n"
    )
