"""What to change when serving does not fit, and how far one can go when it does.

Every way out, and both ends of the reach, are priced by the same formulas and said only if they
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from cost_models.inference import ServingWorkload
from cost_models.kv_cache import has_cache
from cost_models.number_formats import CACHE_FORMATS, WEIGHT_FORMATS
from cost_models.plan import Plan
from planner.changes import MAX_NODES, resized
from planner.reach import MAX_SEQ_LEN, largest
from planner.serving_layouts import layouts, usual_layouts
from planner.serving_setting import ServingSetting, memory_document, sequences_of, why_not
from planner.serving_typed import describe_serving
from planner.typed import typed_cluster

MOST_WAYS: Final = 5
MAX_SEQUENCES: Final = 2**20
SMALL_CHUNK: Final = 2048
BLOCK: Final = 16  # steps in which the context is searched, in tokens


def _changed(setting: ServingSetting, **changes: Any) -> ServingSetting:
    workload: ServingWorkload = replace(setting.workload, **changes)
    return replace(setting, workload=workload)


def _check(setting: ServingSetting, plan: Plan, change: str, options: str) -> dict[str, Any] | None:
    """Price one changed way to serve; None unless it is legal and fits."""
    if why_not(setting, plan) is not None:
        return None
    memory = memory_document(setting, plan)
    if memory["verdict"] != "fits":
        return None
    return {
        "change": change,
        "options": options,
        "plan": {
            "data_parallel": plan.data_parallel,
            "tensor_parallel": plan.tensor_parallel,
            "pipeline_parallel": plan.pipeline_parallel,
            "expert_parallel": plan.expert_parallel,
        },
        "peak_bytes": memory["peak_bytes"],
        "step_seconds": None,
        "num_gpus": setting.cluster.num_gpus,
    }


def fits(setting: ServingSetting, plan: Plan) -> bool:
    """Return whether it is legal and fits."""
    return _check(setting, plan, "", "") is not None


def serving_ways(setting: ServingSetting, plan: Plan) -> tuple[dict[str, Any], ...]:
    """Return up to MOST_WAYS changes that make it fit, those that cost least first."""
    found: list[dict[str, Any]] = []
    for way in _all_ways(setting, plan):
        if way is not None:
            found.append(way)
        if len(found) == MOST_WAYS:
            break
    return tuple(found)


def _all_ways(setting: ServingSetting, plan: Plan) -> Iterator[dict[str, Any] | None]:
    yield _another_layout(setting, plan)
    cached = has_cache(setting.model)
    narrow_cache = CACHE_FORMATS[setting.workload.kv_precision].element > 1.0
    if cached and narrow_cache:
        yield _check(
            _changed(setting, kv_precision="fp8"), plan, "a cache in fp8", "--kv-precision fp8"
        )
    if setting.workload.prefill_chunk > SMALL_CHUNK and cached:
        yield _check(
            _changed(setting, prefill_chunk=SMALL_CHUNK),
            plan,
            f"prompts in steps of {SMALL_CHUNK:,} tokens",
            f"--prefill-chunk {SMALL_CHUNK}",
        )
    yield _fewer(setting, plan)
    yield _shorter(setting, plan)
    yield from _smaller_weights(setting, plan, cached=cached and narrow_cache)
    yield _more_nodes(setting)


def _another_layout(setting: ServingSetting, plan: Plan) -> dict[str, Any] | None:
    for other in layouts(setting, {}):
        change = f"replicas of {other.tensor_parallel * other.pipeline_parallel} accelerators"
        way = _check(setting, other, change, describe_serving(other))
        if way is not None and other != plan:
            return way
    return None


def _fewer(setting: ServingSetting, plan: Plan) -> dict[str, Any] | None:
    most = largest_concurrency(setting, plan, sequences_of(setting, plan))
    if not most or most >= setting.workload.concurrency:
        return None
    words = f"{most:,} sequence{'s' if most > 1 else ''} at once"
    return _check(_changed(setting, concurrency=most), plan, words, f"--concurrency {most}")


def _shorter(setting: ServingSetting, plan: Plan) -> dict[str, Any] | None:
    longest = longest_context(setting, plan, setting.workload.context_len)
    if not longest:
        return None
    return _check(
        _changed(setting, context_len=longest),
        plan,
        f"sequences of {longest:,} tokens",
        f"--context-len {longest}",
    )


def _smaller_weights(
    setting: ServingSetting, plan: Plan, *, cached: bool
) -> Iterator[dict[str, Any] | None]:
    """Weights in 8 and 4 bits; the latter also with a cache in 8."""
    has_fp8 = "fp8" in setting.cluster.accelerator.peak_flops
    now = WEIGHT_FORMATS[setting.workload.weight_precision].element
    for name in ("fp8" if has_fp8 else "int8", "int4"):
        if WEIGHT_FORMATS[name].element < now:
            yield _check(
                _changed(setting, weight_precision=name),
                plan,
                f"weights in {name}",
                f"--weight-precision {name}",
            )
    if cached and WEIGHT_FORMATS["int4"].element < now:
        yield _check(
            _changed(setting, weight_precision="int4", kv_precision="fp8"),
            plan,
            "weights in int4 and a cache in fp8",
            "--weight-precision int4 --kv-precision fp8",
        )


def _more_nodes(setting: ServingSetting) -> dict[str, Any] | None:
    """The fewest nodes, by doubling, on which some way to cut it fits."""
    if setting.cluster.accelerator.device == "cpu":
        return None
    nodes = setting.cluster.num_nodes * 2
    while nodes <= MAX_NODES:
        larger = replace(setting, cluster=resized(setting.cluster, nodes))
        name = typed_cluster(larger.cluster) or f"(nodes = {nodes} in the cluster's file)"
        for plan in usual_layouts(larger, {}):
            change = f"{nodes} nodes ({larger.cluster.num_gpus} accelerators)"
            way = _check(larger, plan, change, f"{name} {describe_serving(plan)}")
            if way is not None:
                return way
        nodes *= 2
    return None


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
