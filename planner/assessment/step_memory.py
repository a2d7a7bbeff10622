"""The story of one step's memory: moments of the fullest stage, all stages, what the terms are."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from cost_models.activations.live import held_activations
from cost_models.activations.terms import LayerTerm, layer_terms
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import MOMENTS
from cost_models.memory.terms import Term, first, memory_terms
from cost_models.memory.timeline import timelines
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import stages_of_rank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.prediction import MEMORY_PARTS, MemoryPrediction
from cost_models.scenario import Scenario

# what a newcomer reads; in the order of a step
MOMENT_STORY: Final = {
    "loss_forward": "the forward pass of the last micro-batch in flight has ended: every layer's "
    "activations are kept, and the loss is computed from the logits",
    "loss_backward": "the backward pass begins: the logits and their gradient "
    "are there at once, and nothing of the layers has been freed yet",
    "head": "the gradient of the output projection is cast and shared out over the data ranks",
    "backward": "the first layer is walked backward: its gathered weights, its gradient and all "
    "that is still kept for the layers below it",
    "later_backward": "the backward pass of the next micro-batch: gradients of the first one have "
    "stayed, its activations are gone",
    "last_layer": "the end of the last backward pass: one layer is left, and the gradients of all "
    "others are there",
    "embedding": "the gradient of the embedding, often the largest single tensor, is shared out",
    "optimizer": "the optimizer step: reduced gradients and states, no activations",
}
# the same moments on a stage without the head
WITHOUT_HEAD: Final = {
    "loss_forward": "the forward pass of the last micro-batch in flight has ended: the activations "
    "of all of them are kept",
    "loss_backward": "between forward and backward pass: the layer that is next has been gathered, "
    "and nothing has been freed yet",
}
ONLY_WITH: Final = {"head": "head", "embedding": "embedding"}  # moments that a block brings


@dataclass(frozen=True, slots=True)
class MomentMemory:
    """One moment of the fullest stage."""

    name: str
    parts: MemoryParts

    def to_dict(self, stage: int) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "moment": self.name,
            "stage": stage,
            "peak_bytes": float(self.parts.peak),
            "parts": {name: float(getattr(self.parts, name)) for name in MEMORY_PARTS},
        }


@dataclass(frozen=True, slots=True)
class StagePeak:
    """One pipeline rank: what it holds, and its own peak."""

    stage: int
    layers: int
    in_flight: float  # micro-batches whose activations it keeps when it is fullest
    due: float  # micro-batches whose weight gradients are still to come then
    holds: tuple[str, ...]  # embedding, head
    moment: str
    parts: MemoryParts


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What ``fit --explain`` tells about the memory of one step."""

    stage: int  # the fullest one
    peak: int  # position of its peak in ``moments``
    moments: tuple[MomentMemory, ...]
    stages: tuple[StagePeak, ...]
    terms: tuple[Term, ...]
    layer: tuple[LayerTerm, ...]  # of the commonest kind of layer of the fullest stage
    num_microbatches: int
    schedule: str  # why so many micro-batches are in flight

    @property
    def fullest(self) -> StagePeak:
        """The stage that is told about."""
        return self.stages[self.stage]

    @property
    def shown(self) -> tuple[MomentMemory, ...]:
        """The moments that the stage has, in the order of a step."""
        return tuple(
            moment
            for position, moment in enumerate(self.moments)
            if position == self.peak or self._has(moment.name)
        )

    def _has(self, name: str) -> bool:
        """Whether the fullest stage goes through a moment."""
        if name == "later_backward":
            return self.num_microbatches > 1
        return name not in ONLY_WITH or ONLY_WITH[name] in self.fullest.holds

    @property
    def peak_words(self) -> str:
        """What happens at the peak, for a newcomer."""
        name = self.moments[self.peak].name
        words = {} if "head" in self.fullest.holds else WITHOUT_HEAD
        return words.get(name, MOMENT_STORY[name])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the timeline and the terms."""
        return {
            "timeline": [moment.to_dict(self.stage) for moment in self.moments],
            "terms": [_plain(term) for term in self.terms],
        }


def _plain(term: Term) -> dict[str, Any]:
    values = {f.name: getattr(term, f.name) for f in fields(term)}
    return {**values, "bytes": values.pop("size")}


def step_memory(scenario: Scenario, plan: Plan, memory: MemoryPrediction) -> StepMemory:
    """Tell the story of a plan that was priced; ``memory`` is its prediction."""
    ranges = default_layer_ranges(scenario, plan)
    lines = timelines(scenario, plan, ranges)
    table = PlanTable.from_plans([plan])
    fullest = memory.limiting_stage
    stages = []
    for index, line in enumerate(lines):
        rank = pipeline_rank(scenario, plan, ranges, index)
        held = held_activations(RankView(scenario, table, rank))
        peak = max(range(len(line)), key=lambda position: float(line[position].peak))
        stages.append(
            StagePeak(
                stage=index,
                layers=sum(rank.kind_counts),
                in_flight=first(held.in_flight),
                due=first(held.due),
                holds=("embedding",) * rank.first + ("head",) * rank.last,
                moment=MOMENTS[peak],
                parts=line[peak],
            )
        )
    rank = pipeline_rank(scenario, plan, ranges, fullest)
    moment = MOMENTS.index(memory.moment)
    kinds = scenario.model.kinds
    common = max(range(len(kinds)), key=lambda kind: rank.kind_counts[kind])
    return StepMemory(
        stage=fullest,
        peak=moment,
        moments=tuple(MomentMemory(n, p) for n, p in zip(MOMENTS, lines[fullest], strict=True)),
        stages=tuple(stages),
        terms=tuple(memory_terms(scenario, plan, rank, lines[fullest][moment], moment)),
        layer=tuple(layer_terms(scenario, plan, kinds[common])),
        num_microbatches=plan.num_microbatches,
        schedule=_schedule(plan, stages[fullest], len(stages_of_rank(plan, fullest))),
    )


def _schedule(plan: Plan, stage: StagePeak, virtual: int) -> str:
    """Say where the number of micro-batches in flight comes from."""
    if plan.pipeline_parallel == 1:
        more = f" ({plan.num_microbatches} a step)" if plan.num_microbatches > 1 else ""
        return f"no pipeline: one micro-batch is walked back before the next one starts{more}"
    count, ranks = plan.num_microbatches, plan.pipeline_parallel
    formula = {
        "gpipe": f"all m = {count}",
        "1f1b": f"min(m, p − r) = min({count}, {ranks} − {stage.stage})",
        "interleaved_1f1b": "warm-up + 1, in stages",
        "zero_bubble": f"p − r = {ranks} − {stage.stage}, and r = {stage.stage} due",
        "interleaved_zero_bubble": "warm-up + 1, in stages",
        "zbv": f"2 p = {2 * ranks} stages of half its layers",
        "dualpipev": f"2 p + 1 = {2 * ranks + 1} stages of half its layers",
    }[plan.pipeline_schedule]
    held = f"{stage.in_flight:.3g} micro-batches of its layers"
    due = f"; weight gradients of {stage.due:.3g} more are due" if stage.due else ""
    each = f", {virtual} stages on each rank" if virtual > 1 else ""
    return f"{plan.pipeline_schedule}{each}: stage {stage.stage} keeps {held} ({formula}){due}"
