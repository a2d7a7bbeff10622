"""An inverse question's answer as text: the answer, what verifies it, the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from planner.survey.compare_cases import Case
from planner.survey.text import why_nothing
from planner.text.paragraphs import labelled

LABELS: Final = {
    "fewest-gpus": "Fewest",
    "cheapest-cluster": "Cheapest",
    "largest-micro-batch": "Largest",
    "longest-sequence": "Longest",
    "largest-model": "Largest",
    "most-tokens": "Most",
}
MOST_SHOWN: Final = 3


def inverse_text(
    find: str, words: str, beyond: tuple[str, Sequence[Case]] | None, *, tried: bool, answer: str
) -> str:
    """The answer of ``plan --find``; ``beyond``: the next candidate, and why it has no plan."""
    lines = labelled(LABELS[find], words)
    if beyond is not None:
        lines += labelled("Checked", f"{beyond[0]}: {_why(beyond[1])}")
    elif tried:
        lines += labelled("Checked", "there is nothing beyond it to try")
    return "\n".join([*lines, "", answer])


def _why(cases: Sequence[Case]) -> str:
    """Say why a candidate has no plan, cluster by cluster."""
    reasons = [f"{case.name} is tight: it may run out of memory" for case in cases if case.found]
    reasons += [f"{case.name} {why_nothing(case)}" for case in cases if not case.found]
    more = f", and {len(reasons) - MOST_SHOWN} more" if len(reasons) > MOST_SHOWN else ""
    return "; ".join(reasons[:MOST_SHOWN]) + more
