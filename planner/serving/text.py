"""The answer of ``fit --inference`` as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cost_models.model.parameters import active_parameters
from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import has_cache
from cost_models.units import GIB, format_bytes, format_count, format_gib
from hardware_profiles.cluster.build import describe
from planner.answer.text import bars
from planner.assessment.verdict import WORDS
from planner.request.stage_layers import typed_layers
from planner.serving.command import describe_serving, vllm_options
from planner.serving.scenario import ServingScenario, sequences_of
from planner.serving.time_text import time_lines
from planner.text.paragraphs import INDENT, labelled

MOMENTS: Final = {
    "attention": "inside attention, while prompts are read",
    "feed_forward": "between the matrices of an MLP, while prompts are read",
    "sampling": "while the next tokens are drawn",
}
CONFIDENCE: Final = {
    "published": "published: start-up logs of vLLM with such models were compared with",
    "datasheet": "datasheet: no start-up log of such a model was compared with; weights and cache "
    "follow from its shapes",
}


def serving_text(
    scenario: ServingScenario,
    plan: Plan,
    memory: Mapping[str, Any],
    time: Mapping[str, Any] | None,
    *,
    assumptions: Sequence[str],
    ways_out: Sequence[Mapping[str, Any]],
    reach: Mapping[str, Any],
    confidence: str,
) -> str:
    """Verdict, parts, the cache of a token, how far it goes or what to change."""
    budget, fits = memory["budget_bytes"], memory["verdict"] == "fits"
    margin, verdict = memory["margin_bytes"], WORDS[memory["verdict"]]
    lines = [*_head(scenario), ""]
    lines.append(
        f"{verdict:<{max(INDENT, len(verdict) + 2)}}peak {format_gib(memory['peak_bytes'])} of "
        f"{format_bytes(budget)}   {'margin' if margin >= 0 else 'short of'} "
        f"{format_bytes(abs(margin))} ({100 * abs(margin) / budget:.0f} %)   likely "
        f"{format_gib(memory['low_bytes'])} to {format_gib(memory['high_bytes'])} GiB"
    )
    stages = [] if scenario.layer_ranges is None else [typed_layers(scenario.layer_ranges)]
    lines += labelled("", " ".join([describe_serving(plan), *stages]))
    lines += labelled("", f"{_replicas(scenario, plan)}; peak {_where(scenario, plan, memory)}")
    parts = {name: value for name, value in memory["parts"].items() if value > 0.0}
    lines += bars(dict(sorted(parts.items(), key=lambda part: -part[1])), budget)
    sizes = f"{budget / GIB:.2f} of {memory['capacity_bytes'] / GIB:.2f} GiB"
    lines += labelled("Budget", f"{sizes}; {memory['budget_source']}")
    if not fits:
        name = max(parts, key=lambda part: parts[part])
        lines += labelled("Largest", f"{name}: {format_bytes(parts[name])}")
    if has_cache(scenario.model):
        lines += labelled("Cache", _cache(scenario, plan, memory))
    if time is not None:
        lines += time_lines(scenario, time)
    lines += _reach(scenario, reach) if fits else _ways(ways_out)
    lines += labelled("Assumed", "; ".join(assumptions))
    lines += labelled("Confidence", confidence)
    options = vllm_options(scenario, plan) if fits else None
    if options is not None:
        lines += labelled("As vLLM's", options)
    elif ways_out:
        lines += labelled(
            "Next", "add the options of one of the ways out (each was checked to fit)"
        )
    return "\n".join(lines)


def _head(scenario: ServingScenario) -> list[str]:
    model, workload = scenario.model, scenario.workload
    size, active = f"{format_count(model.num_parameters)} parameters", active_parameters(model)
    if active < 0.99 * model.num_parameters:
        size += f" ({format_count(active)} active)"
    formats = f"weights {workload.weight_precision}"
    if has_cache(model):
        formats += f", cache {workload.kv_precision}"
    return [
        f"{model.name}  {size}",
        f"inference · {formats} · {_sequences(workload.concurrency)} of "
        f"{workload.context_len:,} tokens",
        describe(scenario.cluster),
    ]


def _sequences(count: int) -> str:
    return f"{count:,} sequence{'s' if count != 1 else ''}"


def _replicas(scenario: ServingScenario, plan: Plan) -> str:
    ranks, each = plan.tensor_parallel * plan.pipeline_parallel, sequences_of(scenario, plan)
    cut = f"{ranks} accelerator{'s' if ranks > 1 else ''}"
    if plan.data_parallel == 1:
        return f"one replica on {cut}"
    return f"{plan.data_parallel} replicas of {cut}, up to {_sequences(each)} each"


def _where(scenario: ServingScenario, plan: Plan, memory: Mapping[str, Any]) -> str:
    where = MOMENTS[memory["moment"]]
    if memory["moment"] == "sampling" and not has_cache(scenario.model):
        where = "at the scores of every token"
    if plan.pipeline_parallel > 1:
        return f"on stage {memory['limiting_stage']}, the fullest, {where}"
    return where


def _cache(scenario: ServingScenario, plan: Plan, memory: Mapping[str, Any]) -> str:
    """Bytes of a token, and of a sequence as far as they can be told apart."""
    ranks = plan.tensor_parallel * plan.pipeline_parallel
    stages = f" over {plan.pipeline_parallel} stages" if plan.pipeline_parallel > 1 else ""
    words = f"{format_bytes(memory['kv_bytes_per_token'])} a token{stages}"
    beyond = memory["kv_bytes_per_token_beyond_windows"]
    if beyond < memory["kv_bytes_per_token"]:
        words += f" ({format_bytes(beyond) if beyond else 'nothing more'} beyond the window)"
    if ranks > 1:
        words += " on each tensor-parallel rank" if plan.tensor_parallel > 1 else ""
    each = memory["parts"]["kv_cache"] / sequences_of(scenario, plan)
    words += f"; {format_bytes(each)} a sequence of {scenario.workload.context_len:,} tokens"
    if ranks > 1:
        words += " on an accelerator"
    return words


def _reach(scenario: ServingScenario, reach: Mapping[str, Any]) -> list[str]:
    parts = []
    if reach.get("largest_concurrency"):
        parts.append(f"{_sequences(reach['largest_concurrency'])} at once")
    if reach.get("longest_context_len"):
        longest = reach["longest_context_len"]
        words = f"sequences of {longest:,} tokens"
        parts.append(words + " (its longest)" * (longest == scenario.model.max_seq_len))
    return labelled("Goes up to", " · or ".join(parts)) if parts else []


def _ways(ways_out: Sequence[Mapping[str, Any]]) -> list[str]:
    if not ways_out:
        return labelled("Ways out", "none found with up to 1,024 nodes of this kind")
    lines = []
    for number, way in enumerate(ways_out):
        words = f"{way['change']}: {format_bytes(way['peak_bytes'])}   {way['options']}"
        lines += labelled("Ways out" if not number else "", words)
    return lines
