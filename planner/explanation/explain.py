"""``explain``: what binds in a plan, why not another one, and what would change the choice."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.legality.rules import require_legal
from cost_models.plan.plan import Plan, split_layers
from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.prediction import scenario_of
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from planner.advice.ways_out import WayOut, ways_out
from planner.answer.answers import PlanAnswer, header
from planner.assessment.assess import Assessment, amounts, assess
from planner.explanation.glossary import changes, lesson, story
from planner.explanation.sensitivity import (
    BatchChoice,
    Sensitivity,
    other_batches,
    priced_choices,
    sensitivities,
)
from planner.explanation.text import explanation_text
from planner.explanation.why_not import SAME, WhyNot, asked_parts
from planner.explanation.why_not import why_not as against
from planner.search.search import search

Asked = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """One plan explained; ``best``: what the search finds, None where nothing fits."""

    scenario: Scenario
    plan: Plan
    layer_ranges: tuple[tuple[int, int], ...]
    assessment: Assessment
    story: tuple[str, ...]
    best: Plan | None
    best_assessment: Assessment | None
    varied: Plan | None  # the best one in closed form, whose sensitivity is told
    sensitivity: tuple[Sensitivity, ...]
    batches: tuple[BatchChoice, ...]
    why_not: tuple[WhyNot, ...]
    ways_out: tuple[WayOut, ...]

    @property
    def verdict(self) -> str:
        """fits, tight or does_not_fit."""
        return self.assessment.verdict

    @property
    def slower_than_best(self) -> float | None:
        """Relative to the best plan's step; below zero: better than all that the search tries."""
        if self.best_assessment is None:
            return None
        return self.assessment.time.step_seconds / self.best_assessment.time.step_seconds - 1.0

    @property
    def is_best(self) -> bool:
        """Whether no plan that the search tries is faster."""
        slower = self.slower_than_best
        return slower is not None and slower <= SAME

    def binds(self) -> dict[str, Any]:
        """What takes the time and the memory, largest first, each with what it is."""
        time, memory = self.assessment.time, self.assessment.memory
        seconds, sizes = amounts(time.parts), amounts(memory.parts)
        return {
            "time": [
                {
                    "part": name,
                    "seconds": seconds[name],
                    "share": seconds[name] / time.step_seconds,
                    "words": lesson(self.scenario, self.plan, name),
                }
                for name in sorted(seconds, key=lambda part: -seconds[part])
                if seconds[name] > 0.0
            ],
            "memory": [
                {
                    "part": name,
                    "bytes": sizes[name],
                    "share": sizes[name] / memory.peak_bytes,
                }
                for name in sorted(sizes, key=lambda part: -sizes[part])
                if sizes[name] > 0.0
            ],
            "stage": memory.limiting_stage,
            "moment": memory.moment,
            "margin_bytes": self.assessment.margin_bytes,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        best, assessment = None, self.assessment.to_dict()
        if self.best is not None and self.best_assessment is not None:
            best = {
                "plan": self.best.to_dict(),
                "step_seconds": self.best_assessment.time.step_seconds,
                "peak_bytes": self.best_assessment.memory.peak_bytes,
                "verdict": self.best_assessment.verdict,
                "this_is_slower_by": self.slower_than_best,
                "changes": changes(self.plan, self.best),
            }
        return {
            **header(self.scenario),
            "verdict": self.verdict,
            "plan": assessment["plan"],
            "layer_ranges": [list(pair) for pair in self.layer_ranges],
            "memory": assessment["memory"],
            "time": assessment["time"],
            "story": list(self.story),
            "binds": self.binds(),
            "is_best": self.is_best,
            "best": best,
            "sensitivity": [found.to_dict() for found in self.sensitivity],
            "batches": [batch.to_dict() for batch in self.batches],
            "why_not": [reason.to_dict() for reason in self.why_not],
            "ways_out": [way.to_dict() for way in self.ways_out],
        }

    def __str__(self) -> str:
        return explanation_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    plan: str | Path | PlanFile | PlanAnswer,
    *,
    why_not: Asked | Sequence[Asked] = (),
    sensitivity: bool = True,
) -> Explanation:
    """Explain a plan.json, or the best plan of an answer.

    ``why_not``: other plans, each as parts of it (``"tp=16,pp=4"`` or a mapping); what is left open
    is chosen as well as can be. ``sensitivity``: search again with every figure of the machine
    scaled, and with other batches.
    """
    file = _file(plan)
    scenario = scenario_of(file)
    require_legal(scenario, file.plan, plan if isinstance(plan, (str, Path)) else "")
    even = file.layer_ranges == split_layers(scenario.model.num_layers, file.plan.num_stages)
    assessment = assess(scenario, file.plan, None if even else file.layer_ranges)
    asked = (why_not,) if isinstance(why_not, (str, Mapping)) else tuple(why_not)
    for one in asked:
        asked_parts(one)  # what is mistyped is said before anything is searched
    found = search(scenario, top=1)
    best = found.plans[0] if found.plans else None
    choices = priced_choices(scenario, best) if sensitivity and best is not None else None
    varied = None if choices is None else choices.table.plan(choices.chosen)
    return Explanation(
        scenario=scenario,
        plan=file.plan,
        layer_ranges=file.layer_ranges,
        assessment=assessment,
        story=story(scenario, file.plan),
        best=best,
        best_assessment=None if best is None else assess(scenario, best),
        varied=varied,
        sensitivity=() if choices is None else sensitivities(choices),
        batches=() if varied is None else other_batches(scenario, varied),
        why_not=tuple(against(scenario, file.plan, assessment, one) for one in asked),
        ways_out=(() if assessment.fits else ways_out(scenario, file.plan)),
    )


def _file(plan: str | Path | PlanFile | PlanAnswer) -> PlanFile:
    if isinstance(plan, PlanFile):
        return plan
    if isinstance(plan, PlanAnswer):
        return plan.plan_file()
    if isinstance(plan, (str, Path)):
        return read_plan_file(Path(plan))
    raise InputError(f"plan = {plan!r} (must be a plan.json or the answer of planner.plan)")
