"""One simulated step of a plan: the passes of every pipeline rank, and its memory over time.

The passes are those of the step's prediction: the pipeline's simulation, then the data-parallel
seconds that no pass hides, then the update, which ends with the step on every rank. Where processes
share the cores of a CPU, passes are stretched to the predicted step.

The ledger has exact bytes at eight moments (``cost_models.memory.ledger``). The largest of them
fall into the first pass with most micro-batches in flight; in between, activations are taken in
proportion to the micro-batches in flight.

Units: seconds from the begin of the step, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import astuple
from msgspec.structs import replace as with_parts

from cost_models.activations.live import layer_bytes
from cost_models.communication.host_link import host_link
from cost_models.memory.ledger import MOMENTS, first
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import timelines
from cost_models.partition.plan_stages import pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import Action, actions, repeats
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import seconds_by_pipeline
from cost_models.pricing.simulated_steps import PASSES, stage_seconds
from cost_models.scenario import Scenario
from cost_models.step_time.host_waits import fetched_bytes
from cost_models.step_time.overlap import Hiding, exposed_data_seconds
from cost_models.step_time.parts import RankSeconds
from cost_models.step_time.pipeline_bound import owners
from cost_models.step_time.pipeline_simulation import ends_of, makespan
from planner.assessment.assess import Assessment

LATE: Final = 0.1  # of the last backward pass, between its last moments
FEWEST: Final = 3  # micro-batches that a shortened step shows without a pipeline
BACKWARD: Final = ("backward", "backward_input")


class PipelinePass(NamedTuple):
    """One pass of a rank."""

    action: Action
    start: float
    end: float


class HostCopy(NamedTuple):
    """A copy between device and host during each pass of a kind, "forward" or "backward"."""

    name: str
    during: str
    seconds: float


class MemorySample(NamedTuple):
    """Memory of a rank at one time; ``moment``: one of the ledger's, "" between them."""

    seconds: float
    moment: str
    parts: MemoryParts


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """A step of one pipeline rank."""

    seconds: RankSeconds
    passes: tuple[PipelinePass, ...]
    exposed: float  # data-parallel seconds after the last pass
    hidden: float  # data-parallel seconds during passes
    stretch: float  # of passes, where processes share the cores of a CPU; else 1
    copies: tuple[HostCopy, ...]
    memory: tuple[MemorySample, ...]

    @property
    def optimizer(self) -> float:
        """Seconds of the update."""
        return float(first(self.seconds.optimizer))

    @property
    def passes_end(self) -> float:
        """End of the last pass."""
        return self.passes[-1].end

    @property
    def peak_bytes(self) -> float:
        """Largest memory of the step."""
        return max(float(sample.parts.peak) for sample in self.memory)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step of every pipeline rank; ``plan`` may have fewer micro-batches than the real one."""

    plan: Plan
    ranks: tuple[RankTimeline, ...]
    seconds: float


def shortened(plan: Plan) -> Plan:
    """Return the plan with the fewest micro-batches that show its schedule, for a drawing.

    >>> shortened(Plan(pipeline_parallel=4, num_microbatches=64)).num_microbatches
    7
    """
    p, m = plan.pipeline_parallel, plan.num_microbatches
    body = repeats(plan)
    if body is not None and p > 1:
        few = max(1, p // body.microbatches)
        return replace(plan, num_microbatches=m - max(0, body.times - few) * body.microbatches)
    return replace(plan, num_microbatches=min(m, FEWEST if p == 1 else 2 * p))


def simulated_step(
    scenario: Scenario,
    plan: Plan,
    layer_ranges: Sequence[tuple[int, int]],
    assessment: Assessment,
    *,
    drawn: Plan | None = None,
) -> SimulatedStep:
    """Return the step of a legal plan; ``drawn``: the same with fewer micro-batches."""
    table = PlanTable.from_plans([plan])
    ((_, positions, by_kind),) = seconds_by_pipeline(scenario, table, layer_ranges)
    found = [by_kind[index] for index in owners(positions).tolist()]
    found = [type(one)(*map(first, astuple(one))) for one in found]
    stages = stage_seconds(
        plan, np.array([[getattr(one, name) for one in found] for name in PASSES])
    )
    parts = assessment.time.parts
    once = float(parts.data_communication) + float(parts.optimizer)
    stretch = (assessment.time.step_seconds - once) / makespan(plan, *stages)
    ends = ends_of(drawn or plan, stages)
    step = assessment.time.step_seconds
    if drawn is not None:
        step = stretch * max(order[-1] for order in ends) + once
    hiding = Hiding.of(scenario.software)
    lines = timelines(scenario, plan, layer_ranges)
    ranks = []
    for rank, seconds in enumerate(found):
        passes: list[PipelinePass] = []
        for action, end in zip(actions(drawn or plan, rank), ends[rank], strict=True):
            start = stretch * (end - stages.by_kind[action.kind][action.stage])
            start = max(start, passes[-1].end if passes else 0.0)  # rounding
            passes.append(PipelinePass(action, start, stretch * end))
        exposed = first(exposed_data_seconds(seconds, table, hiding, on_gpu=scenario.on_gpu))
        sent = float(seconds.data_communication) + float(seconds.replica_communication)
        view = RankView(scenario, table, pipeline_rank(scenario, plan, layer_ranges, rank))
        update = step - float(seconds.optimizer)
        ranks.append(
            RankTimeline(
                seconds=seconds,
                passes=tuple(passes),
                exposed=exposed,
                hidden=max(0.0, sent - exposed),
                stretch=stretch,
                copies=tuple(_copies(view)),
                memory=tuple(_memory(lines[rank], passes, update, step)),
            )
        )
    return SimulatedStep(drawn or plan, tuple(ranks), step)


def _copies(view: RankView) -> Iterator[HostCopy]:
    """Yield the copies between device and host during passes of one micro-batch."""
    table = view.table
    if not view.on_gpu:
        return
    link = host_link(view.cluster, table, view.software)
    if table.offloads_weights[0]:
        lasts = first(fetched_bytes(view)) / link
        yield HostCopy("weights from the host", "forward", lasts)
        yield HostCopy("weights from the host", "backward", lasts)
    if table.offloads_activations[0]:
        lasts = first(layer_bytes(view)) / link
        yield HostCopy("activations to the host", "forward", lasts)
        yield HostCopy("activations from the host", "backward", lasts)


def _memory(
    line: Sequence[MemoryParts], passes: Sequence[PipelinePass], update: float, step: float
) -> Iterator[MemorySample]:
    """Yield the memory of a rank in the order of time; ``line``: its parts at each moment."""
    at = dict(zip(MOMENTS, line, strict=True))
    kinds = [each.action.kind for each in passes]
    counts = list(accumulate((kind == "forward") - (kind in BACKWARD) for kind in kinds))
    most, total = max(counts), sum(kind in BACKWARD for kind in kinds)
    left, seen = total, 0  # backward passes to come; 1: at the fullest one, 2: after it

    def between(count: int) -> MemoryParts:
        fullest_again = at["loss_forward"]
        if count == most:
            return fullest_again
        parts = at["later_backward"] if seen and total > 1 else fullest_again
        kept = float(fullest_again.activations) * count / most
        return with_parts(parts, activations=kept, logits=0.0)

    yield MemorySample(0.0, "", between(0))
    fullest = counts.index(most)
    for number, (each, count) in enumerate(zip(passes, counts, strict=True)):
        names: list[str] = []
        if each.action.kind in BACKWARD:
            left -= 1
            if not seen and number > fullest:
                names, seen = ["loss_backward", "head", "backward"], 1
            elif seen == 1 and count + 1 < most:
                names, seen = ["later_backward"], 2
            names += ["last_layer", "embedding"] * (left == 0)
            if not names or names[0] == "last_layer":
                yield MemorySample(each.start, "", between(count + 1))
        late = bool(names) and names[0] == "last_layer"  # else the moments begin with the pass
        for place, name in enumerate(names):
            share = 1.0 - LATE * (len(names) - place) if late else place / len(names)
            yield MemorySample(each.start + (each.end - each.start) * share, name, at[name])
        if number == fullest:
            yield MemorySample(each.end, "loss_forward", at["loss_forward"])
        else:
            yield MemorySample(each.end, "", between(count))
    yield MemorySample(update, "", between(0))
    yield MemorySample(update, "optimizer", at["optimizer"])
    yield MemorySample(step, "", at["optimizer"])
