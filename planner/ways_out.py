"""What to change when a plan does not fit, and how far one can go when it does.

Every way out is priced by the same formulas and listed only if it fits; the cheapest change first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from cost_models.estimate import Setting
from cost_models.legality import legality_codes, question_of
from cost_models.plan import Plan, PlanTable
from hardware_profiles.build import build_cluster
from hardware_profiles.schema import Cluster
from planner.document import plan_document
from planner.search import search
from planner.typed import describe_plan, typed_batch, typed_cluster

MOST_WAYS: Final = 5
MAX_NODES: Final = 1024
MAX_SEQ_LEN: Final = 2**24


def is_legal(setting: Setting, plan: Plan) -> bool:
    """Return whether the plan can exist on the setting's cluster."""
    question = question_of(setting)
    return not legality_codes(question, PlanTable.from_plans([plan]))[0]


def check(setting: Setting, plan: Plan, change: str, options: str) -> dict[str, Any] | None:
    """Price one changed plan; None unless it is legal and fits."""
    if not is_legal(setting, plan):
        return None
    document = plan_document(setting, plan)
    if document["memory"]["verdict"] != "fits":
        return None
    return {
        "change": change,
        "options": options,
        "plan": plan.to_dict(),
        "peak_bytes": document["memory"]["peak_bytes"],
        "step_seconds": document["time"]["step_seconds"],
        "num_gpus": setting.cluster.num_gpus,
    }


def ways_out(setting: Setting, plan: Plan) -> tuple[dict[str, Any], ...]:
    """Return up to MOST_WAYS changes that make it fit, cheapest first."""
    found: list[dict[str, Any]] = []
    for way in _all_ways(setting, plan):
        if way is not None and way["options"] not in {other["options"] for other in found}:
            found.append(way)
        if len(found) == MOST_WAYS:
            break
    return tuple(found)


def _all_ways(setting: Setting, plan: Plan) -> Iterator[dict[str, Any] | None]:
    even = replace(setting, stage_recompute_layers=None)
    some = plan.recompute_layers > 0 or setting.stage_recompute_layers is not None
    for recompute in ("selective", "full"):
        if recompute == "full":  # of as few layers as it takes, which costs less time
            yield _fewest_recomputed(even, plan)
        if recompute != plan.recompute or some:
            changed = replace(plan, recompute=recompute, recompute_layers=0, recompute_every=0)
            options = f"--recompute {recompute}" + (" --recompute-layers 0" if some else "")
            yield check(even, changed, f"recompute {recompute}", options)
    for stage in range(plan.zero_stage + 1, 4):
        changed = replace(plan, zero_stage=stage)
        yield check(setting, changed, f"shard more: ZeRO-{stage}", f"--zero {stage}")
    if plan.micro_batch_size > 1:
        changed = replace(
            plan,
            micro_batch_size=1,
            num_microbatches=plan.num_microbatches * plan.micro_batch_size,
        )
        options = f"--micro-batch-size 1 {typed_batch(setting.workload)}"
        yield check(setting, changed, "micro-batch size 1", options)
    yield _best_on(even, "another plan on the same cluster", anew=some)
    yield _shorter(setting, plan)
    yield from _more_nodes(even, anew=some)


def _fewest_recomputed(setting: Setting, plan: Plan) -> dict[str, Any] | None:
    """Recompute as few whole layers of every stage as it takes; more never need more memory."""
    smallest = setting.model.num_layers // plan.num_stages

    def fits(spared: int) -> bool:
        return _recomputing(setting, plan, smallest - spared) is not None

    spared = _largest(fits, smallest - 1)
    return _recomputing(setting, plan, smallest - spared) if spared else None


def _recomputing(setting: Setting, plan: Plan, count: int) -> dict[str, Any] | None:
    changed = replace(plan, recompute="full", recompute_layers=count, recompute_every=0)
    return check(
        setting,
        changed,
        f"recompute {count} layers of every stage",
        f"--recompute full --recompute-layers {count}",
    )


def _best_on(setting: Setting, change: str, *, anew: bool = False) -> dict[str, Any] | None:
    """Search; ``anew``: some layers only were to be recomputed, which the options take back."""
    result = search(setting, top=1)
    if not result.plans:
        return None
    plan = result.plans[0]
    options = f"{describe_plan(plan)} {typed_batch(setting.workload)}"
    return check(setting, plan, change, options + (" --recompute-layers 0" if anew else ""))


def _with_seq_len(setting: Setting, seq_len: int) -> Setting:
    return replace(setting, workload=replace(setting.workload, seq_len=seq_len))


def _shorter(setting: Setting, plan: Plan) -> dict[str, Any] | None:
    longest = longest_sequence(setting, plan, setting.workload.seq_len)
    if not longest:
        return None
    return check(
        _with_seq_len(setting, longest),
        plan,
        f"sequences of {longest:,} tokens",
        f"--seq-len {longest}",
    )


def longest_sequence(setting: Setting, plan: Plan, highest: int) -> int:
    """Return the longest sequence up to ``highest`` that fits, in steps of 128 tokens; 0 if none.

    Bisection is exact because the peak never shrinks with the sequence.
    """
    step = 128

    def fits(units: int) -> bool:
        changed = _with_seq_len(setting, units * step)
        return check(changed, plan, "", "") is not None

    return step * _largest(fits, highest // step)


def largest_micro_batch(setting: Setting, plan: Plan) -> int:
    """Return the largest micro-batch size that fits with as many micro-batches; 0 if none."""

    def fits(size: int) -> bool:
        batch = size * plan.num_microbatches * plan.data_parallel
        workload = replace(setting.workload, global_batch_size=batch)
        changed = replace(setting, workload=workload)
        return check(changed, replace(plan, micro_batch_size=size), "", "") is not None

    return _largest(fits, 65_536)


def _largest(fits: Callable[[int], bool], highest: int) -> int:
    """Return the largest number up to ``highest`` that fits (smaller ones do too); 0 if none."""
    if highest < 1 or not fits(1):
        return 0
    low, high = 1, 2
    while high <= highest and fits(high):
        low, high = high, high * 2
    high = min(high, highest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def resized(cluster: Cluster, num_nodes: int) -> Cluster:
    """Return the cluster with another number of equal nodes."""
    if cluster.num_nodes > 1 and num_nodes > 1:  # the network may be one of the user's own
        outer = replace(cluster.tiers[-1], domain_size=num_nodes * cluster.gpus_per_node)
        tiers = (*cluster.tiers[:-1], outer)
        name = f"{num_nodes}x{cluster.gpus_per_node}x{cluster.accelerator.name}"
        return replace(cluster, name=name, num_nodes=num_nodes, tiers=tiers)
    return build_cluster(
        cluster.accelerator, num_nodes=num_nodes, gpus_per_node=cluster.gpus_per_node
    )


def _more_nodes(setting: Setting, *, anew: bool) -> Iterator[dict[str, Any] | None]:
    """The fewest nodes, by doubling, on which some plan fits (the batch grows with the ranks)."""
    if setting.cluster.accelerator.device == "cpu":
        return
    nodes = setting.cluster.num_nodes * 2
    while nodes <= MAX_NODES:
        larger = resized(setting.cluster, nodes)
        batch = max(setting.workload.global_batch_size, larger.num_gpus)
        workload = replace(setting.workload, global_batch_size=batch)
        changed = replace(setting, cluster=larger, workload=workload)
        change = f"{nodes} nodes ({larger.num_gpus} accelerators)"
        if batch != setting.workload.global_batch_size:
            change += f" and a global batch of {batch:,}"
        way = _best_on(changed, change, anew=anew)
        if way is not None:
            name = typed_cluster(larger) or f"(nodes = {nodes} in the cluster's file)"
            yield {**way, "options": f"{name} {way['options']}"}
            return
        nodes *= 2


def reach(setting: Setting, plan: Plan) -> dict[str, Any]:
    """How far a plan that fits can go: largest micro-batch, longest sequence."""
    return {
        "largest_micro_batch_size": largest_micro_batch(setting, plan) or None,
        "longest_seq_len": longest_sequence(setting, plan, MAX_SEQ_LEN) or None,
    }
