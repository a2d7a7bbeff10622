"""Lines of techniques with stale weights: PipeDream, PipeDream-2BW, parameter servers.

Each is derived of a plan that shardplan prices: pipelines without a flush of 1F1B over whole
stages, workers of a parameter server of ZeRO-1, whose states the servers hold.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from cost_models.arrays import Real
from cost_models.communication.host_link import host_link
from cost_models.communication.ring_and_tree import received_bytes
from cost_models.communication.seconds import achieved_by, axis_groups
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import rank_communication
from cost_models.scenario import Scenario
from cost_models.techniques.parameter_server import (
    asynchronous_seconds,
    expected_delay,
    server_seconds,
    worker_bytes,
)
from cost_models.techniques.weight_versions import (
    double_buffered_versions,
    stashed_delay,
    stashed_versions,
    version_bytes,
)
from planner.answer.text import short_plan
from planner.assessment.assess import Assessment, assess
from planner.assessment.verdict import (
    Verdict,
    budget_bytes,
    most_bytes,
    plan_verdict_spread,
    verdict,
)
from planner.request.divisors import divisors
from planner.techniques.kinds import DATA, Technique, without
from planner.techniques.line import TechniqueLine
from planner.techniques.priced import LIMIT, best_of, received_by_rank

WORKERS: Final = Technique("workers", "", {**DATA, "zero_stage": 1, "offload": "none"})
PIPEDREAM, DOUBLE = "PipeDream (stashing)", "PipeDream-2BW"
SERVERS, ASYNCHRONOUS = "parameter server", "asynchronous SGD"


def stale_pipelines(scenario: Scenario, micro_batch_size: int | None) -> list[TechniqueLine]:
    """Return the lines of PipeDream and PipeDream-2BW."""
    made = {"pipedream": (PIPEDREAM, _stashing), "pipedream_2bw": (DOUBLE, _double_buffered)}
    lines = []
    for name, (title, line) in made.items():
        plan, why_not = best_of(scenario, _pipelines(scenario, name), micro_batch_size)
        if plan is None:
            lines.append(TechniqueLine(name, title, "compares", why_not=why_not))
        else:
            lines.append(line(scenario, assess(scenario, plan)))
    return lines


def _pipelines(scenario: Scenario, name: str) -> Technique:
    """Return 1F1B without ZeRO on each number of stages, with room left for further versions."""
    budget = most_bytes(budget_bytes(scenario.cluster), plan_verdict_spread(scenario), code=0)
    variants: list[dict[str, Any]] = []
    for stages in divisors(scenario.world_size):
        if stages > 1:
            versions = stages if name == "pipedream" else float(double_buffered_versions(stages))
            held = scenario.model.num_parameters / stages
            extra = float(version_bytes(held, scenario.workload.compute_bytes, versions))
            limits = [f"memory<={max(1.0, budget - extra):.0f}b", "pp>=2"]
            limits += [f"microbatches>={stages}"] if name == "pipedream_2bw" else []
            variants.append({"pipeline_parallel": stages, LIMIT: ",".join(limits)})
    fixed = {**without(DATA, "pipeline_parallel"), "zero_stage": 0, "offload": "none"}
    fixed["pipeline_schedule"] = "1f1b"
    return Technique(name, "", fixed, "pp>=2", variants=tuple(variants))


def _stashing(scenario: Scenario, base: Assessment) -> TechniqueLine:
    """Return PipeDream: an update, and a sum of gradients, after every micro-batch."""
    plan, parts = base.plan, base.time.parts
    ranks = np.arange(plan.pipeline_parallel)
    updates = plan.num_microbatches
    once = float(parts.data_communication + parts.optimizer)
    exposed = float(parts.communication) + (updates - 1) * float(parts.data_communication)
    delay = int(stashed_delay(plan.pipeline_parallel, 0))
    return _pipeline_line(
        scenario,
        base,
        ("pipedream", PIPEDREAM),
        stashed_versions(plan.pipeline_parallel, ranks),
        received=_received_with_sums(scenario, plan, updates),
        exposed=exposed,
        step=base.time.step_seconds - float(parts.bubble) + (updates - 1) * once,
        note=f"no flush; gradients of the first stage are late by {delay} updates; one update a "
        "micro-batch",
    )


def _double_buffered(scenario: Scenario, base: Assessment) -> TechniqueLine:
    """Return PipeDream-2BW: two versions, an update after at least p micro-batches."""
    plan = base.plan
    versions = double_buffered_versions(np.full(plan.pipeline_parallel, plan.pipeline_parallel))
    return _pipeline_line(
        scenario,
        base,
        ("pipedream_2bw", DOUBLE),
        versions,
        received=received_by_rank(scenario, plan),
        exposed=float(base.time.parts.communication),
        step=base.time.step_seconds - float(base.time.parts.bubble),
        note="no flush; gradients are late by one update",
    )


def _pipeline_line(
    scenario: Scenario,
    base: Assessment,
    names: tuple[str, str],
    versions: Real,
    *,
    received: float,
    exposed: float,
    step: float,
    note: str,
) -> TechniqueLine:
    plan = base.plan
    ranges = default_layer_ranges(scenario, plan)
    table = PlanTable.from_plans([plan])
    peaks, kept = [], np.asarray(versions)
    for stage in base.memory.stages:
        rank = pipeline_rank(scenario, plan, ranges, stage.stage)
        held = float(np.sum(rank_parameters(scenario.model, rank, table).total))
        extra = version_bytes(held, scenario.workload.compute_bytes, kept[stage.stage])
        peaks.append(stage.peak_bytes + float(extra))
    peak = max(peaks)
    return TechniqueLine(
        *names,
        "compares",
        layout=short_plan(plan),
        verdict=_verdict(base, peak),
        peak_bytes=peak,
        received_bytes=received,
        exposed_seconds=exposed,
        step_seconds=step,
        note=note,
    )


def _verdict(base: Assessment, peak: float) -> Verdict:
    """Return the verdict of a peak whose interval is as wide as that of a priced plan."""
    memory = base.memory
    low, high = (peak * end / memory.peak_bytes for end in (memory.low_bytes, memory.high_bytes))
    return verdict(low, high, base.budget.size)


def _received_with_sums(scenario: Scenario, plan: Plan, updates: int) -> float:
    """Return the bytes that the busiest rank receives with a sum of gradients for every update."""
    groups = axis_groups(PlanTable.from_plans([plan]))
    totals = []
    for by_axis in rank_communication(scenario, plan, default_layer_ranges(scenario, plan)):
        total = 0.0
        for (axis, kind), traffic in by_axis.items():
            times = updates if axis in ("data", "replicate") else 1
            size = float(np.sum(received_bytes(kind, traffic.size, groups[axis][0])))
            total += times * size if float(np.sum(traffic.count)) > 0.0 else 0.0
        totals.append(total)
    return max(totals)


def server_lines(scenario: Scenario, micro_batch_size: int | None) -> list[TechniqueLine]:
    """Return the lines of parameter servers on the hosts, synchronous and asynchronous.

    One share of the weights and states for each accelerator, in its host's memory; push and pull
    cross the link to the host, and the network where there are several nodes.
    """
    plan, why_not = best_of(scenario, WORKERS, micro_batch_size)
    names = ("parameter_server", SERVERS), ("asynchronous_sgd", ASYNCHRONOUS)
    if plan is None:
        return [TechniqueLine(*pair, "compares", why_not=why_not) for pair in names]
    base = assess(scenario, plan)
    workers, parts = scenario.world_size, base.memory.parts
    parameters, workload = scenario.model.num_parameters, scenario.workload
    pulled = parameters * workload.compute_bytes
    size = max(pulled, parameters * workload.reduction_bytes)  # of the busier direction
    states = float(parts.optimizer) + max(0.0, float(parts.weights) - pulled)
    peak = base.memory.peak_bytes - states
    time = base.time
    compute = time.step_seconds - float(time.parts.data_communication + time.parts.optimizer)
    link = _link_of_servers(scenario, plan)
    steps: list[float | None] = [None, None]
    if math.isfinite(link):
        pushed = server_seconds(size, workers, workers, link)
        steps = [
            float(compute + pushed),
            float(asynchronous_seconds(compute, size, workers, workers, link)),
        ]
    notes = (
        "workers wait for each other; updates by the hosts are not counted",
        f"gradients are late by {int(expected_delay(workers))} updates in the mean; updates by the "
        "hosts are not counted",
    )
    return [
        TechniqueLine(
            *pair,
            "compares",
            layout=f"{workers} workers, a server for each on its host",
            verdict=_verdict(base, peak),
            peak_bytes=peak,
            received_bytes=float(worker_bytes(pulled)),
            exposed_seconds=None if step is None else step - compute,
            step_seconds=step,
            note=note,
        )
        for pair, step, note in zip(names, steps, notes, strict=True)
    ]


def _link_of_servers(scenario: Scenario, plan: Plan) -> float:
    """Return bytes/s one way between a worker and the servers; infinity: unknown."""
    cluster, software = scenario.cluster, scenario.software
    host = host_link(cluster, PlanTable.from_plans([plan]), software)
    if cluster.num_nodes == 1:
        return host
    return min(host, float(achieved_by(software, cluster).tiers[-1].bandwidth.value))
