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
from cost_models.pricing.prediction import MEMORY_PARTS, TIME_PARTS, scenario_of
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from planner.advice.ways_out import ways_out
from planner.answer.answers import PlanAnswer, header
from planner.assessment.plan_document import plan_document
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
    document: Mapping[str, Any]
    story: tuple[str, ...]
    best: Plan | None
    best_document: Mapping[str, Any] | None
    varied: Plan | None  # the best one in closed form, whose sensitivity is told
    sensitivity: tuple[Sensitivity, ...]
    batches: tuple[BatchChoice, ...]
    why_not: tuple[WhyNot, ...]
    ways_out: tuple[Mapping[str, Any], ...]

    @property
    def verdict(self) -> str:
        """fits, tight or does_not_fit."""
        return str(self.document["memory"]["verdict"])

    @property
    def slower_than_best(self) -> float | None:
        """Relative to the best plan's step; below zero: better than all that the search tries."""
        if self.best_document is None:
            return None
        mine, best = (
            document["time"]["step_seconds"] for document in (self.document, self.best_document)
        )
        return float(mine / best - 1.0)

    @property
    def is_best(self) -> bool:
        """Whether no plan that the search tries is faster."""
        slower = self.slower_than_best
        return slower is not None and slower <= SAME

    def binds(self) -> dict[str, Any]:
        """What takes the time and the memory, largest first, each with what it is."""
        time, memory = self.document["time"], self.document["memory"]
        step, peak = time["step_seconds"], memory["peak_bytes"]
        return {
            "time": [
                {
                    "part": name,
                    "seconds": time["parts"][name],
                    "share": time["parts"][name] / step,
                    "words": lesson(self.scenario, self.plan, name),
                }
                for name in sorted(TIME_PARTS, key=lambda part: -time["parts"][part])
                if time["parts"][name] > 0.0
            ],
            "memory": [
                {
                    "part": name,
                    "bytes": memory["parts"][name],
                    "share": memory["parts"][name] / peak,
                }
                for name in sorted(MEMORY_PARTS, key=lambda part: -memory["parts"][part])
                if memory["parts"][name] > 0.0
            ],
            "stage": memory["limiting_stage"],
            "moment": memory["moment"],
            "margin_bytes": memory["margin_bytes"],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        best = None
        if self.best is not None and self.best_document is not None:
            best = {
                "plan": self.best.to_dict(),
                "step_seconds": self.best_document["time"]["step_seconds"],
                "peak_bytes": self.best_document["memory"]["peak_bytes"],
                "verdict": self.best_document["memory"]["verdict"],
                "this_is_slower_by": self.slower_than_best,
                "changes": changes(self.plan, self.best),
            }
        return {
            **header(self.scenario),
            "verdict": self.verdict,
            "plan": self.document["plan"],
            "layer_ranges": [list(pair) for pair in self.layer_ranges],
            "memory": self.document["memory"],
            "time": self.document["time"],
            "story": list(self.story),
            "binds": self.binds(),
            "is_best": self.is_best,
            "best": best,
            "sensitivity": [found.to_dict() for found in self.sensitivity],
            "batches": [batch.to_dict() for batch in self.batches],
            "why_not": [reason.to_dict() for reason in self.why_not],
            "ways_out": [dict(way) for way in self.ways_out],
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
    document = plan_document(scenario, file.plan, None if even else file.layer_ranges)
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
        document=document,
        story=story(scenario, file.plan),
        best=best,
        best_document=None if best is None else plan_document(scenario, best),
        varied=varied,
        sensitivity=() if choices is None else sensitivities(choices),
        batches=() if varied is None else other_batches(scenario, varied),
        why_not=tuple(against(scenario, file.plan, document, one) for one in asked),
        ways_out=(() if document["memory"]["verdict"] == "fits" else ways_out(scenario, file.plan)),
    )


def _file(plan: str | Path | PlanFile | PlanAnswer) -> PlanFile:
    if isinstance(plan, PlanFile):
        return plan
    if isinstance(plan, PlanAnswer):
        return plan.plan_file()
    if isinstance(plan, (str, Path)):
        return read_plan_file(Path(plan))
    raise InputError(f"plan = {plan!r} (must be a plan.json or the answer of planner.plan)")
