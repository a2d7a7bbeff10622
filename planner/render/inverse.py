"""An inverse question's answer as text: the answer, what verifies it, the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.render.paragraphs import labelled
from planner.render.survey import why_nothing

if TYPE_CHECKING:
    from planner.inverse import InverseAnswer, Tried

QUESTIONS = {
    "fewest-gpus": "Fewest",
    "cheapest-cluster": "Cheapest",
    "largest-micro-batch": "Largest",
    "longest-sequence": "Longest",
    "largest-model": "Largest",
    "most-tokens": "Most",
}
MOST_SHOWN = 3


def inverse_text(answer: InverseAnswer) -> str:
    """The answer of ``plan --find``."""
    lines = labelled(QUESTIONS[answer.find], answer.words)
    if answer.beyond is not None:
        lines += labelled("Checked", f"{answer.beyond.words}: {_why(answer.beyond)}")
    elif answer.tried:
        lines += labelled("Checked", "there is nothing beyond it to try")
    return "\n".join([*lines, "", str(answer.answer)])


def _why(tried: Tried) -> str:
    """Say why a candidate has no plan, cluster by cluster."""
    tight = [case.name for case in tried.cases if case.found]
    reasons = [f"{name} is tight: it may run out of memory" for name in tight]
    reasons += [f"{case.name} {why_nothing(case)}" for case in tried.cases if not case.found]
    more = f", and {len(reasons) - MOST_SHOWN} more" if len(reasons) > MOST_SHOWN else ""
    return "; ".join(reasons[:MOST_SHOWN]) + more
