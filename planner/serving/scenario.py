"""The serving scenario, and the memory assessment of one layout of replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import PipelineRank, distinct_rank_contents, even_split_contents
from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import bytes_per_token
from cost_models.serving.memory import (
    SERVING_MOMENTS,
    Replica,
    ServingParts,
    ServingPoint,
    ServingWorkload,
    price_serving,
    rank_serving_memory,
)
from cost_models.serving.number_formats import CACHE_FORMATS
from cost_models.serving.rules import ServingQuestion, why_not_served
from cost_models.uncertainty import SERVING_EXACT, SERVING_REST, interval
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.record import to_json
from hardware_profiles.software.serving_engine import ServingEngine
from planner.assessment.assess import MemoryAssessment
from planner.assessment.verdict import memory_budget, verdict
from planner.request.divisors import divisors

# fields of a plan that serving has
PLAN_FIELDS = ("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel")


@dataclass(frozen=True, slots=True)
class ServingScenario:
    """Model, cluster, workload and engine: everything except the layout of the replicas."""

    model: ModelSpec
    cluster: Cluster
    workload: ServingWorkload
    engine: ServingEngine
    layer_ranges: tuple[tuple[int, int], ...] | None = None  # pinned stages; None: even ones

    @property
    def on_gpu(self) -> bool:
        """Whether an accelerator computes, rather than the host."""
        return self.cluster.accelerator.device != "cpu"


def with_workload(scenario: ServingScenario, **changes: Any) -> ServingScenario:
    """Return the scenario with changed fields of the workload."""
    return replace(scenario, workload=replace(scenario.workload, **changes))


def sequences_of(scenario: ServingScenario, plan: Plan) -> int:
    """Return the sequences that the fullest replica serves at once.

    >>> math.ceil(65 / 8)
    9
    """
    return math.ceil(scenario.workload.concurrency / plan.data_parallel)


def point_of(scenario: ServingScenario, plan: Plan) -> ServingPoint:
    """Return the degrees and sizes of one layout."""
    return ServingPoint(
        sequences=sequences_of(scenario, plan),
        context_len=scenario.workload.context_len,
        prefill_chunk=scenario.workload.prefill_chunk,
        tensor_parallel=plan.tensor_parallel,
        pipeline_parallel=plan.pipeline_parallel,
        data_parallel=plan.data_parallel,
        expert_parallel=plan.expert_parallel,
    )


def replica_of(scenario: ServingScenario, plan: Plan) -> Replica:
    """Return the model under one layout."""
    return Replica(scenario.model, scenario.workload, scenario.engine, point_of(scenario, plan))


def why_not(scenario: ServingScenario, plan: Plan) -> str | None:
    """Return why a layout is illegal, in words; None where it is legal."""
    stages = None if scenario.layer_ranges is None else len(scenario.layer_ranges)
    question = ServingQuestion(scenario.model, scenario.workload, scenario.cluster.num_gpus, stages)
    return why_not_served(question, point_of(scenario, plan))


def stages_of(scenario: ServingScenario, plan: Plan) -> Sequence[PipelineRank]:
    """Return the distinct contents of the pipeline ranks."""
    if scenario.layer_ranges is not None:
        return distinct_rank_contents(scenario.model, scenario.layer_ranges, plan.pipeline_parallel)
    return even_split_contents(scenario.model, plan.pipeline_parallel, 1)


def serving_interval(exact: float, rest: float) -> tuple[float, float]:
    """Return the ends of the interval: each part has its own spread."""
    ends = zip(interval(exact, SERVING_EXACT), interval(rest, SERVING_REST), strict=True)
    low, high = (sum(pair) for pair in ends)
    return low, high


@dataclass(frozen=True, slots=True)
class ServedStage:
    """Peak memory of one pipeline rank, in bytes."""

    stage: int
    peak_bytes: float
    moment: str  # one of SERVING_MOMENTS, at which the peak falls
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Peak memory of the fullest accelerator with its interval and its parts, in bytes."""

    peak_bytes: float
    low_bytes: float
    high_bytes: float
    limiting_stage: int  # first pipeline rank with the largest peak
    moment: str  # one of SERVING_MOMENTS, at which the peak falls
    parts: Mapping[str, float]  # under the names of training
    stages: tuple[ServedStage, ...]
    kv_bytes_per_token: float
    kv_bytes_per_token_beyond_windows: float


@dataclass(frozen=True, slots=True)
class ServingAssessment(MemoryAssessment[ServingMemory]):
    """Predicted memory of one legal layout of replicas, and whether it fits."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON values of verdict, budget and memory."""
        return {**self.verdict_document(), **to_json(self.memory)}


def _parts(parts: ServingParts) -> dict[str, float]:
    """Return the parts under the names of training; a server has no gradients, no optimizer."""
    values = {f.name: float(getattr(parts, f.name)) for f in fields(ServingParts)}
    return {"weights": values["weights"], "gradients": 0.0, "optimizer": 0.0} | values


def _stages(scenario: ServingScenario, plan: Plan) -> tuple[ServedStage, ...]:
    """Return the peak of every pipeline rank."""
    found = []
    for rank in stages_of(scenario, plan):
        parts, moment = rank_serving_memory(
            replica_of(scenario, plan), rank, on_gpu=scenario.on_gpu
        )
        name = SERVING_MOMENTS[int(np.asarray(moment))]
        found += [
            ServedStage(position, float(parts.peak), name, _parts(parts))
            for position in rank.positions
        ]
    return tuple(sorted(found, key=lambda served: served.stage))


def assess_serving(scenario: ServingScenario, plan: Plan) -> ServingAssessment:
    """Return the assessment of one legal layout of replicas."""
    parts, stage, moment = price_serving(
        replica_of(scenario, plan), stages_of(scenario, plan), on_gpu=scenario.on_gpu
    )
    budget = memory_budget(scenario.cluster.accelerator)
    low, high = serving_interval(float(parts.exact), float(parts.rest))
    stored = CACHE_FORMATS[scenario.workload.kv_precision]
    options = (scenario.model, stored, plan.tensor_parallel)
    memory = ServingMemory(
        peak_bytes=float(parts.peak),
        low_bytes=low,
        high_bytes=high,
        limiting_stage=int(np.asarray(stage)),
        moment=SERVING_MOMENTS[int(np.asarray(moment))],
        parts=_parts(parts),
        stages=_stages(scenario, plan),
        kv_bytes_per_token=float(bytes_per_token(*options)),
        kv_bytes_per_token_beyond_windows=float(bytes_per_token(*options, beyond_windows=True)),
    )
    return ServingAssessment(plan, verdict(low, high, budget.size), budget, memory)


def layouts(scenario: ServingScenario, fixed: Mapping[str, Any]) -> Iterator[Plan]:
    """Yield every legal layout of a replica: fewest accelerators first, then fewest stages.

    Among layouts of equal size, tensor parallelism across nodes comes last. Expert parallelism over
    replicas comes after all others, unless ``fixed`` determines it.
    """
    num_gpus = scenario.cluster.num_gpus
    degrees = divisors(num_gpus)
    tensors = [fixed["tensor_parallel"]] if "tensor_parallel" in fixed else degrees
    pinned = None if scenario.layer_ranges is None else len(scenario.layer_ranges)
    pipeline = fixed.get("pipeline_parallel", pinned)
    pipelines = degrees if pipeline is None else [pipeline]
    node = scenario.cluster.gpus_per_node
    sizes = [(tp, pp) for tp in tensors for pp in pipelines]
    sizes.sort(key=lambda size: (size[0] * size[1], size[0] > node, size[1]))
    for apart in (False,) if "expert_parallel" in fixed else (False, True):
        for tp, pp in sizes:
            data = fixed.get("data_parallel", max(1, num_gpus // (tp * pp)))
            if apart and data == 1:  # within one replica experts are cut
                continue
            plan = Plan(
                data_parallel=data,
                tensor_parallel=tp,
                pipeline_parallel=pp,
                expert_parallel=data * tp if apart else fixed.get("expert_parallel", 1),
            )
            if why_not(scenario, plan) is None:
                yield plan


def usual_layouts(scenario: ServingScenario, fixed: Mapping[str, Any]) -> Sequence[Plan]:
    """Return the default layouts: tensor parallelism inside a node, then stages.

    If none of the layouts is of this kind, all are returned.
    """
    every = list(layouts(scenario, fixed))
    node = scenario.cluster.gpus_per_node
    inside = [plan for plan in every if plan.tensor_parallel <= node]
    widest = max((plan.tensor_parallel for plan in inside), default=0)
    usual = [p for p in inside if p.pipeline_parallel == 1 or p.tensor_parallel == widest]
    return usual or every
