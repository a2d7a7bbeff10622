"""One line of ``compare-techniques``: costs of a technique, and what shardplan does with it."""

from __future__ import annotations

from typing import Final, Literal

from cost_models.plan.plan import Plan
from hardware_profiles.record import Record
from planner.assessment.verdict import VERDICTS, Verdict

Level = Literal["runs", "plans", "estimates", "compares"]
LEVELS: Final[dict[Level, str]] = {
    "runs": "shardplan plans and runs it",
    "plans": "it plans, another trainer runs",
    "estimates": "it prices, with --fix",
    "compares": "formulas alone",
}


class TechniqueLine(Record, frozen=True):
    """Costs of the best layout of one technique; ``why_not``: the reason where it has none."""

    name: str
    title: str
    level: Level
    layout: str = ""  # in words
    plan: Plan | None = None  # None: not a plan of shardplan
    verdict: Verdict | None = None
    peak_bytes: float | None = None  # of the fullest accelerator
    received_bytes: float | None = None  # by an accelerator, in a step
    exposed_seconds: float | None = None  # that links add to a step
    step_seconds: float | None = None
    exports: tuple[str, ...] = ()  # trainers whose files can state the layout
    note: str = ""
    why_not: str | None = None

    @property
    def order(self) -> tuple[int, float]:
        """Fitting lines by step, then the others by memory."""
        if self.verdict is None:
            return len(VERDICTS), 0.0
        amount = self.step_seconds if self.verdict == "fits" else self.peak_bytes
        return VERDICTS.index(self.verdict), float("inf") if amount is None else amount
