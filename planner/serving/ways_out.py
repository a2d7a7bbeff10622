"""What to change when serving does not fit, and how far one can go when it does.

Every way out, and both ends of the reach, are priced by the same formulas and said only if they
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import has_cache
from cost_models.serving.memory import ServingWorkload
from cost_models.serving.number_formats import CACHE_FORMATS, WEIGHT_FORMATS
from planner.advice.changes import HARDWARE, MAX_NODES, resized
from planner.assessment.reach import MAX_SEQ_LEN, largest
from planner.request.command import typed_cluster
from planner.serving.command import describe_serving, serve_command
from planner.serving.layouts import layouts, usual_layouts
from planner.serving.setting import (
    PLAN_FIELDS,
    ServingSetting,
    memory_document,
    sequences_of,
    why_not,
)

MOST_WAYS: Final = 5
MAX_SEQUENCES: Final = 2**20
SMALL_CHUNK: Final = 2048
SAME, OTHER = "same service", "another service"
BLOCK: Final = 16  # steps in which the context is searched, in tokens


def _changed(setting: ServingSetting, **changes: Any) -> ServingSetting:
    workload: ServingWorkload = replace(setting.workload, **changes)
    return replace(setting, workload=workload)


def _check(
    setting: ServingSetting, plan: Plan, group: str, kind: str, change: str, options: str
) -> dict[str, Any] | None:
    """Price one changed way to serve; None unless it is legal and fits."""
    if why_not(setting, plan) is not None:
        return None
    memory = memory_document(setting, plan)
    if memory["verdict"] != "fits":
        return None
    return {
        "change": change,
        "group": group,
        "kind": kind,
        "options": options,
        "command": serve_command(setting, plan),
        "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
        "peak_bytes": memory["peak_bytes"],
        "step_seconds": None,
        "num_gpus": setting.cluster.num_gpus,
    }


def fits(setting: ServingSetting, plan: Plan) -> bool:
    """Return whether it is legal and fits."""
    if why_not(setting, plan) is not None:
        return False
    return bool(memory_document(setting, plan)["verdict"] == "fits")


def serving_ways(setting: ServingSetting, plan: Plan) -> tuple[dict[str, Any], ...]:
    """Return up to MOST_WAYS changes that make it fit, those that cost least first."""
    found: list[dict[str, Any]] = []
    for way in _all_ways(setting, plan):
        if way is not None:
            found.append(way)
        if len(found) == MOST_WAYS:
            break
    if len(found) <= 1:  # hardly anything helps alone
        found += [way for way in _several_at_once(setting, plan) if way is not None]
    return tuple(found)


def _all_ways(setting: ServingSetting, plan: Plan) -> Iterator[dict[str, Any] | None]:
    workload, cached = setting.workload, has_cache(setting.model)
    yield _another_layout(setting, plan)
    narrower = cached and CACHE_FORMATS[workload.kv_precision].element > 1.0
    if narrower:
        yield _formats(setting, plan, kv_precision="fp8")
    if workload.prefill_chunk > SMALL_CHUNK and cached:
        changed = _changed(setting, prefill_chunk=SMALL_CHUNK)
        words = f"prompts in steps of {SMALL_CHUNK:,} tokens"
        yield _check(changed, plan, SAME, "prefill", words, f"--prefill-chunk {SMALL_CHUNK}")
    yield _fewer(setting, plan)
    yield _shorter(setting, plan)
    for name in _smaller_formats(setting):
        yield _formats(setting, plan, weight_precision=name)
    if narrower and "int4" in _smaller_formats(setting):
        yield _formats(setting, plan, weight_precision="int4", kv_precision="fp8")
    yield _more_nodes(setting)


def _another_layout(setting: ServingSetting, plan: Plan) -> dict[str, Any] | None:
    for other in layouts(setting, {}):
        ranks = other.tensor_parallel * other.pipeline_parallel
        words = f"replicas of {ranks} accelerator{'s' if ranks > 1 else ''}"
        if other.expert_parallel > 1:
            words += ", which share experts"
        way = _check(setting, other, SAME, "layout", words, describe_serving(other))
        if way is not None and other != plan:
            return way
    return None


def _fewer(setting: ServingSetting, plan: Plan) -> dict[str, Any] | None:
    most = largest_concurrency(setting, plan, sequences_of(setting, plan))
    if not most or most >= setting.workload.concurrency:
        return None
    changed, words = _changed(setting, concurrency=most), _sequences(most)
    return _check(changed, plan, OTHER, "concurrency", words, f"--concurrency {most}")


def _shorter(setting: ServingSetting, plan: Plan) -> dict[str, Any] | None:
    longest = longest_context(setting, plan, setting.workload.context_len)
    if not longest:
        return None
    changed, words = _changed(setting, context_len=longest), f"sequences of {longest:,} tokens"
    return _check(changed, plan, OTHER, "context", words, f"--context-len {longest}")


def _formats(setting: ServingSetting, plan: Plan, **formats: str) -> dict[str, Any] | None:
    """Weights or cache, or both, in other formats."""
    words = {"weight_precision": "weights in", "kv_precision": "a cache in"}
    change = " and ".join(f"{words[name]} {value}" for name, value in formats.items())
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in formats.items())
    return _check(_changed(setting, **formats), plan, OTHER, "formats", change, options)


def _smaller_formats(setting: ServingSetting) -> list[str]:
    """Return formats of 8 and 4 bits with fewer bytes than now."""
    has_fp8 = "fp8" in setting.cluster.accelerator.peak_flops
    now = WEIGHT_FORMATS[setting.workload.weight_precision].element
    names = ("fp8" if has_fp8 else "int8", "int4")
    return [name for name in names if WEIGHT_FORMATS[name].element < now]


def _several_at_once(setting: ServingSetting, plan: Plan) -> Iterator[dict[str, Any] | None]:
    """The smallest formats and fewer sequences; more nodes with one sequence for each replica."""
    formats = {"kv_precision": "fp8"}
    if "int4" in _smaller_formats(setting):
        formats["weight_precision"] = "int4"
    small = _changed(setting, **formats)
    most = largest_concurrency(small, plan, sequences_of(setting, plan))
    if most:
        words = " and ".join(f"{key.split('_')[0]} {value}" for key, value in formats.items())
        options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in formats.items())
        yield _check(
            _changed(small, concurrency=most),
            plan,
            OTHER,
            "several",
            f"{words.replace('kv', 'cache').replace('weight', 'weights')} and {_sequences(most)}",
            f"{options} --concurrency {most}",
        )
    yield _more_nodes(_changed(setting, concurrency=1), one_each=True)


def _more_nodes(setting: ServingSetting, *, one_each: bool = False) -> dict[str, Any] | None:
    """The fewest nodes, by doubling, on which some way to cut it fits."""
    if setting.cluster.accelerator.device == "cpu" or setting.cluster.levels:
        return None
    nodes = setting.cluster.num_nodes * 2
    while nodes <= MAX_NODES:
        larger = replace(setting, cluster=resized(setting.cluster, nodes))
        name = typed_cluster(larger.cluster) or f"(nodes = {nodes} in the cluster's file)"
        # one sequence each is the last resort: tensor parallelism may then cross nodes
        for plan in layouts(larger, {}) if one_each else usual_layouts(larger, {}):
            words = f"{nodes} nodes ({larger.cluster.num_gpus} accelerators)"
            options = f"{name} {describe_serving(plan)}"
            asked = larger
            if one_each:  # of each replica
                asked = _changed(larger, concurrency=plan.data_parallel)
                words += f" and {_sequences(plan.data_parallel)}"
                options += f" --concurrency {plan.data_parallel}"
            way = _check(asked, plan, HARDWARE, "nodes", words, options)
            if way is not None:
                return way
        nodes *= 2
    return None


def _sequences(count: int) -> str:
    return f"{count:,} sequence{'s' if count > 1 else ''} at once"


def largest_concurrency(setting: ServingSetting, plan: Plan, highest: int = MAX_SEQUENCES) -> int:
    """Return the most sequences at once that fit, of all replicas together; 0 if none.

    Bisection is exact because the peak never shrinks with the sequences; ``highest`` is of one
    replica.
    """

    def enough(sequences: int) -> bool:
        return fits(_changed(setting, concurrency=sequences * plan.data_parallel), plan)

    return largest(enough, highest) * plan.data_parallel


def longest_context(setting: ServingSetting, plan: Plan, highest: int) -> int:
    """Return the longest sequence up to ``highest`` that fits, in whole blocks; 0 if none."""
    if fits(_changed(setting, context_len=highest), plan):
        return highest

    def enough(blocks: int) -> bool:
        return fits(_changed(setting, context_len=blocks * BLOCK), plan)

    return BLOCK * largest(enough, highest // BLOCK)


def serving_reach(setting: ServingSetting, plan: Plan) -> dict[str, Any]:
    """How far a way to serve that fits can go: most sequences, longest sequence.

    Sequences are no longer than the model was made for, or than was asked.
    """
    highest = max(setting.model.max_seq_len or MAX_SEQ_LEN, setting.workload.context_len)
    return {
        "largest_concurrency": largest_concurrency(setting, plan) or None,
        "longest_context_len": longest_context(setting, plan, highest) or None,
    }
