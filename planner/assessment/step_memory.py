"""Memory during one step: moments of the limiting stage, peaks of all stages, largest terms."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from cost_models.activations.live import live_activations
from cost_models.activations.terms import LayerTerm, layer_terms
from cost_models.memory.ledger import MOMENTS, first
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import timelines
from cost_models.memory.terms import Term, memory_terms
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import stages_of_rank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.prediction import MEMORY_PARTS, MemoryPrediction
from cost_models.scenario import Scenario

# explanations for newcomers, in the order of a step
MOMENT_EXPLANATIONS: Final = {
    "loss_forward": "the forward pass of the last micro-batch in flight has ended: every layer's "
    "activations are kept, and the loss is computed from the logits",
    "loss_backward": "the backward pass begins: the logits and their gradient "
    "exist at once, and no layer has freed its activations yet",
    "head": "the gradient of the output projection is cast and reduced over the data ranks",
    "backward": "the backward pass of the last layer: its gathered weights, its gradient and the "
    "activations of all layers below it",
    "later_backward": "the backward pass of the next micro-batch: the gradients of the first one "
    "are kept, its activations are freed",
    "last_layer": "the end of the last backward pass: one layer remains, and the gradients of all "
    "others are kept",
    "embedding": "the gradient of the embedding, often the largest single tensor, is reduced",
    "optimizer": "the optimizer step: reduced gradients and optimizer states, no activations",
}
# the same moments on a stage without the head
EXPLANATIONS_WITHOUT_HEAD: Final = {
    "loss_forward": "the forward pass of the last micro-batch in flight has ended: the activations "
    "of all of them are kept",
    "loss_backward": "between forward and backward pass: the weights of the next layer are "
    "gathered, and no activations have been freed yet",
}
ONLY_WITH: Final = {"head": "head", "embedding": "embedding"}  # moment: the block it needs


class MomentMemory(Struct, frozen=True):
    """Memory of the limiting stage at one moment of a step."""

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


class StagePeak(Struct, frozen=True):
    """Peak memory of one pipeline rank, with its layers and micro-batches in flight."""

    stage: int
    layers: int
    in_flight: float  # micro-batches whose activations it keeps at its peak
    deferred: float  # micro-batches whose weight gradients are not computed yet at its peak
    end_blocks: tuple[str, ...]  # embedding, head
    moment: str
    parts: MemoryParts


class StepMemory(Struct, frozen=True):
    """Memory of one step, moment by moment (``fit --explain``)."""

    stage: int  # with the highest peak
    peak: int  # position of its peak in ``moments``
    moments: tuple[MomentMemory, ...]
    stages: tuple[StagePeak, ...]
    terms: tuple[Term, ...]
    layer: tuple[LayerTerm, ...]  # of the most frequent kind of layer of the limiting stage
    num_microbatches: int
    schedule: str  # explanation of the number of micro-batches in flight

    @property
    def limiting_stage(self) -> StagePeak:
        """The stage with the highest peak."""
        return self.stages[self.stage]

    @property
    def shown_moments(self) -> tuple[MomentMemory, ...]:
        """The moments that occur on the limiting stage, in the order of a step."""
        return tuple(
            moment
            for position, moment in enumerate(self.moments)
            if position == self.peak or self._has(moment.name)
        )

    def _has(self, name: str) -> bool:
        """Whether a moment occurs on the limiting stage."""
        if name == "later_backward":
            return self.num_microbatches > 1
        return name not in ONLY_WITH or ONLY_WITH[name] in self.limiting_stage.end_blocks

    @property
    def peak_words(self) -> str:
        """Explanation of the moment of the peak, for newcomers."""
        name = self.moments[self.peak].name
        words = {} if "head" in self.limiting_stage.end_blocks else EXPLANATIONS_WITHOUT_HEAD
        return words.get(name, MOMENT_EXPLANATIONS[name])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the timeline and the terms."""
        return {
            "timeline": [moment.to_dict(self.stage) for moment in self.moments],
            "terms": [_plain(term) for term in self.terms],
        }


def _plain(term: Term) -> dict[str, Any]:
    values = asdict(term)
    return {**values, "bytes": values.pop("size")}


def step_memory(scenario: Scenario, plan: Plan, memory: MemoryPrediction) -> StepMemory:
    """Return the memory of one step; ``memory``: the plan's memory prediction."""
    ranges = default_layer_ranges(scenario, plan)
    moments_by_stage = timelines(scenario, plan, ranges)
    table = PlanTable.from_plans([plan])
    limiting = memory.limiting_stage
    stages = []
    for index, line in enumerate(moments_by_stage):
        rank = pipeline_rank(scenario, plan, ranges, index)
        live = live_activations(RankView(scenario, table, rank))
        peak = max(range(len(line)), key=lambda position: float(line[position].peak))
        stages.append(
            StagePeak(
                stage=index,
                layers=sum(rank.kind_counts),
                in_flight=first(live.in_flight),
                deferred=first(live.pending),
                end_blocks=("embedding",) * rank.first + ("head",) * rank.last,
                moment=MOMENTS[peak],
                parts=line[peak],
            )
        )
    rank = pipeline_rank(scenario, plan, ranges, limiting)
    moment = MOMENTS.index(memory.moment)
    view = RankView(scenario, table, rank)
    kinds = view.model.kinds
    common = kinds[max(range(len(kinds)), key=lambda kind: rank.kind_counts[kind])]
    return StepMemory(
        stage=limiting,
        peak=moment,
        moments=tuple(
            MomentMemory(n, p) for n, p in zip(MOMENTS, moments_by_stage[limiting], strict=True)
        ),
        stages=tuple(stages),
        terms=tuple(memory_terms(scenario, plan, rank, moments_by_stage[limiting][moment], moment)),
        layer=tuple(layer_terms(view.own(common).scenario, plan, common)),
        num_microbatches=plan.num_microbatches,
        schedule=_schedule(plan, stages[limiting], len(stages_of_rank(plan, limiting))),
    )


def _schedule(plan: Plan, stage: StagePeak, virtual: int) -> str:
    """Explain the number of micro-batches in flight."""
    if plan.pipeline_parallel == 1:
        more = f" ({plan.num_microbatches} a step)" if plan.num_microbatches > 1 else ""
        return f"no pipeline: one micro-batch ends its backward pass before the next starts{more}"
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
    kept = f"{stage.in_flight:.3g} micro-batches of its layers"
    due = f"; weight gradients of {stage.deferred:.3g} more are due" if stage.deferred else ""
    each = f", {virtual} stages on each rank" if virtual > 1 else ""
    return f"{plan.pipeline_schedule}{each}: stage {stage.stage} keeps {kept} ({formula}){due}"
