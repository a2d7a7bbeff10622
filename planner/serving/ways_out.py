"""Ways out if serving does not fit, and the largest load if it fits.

Every way out, and both limits of the load, are priced by the same formulas and listed only if they
fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import has_cache
from cost_models.serving.number_formats import CACHE_FORMATS, WEIGHT_FORMATS
from planner.advice.changes import HARDWARE, larger_clusters
from planner.assessment.reach import MAX_SEQ_LEN, largest
from planner.request.command import cluster_argument
from planner.serving.command import describe_serving, serve_command
from planner.serving.scenario import (
    PLAN_FIELDS,
    ServingScenario,
    assess_serving,
    layouts,
    sequences_of,
    usual_layouts,
    why_not,
    with_workload,
)

MOST_WAYS: Final = 5
MAX_SEQUENCES: Final = 2**20
SMALL_CHUNK: Final = 2048
SAME, OTHER = "same service", "another service"
BLOCK: Final = 16  # steps in which the context is searched, in tokens


@dataclass(frozen=True, slots=True)
class ServingWayOut:
    """A priced change with which serving fits."""

    change: str
    group: str
    kind: str
    options: str
    command: str
    plan: Plan
    peak_bytes: float
    num_gpus: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "change": self.change,
            "group": self.group,
            "kind": self.kind,
            "options": self.options,
            "command": self.command,
            "plan": {name: getattr(self.plan, name) for name in PLAN_FIELDS},
            "peak_bytes": self.peak_bytes,
            "step_seconds": None,
            "num_gpus": self.num_gpus,
        }


def _check(
    scenario: ServingScenario, plan: Plan, group: str, kind: str, change: str, options: str
) -> ServingWayOut | None:
    """Price one changed layout; None unless it is legal and fits."""
    if why_not(scenario, plan) is not None:
        return None
    assessment = assess_serving(scenario, plan)
    if not assessment.fits:
        return None
    return ServingWayOut(
        change=change,
        group=group,
        kind=kind,
        options=options,
        command=serve_command(scenario, plan),
        plan=plan,
        peak_bytes=assessment.memory.peak_bytes,
        num_gpus=scenario.cluster.num_gpus,
    )


def load(scenario: ServingScenario, plan: Plan) -> float:
    """Return the upper end of the peak's interval as a share of the budget; infinity if illegal."""
    if why_not(scenario, plan) is not None:
        return math.inf
    return assess_serving(scenario, plan).share_of_budget


def serving_ways(scenario: ServingScenario, plan: Plan) -> tuple[ServingWayOut, ...]:
    """Return up to MOST_WAYS changes with which serving fits, cheapest first."""
    found: list[ServingWayOut] = []
    for way in _all_ways(scenario, plan):
        if way is not None:
            found.append(way)
        if len(found) == MOST_WAYS:
            break
    if len(found) <= 1:  # hardly anything helps alone
        found += [way for way in _several_at_once(scenario, plan) if way is not None]
    return tuple(found)


def _all_ways(scenario: ServingScenario, plan: Plan) -> Iterator[ServingWayOut | None]:
    workload, cached = scenario.workload, has_cache(scenario.model)
    yield _another_layout(scenario, plan)
    narrower = cached and CACHE_FORMATS[workload.kv_precision].element > 1.0
    if narrower:
        yield _formats(scenario, plan, kv_precision="fp8")
    if workload.prefill_chunk > SMALL_CHUNK and cached:
        changed = with_workload(scenario, prefill_chunk=SMALL_CHUNK)
        words = f"prompts in steps of {SMALL_CHUNK:,} tokens"
        yield _check(changed, plan, SAME, "prefill", words, f"--prefill-chunk {SMALL_CHUNK}")
    yield _fewer(scenario, plan)
    yield _shorter(scenario, plan)
    for name in _smaller_formats(scenario):
        yield _formats(scenario, plan, weight_precision=name)
    if narrower and "int4" in _smaller_formats(scenario):
        yield _formats(scenario, plan, weight_precision="int4", kv_precision="fp8")
    yield _more_nodes(scenario)


def _another_layout(scenario: ServingScenario, plan: Plan) -> ServingWayOut | None:
    for other in layouts(scenario, {}):
        ranks = other.tensor_parallel * other.pipeline_parallel
        words = f"replicas of {ranks} accelerator{'s' if ranks > 1 else ''}"
        if other.expert_parallel > 1:
            words += ", which share experts"
        way = _check(scenario, other, SAME, "layout", words, describe_serving(other))
        if way is not None and other != plan:
            return way
    return None


def _fewer(scenario: ServingScenario, plan: Plan) -> ServingWayOut | None:
    most = largest_concurrency(scenario, plan, sequences_of(scenario, plan))
    if not most or most >= scenario.workload.concurrency:
        return None
    changed, words = with_workload(scenario, concurrency=most), _sequences(most)
    return _check(changed, plan, OTHER, "concurrency", words, f"--concurrency {most}")


def _shorter(scenario: ServingScenario, plan: Plan) -> ServingWayOut | None:
    longest = longest_context(scenario, plan, scenario.workload.context_len)
    if not longest:
        return None
    changed, words = (
        with_workload(scenario, context_len=longest),
        f"sequences of {longest:,} tokens",
    )
    return _check(changed, plan, OTHER, "context", words, f"--context-len {longest}")


def _formats(scenario: ServingScenario, plan: Plan, **formats: str) -> ServingWayOut | None:
    """Weights or cache, or both, in other formats."""
    words = {"weight_precision": "weights in", "kv_precision": "a cache in"}
    change = " and ".join(f"{words[name]} {value}" for name, value in formats.items())
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in formats.items())
    return _check(with_workload(scenario, **formats), plan, OTHER, "formats", change, options)


def _smaller_formats(scenario: ServingScenario) -> list[str]:
    """Return formats of 8 and 4 bits with fewer bytes than now."""
    has_fp8 = "fp8" in scenario.cluster.accelerator.peak_flops
    now = WEIGHT_FORMATS[scenario.workload.weight_precision].element
    names = ("fp8" if has_fp8 else "int8", "int4")
    return [name for name in names if WEIGHT_FORMATS[name].element < now]


def _several_at_once(scenario: ServingScenario, plan: Plan) -> Iterator[ServingWayOut | None]:
    """The smallest formats and fewer sequences; more nodes with one sequence for each replica."""
    formats = {"kv_precision": "fp8"}
    if "int4" in _smaller_formats(scenario):
        formats["weight_precision"] = "int4"
    small = with_workload(scenario, **formats)
    most = largest_concurrency(small, plan, sequences_of(scenario, plan))
    if most:
        words = " and ".join(f"{key.split('_')[0]} {value}" for key, value in formats.items())
        options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in formats.items())
        yield _check(
            with_workload(small, concurrency=most),
            plan,
            OTHER,
            "several",
            f"{words.replace('kv', 'cache').replace('weight', 'weights')} and {_sequences(most)}",
            f"{options} --concurrency {most}",
        )
    yield _more_nodes(with_workload(scenario, concurrency=1), one_each=True)


def _more_nodes(scenario: ServingScenario, *, one_each: bool = False) -> ServingWayOut | None:
    """The fewest accelerators, by doubling and first in one node, on which some layout fits."""
    if scenario.cluster.accelerator.device == "cpu" or scenario.cluster.levels:
        return None
    for cluster in larger_clusters(scenario.cluster):
        larger, nodes = replace(scenario, cluster=cluster), cluster.num_nodes
        name = cluster_argument(cluster) or f"(nodes = {nodes} in the cluster's file)"
        # one sequence each is the last resort: tensor parallelism may then cross nodes
        for plan in layouts(larger, {}) if one_each else usual_layouts(larger, {}):
            words = f"{nodes} nodes ({cluster.num_gpus} accelerators)"
            if nodes == 1:
                words = f"{cluster.num_gpus} accelerators in one node"
            options = f"{name} {describe_serving(plan)}"
            changed = larger
            if one_each:  # of each replica
                changed = with_workload(larger, concurrency=plan.data_parallel)
                words += f" and {_sequences(plan.data_parallel)}"
                options += f" --concurrency {plan.data_parallel}"
            way = _check(changed, plan, HARDWARE, "nodes", words, options)
            if way is not None:
                return way
    return None


def _sequences(count: int) -> str:
    return f"{count:,} sequence{'s' if count > 1 else ''} at once"


def largest_concurrency(scenario: ServingScenario, plan: Plan, highest: int = MAX_SEQUENCES) -> int:
    """Return the most sequences at once that fit, of all replicas together; 0 if none.

    The search is exact because the peak never shrinks with the sequences; ``highest`` is of one
    replica.
    """

    def more(sequences: int) -> float:
        return load(with_workload(scenario, concurrency=sequences * plan.data_parallel), plan)

    return largest(more, highest) * plan.data_parallel


def longest_context(scenario: ServingScenario, plan: Plan, highest: int) -> int:
    """Return the longest sequence up to ``highest`` that fits, in whole blocks; 0 if none."""
    if load(with_workload(scenario, context_len=highest), plan) <= 1.0:
        return highest

    def longer(blocks: int) -> float:
        return load(with_workload(scenario, context_len=blocks * BLOCK), plan)

    return BLOCK * largest(longer, highest // BLOCK)


def serving_reach(scenario: ServingScenario, plan: Plan) -> dict[str, Any]:
    """Return the largest load of a layout that fits: most sequences, longest sequence.

    Sequences are not longer than the model's maximum or the requested length.
    """
    highest = max(scenario.model.max_seq_len or MAX_SEQ_LEN, scenario.workload.context_len)
    return {
        "largest_concurrency": largest_concurrency(scenario, plan) or None,
        "longest_context_len": longest_context(scenario, plan, highest) or None,
    }
