"""Layouts of a replica that can serve a model, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cost_models.plan.plan import Plan
from planner.serving.scenario import ServingScenario, why_not


def layouts(scenario: ServingScenario, fixed: Mapping[str, Any]) -> Iterator[Plan]:
    """Yield every legal layout of a replica: fewest accelerators first, then fewest stages.

    Among layouts of equal size, tensor parallelism across nodes comes last. Expert parallelism over
    replicas comes after all others, unless ``fixed`` determines it.
    """
    num_gpus = scenario.cluster.num_gpus
    divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    tensors = [fixed["tensor_parallel"]] if "tensor_parallel" in fixed else divisors
    pinned = None if scenario.layer_ranges is None else len(scenario.layer_ranges)
    pipeline = fixed.get("pipeline_parallel", pinned)
    pipelines = divisors if pipeline is None else [pipeline]
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
