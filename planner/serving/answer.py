"""Answer of ``fit --inference``: its JSON and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cost_models.memory.parts import PART_WORDS
from cost_models.model.parameters import active_parameters
from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import has_cache
from cost_models.units import format_bytes, format_count, format_rate, format_seconds
from hardware_profiles.cluster.build import describe
from planner.answer.answers import AssessedAnswer
from planner.answer.text import budget_words, cluster_words, verdict_lines
from planner.assessment.documents import cluster_document, model_document
from planner.request.stage_layers import layers_option
from planner.serving.command import describe_serving, vllm_options
from planner.serving.scenario import (
    PLAN_FIELDS,
    ServingAssessment,
    ServingMemory,
    ServingScenario,
    sequences_of,
)
from planner.serving.times import ServingTimePrediction
from planner.serving.ways_out import ServingWayOut
from planner.text.answer import SCHEMA_VERSION
from planner.text.assumed import assumed
from planner.text.bars import bars_with_room, part_bars
from planner.text.fixes import Fix, fix_lines
from planner.text.paragraphs import labelled, plain

MOMENTS: Final = {
    "attention": "inside attention, while prompts are read",
    "feed_forward": "between the matrices of an MLP, while prompts are read",
    "sampling": "while the next tokens are drawn",
}
TIME_WORDS: Final = {
    "matrices": "matrices",
    "attention": "attention",
    "memory": "norms, activations, logits",
    "kernels": "starting and ending kernels",
    "communication": "tensor-parallel and expert communication",
    "host": "waiting for the host",
    "send": "sends between stages",
    "stage_wait": "waiting for the slowest stage",
}
SMALL: Final = 0.005  # smaller shares are not shown
CONFIDENCE: Final = {
    "published": "published: start-up logs of vLLM with such models were compared with",
    "datasheet": "datasheet: no start-up log of such a model was compared with; weights and cache "
    "follow from its shapes",
}


# whose start-up logs tests/cost_models/serving/test_published_serving.py compares with
COMPARED_FAMILIES = ("llama", "qwen2", "gpt_oss")


@dataclass(frozen=True, slots=True, repr=False)
class ServingAnswer(AssessedAnswer):
    """Answer of ``fit --inference``: verdict on one layout, its parts, and ways out."""

    scenario: ServingScenario
    plan: Plan
    assessment: ServingAssessment
    time: ServingTimePrediction | None  # None: no rate is known
    assumptions: tuple[str, ...]
    ways_out: tuple[ServingWayOut, ...]
    reach: Mapping[str, Any]

    @property
    def confidence(self) -> str:
        """Published, if logs of such a model were compared with predictions, else datasheet."""
        on_gpu = self.scenario.cluster.accelerator.device == "gpu"
        alike = self.scenario.model.family in COMPARED_FAMILIES
        return "published" if on_gpu and alike else "datasheet"

    def notebook_parts(self) -> Iterator[str]:
        """Yield verdict, times, parts of the memory, and fixes."""
        from planner.answer import notebook
        from planner.text.html_page import element

        yield notebook.verdict(self.assessment)
        yield notebook.about(
            model_lines(self.scenario), self.scenario.cluster, describe_serving(self.plan)
        )
        if self.time is not None:
            yield element("pre", "\n".join(time_lines(self.scenario, self.time, verbose=False)))
        yield notebook.memory_bars(self.assessment.memory.parts)
        yield notebook.fixes_table(fixes_of(self.ways_out))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        scenario, memory = self.scenario, self.assessment.to_dict()
        memory.pop("verdict")
        pinned = scenario.layer_ranges
        return {
            "schema_version": SCHEMA_VERSION,
            "model": model_document(scenario.model),
            "cluster": cluster_document(scenario.cluster),
            "workload": scenario.workload.to_dict(),
            "engine": {"name": scenario.engine.name, "options": vllm_options(scenario, self.plan)},
            **({} if pinned is None else {"layer_ranges": [list(pair) for pair in pinned]}),
            "verdict": self.verdict,
            "plan": {name: getattr(self.plan, name) for name in PLAN_FIELDS},
            "memory": memory,
            "time": None if self.time is None else self.time.to_dict(),
            "assumptions": list(self.assumptions),
            "confidence": self.confidence,
            "ways_out": [way.to_dict() for way in self.ways_out],
            "reach": dict(self.reach),
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions and sources."""
        return serving_text(self, verbose=verbose)


def serving_text(answer: ServingAnswer, *, verbose: bool) -> str:
    """Return verdict, parts, cache of a token, and the largest load or ways out."""
    scenario, plan, assessment = answer.scenario, answer.plan, answer.assessment
    memory, fits = assessment.memory, assessment.fits
    pinned = scenario.layer_ranges
    layout = [describe_serving(plan), *([] if pinned is None else [layers_option(pinned)])]
    if verbose:
        lines = [*model_lines(scenario), *plain(describe(scenario.cluster)), ""]
        lines += [*verdict_lines(assessment), *labelled("", " ".join(layout))]
        where = f"{_replicas(scenario, plan)}; peak {_where(scenario, plan, memory)}"
        lines += labelled("", where)
    else:
        lines = [*short_head(scenario, " ".join(layout)), *verdict_lines(assessment)]
    parts = {name: value for name, value in memory.parts.items() if value > 0.0}
    above, lines = lines, []
    if verbose:
        lines += labelled("Budget", budget_words(assessment.budget))
    if not fits and verbose:
        name = max(parts, key=lambda part: parts[part])
        lines += labelled("Largest", f"{PART_WORDS[name]}: {format_bytes(parts[name])}")
    if has_cache(scenario.model) and (verbose or not fits):
        lines += labelled("Cache", _cache(scenario, plan, memory))
    if answer.time is not None and (verbose or fits):
        lines += time_lines(scenario, answer.time, verbose=verbose)
    lines += _reach(scenario, answer.reach)
    lines += assumed(answer.assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", CONFIDENCE[answer.confidence])
    options = vllm_options(scenario, plan) if fits else None
    if options is not None:
        lines += labelled("As vLLM's", options)
    others = len(above) + len(lines) + (0 if fits else len(answer.ways_out) + 1)
    most = None if verbose else bars_with_room(others)
    lines = [*above, *part_bars(parts, assessment.budget.size, most, ["kv_cache"]), *lines]
    if not fits:
        lines += fix_lines(fixes_of(answer.ways_out), len(lines), verbose=verbose)
    return "\n".join(lines)


def time_lines(
    scenario: ServingScenario, time: ServingTimePrediction, *, verbose: bool = True
) -> list[str]:
    """Return the paragraphs about the prefill, a token and the throughput."""
    first = format_seconds(time.first_token_seconds)
    low = format_seconds(time.first_token_low_seconds)
    high = format_seconds(time.first_token_high_seconds)
    token = time.token
    words = "first token of" if token is not None else "one sequence of"
    words += f" {time.prompt_len:,} tokens after {first} ({low} to {high})"
    if time.sequences_per_replica > 1 and verbose:
        words += (
            f", of all {time.sequences_per_replica:,} of a replica after "
            f"{format_seconds(time.prefill_seconds)}"
        )
    lines = labelled("Prompt" if token is not None else "Pass", words)
    if verbose:
        lines += labelled("", _shares(time.prefill_parts))
    if token is None:
        return lines
    low, high = format_seconds(token.low_seconds), format_seconds(token.high_seconds)
    lines += labelled(
        "A token",
        f"{format_seconds(token.seconds)} ({low} to {high}), "
        f"{format_rate(1.0 / token.seconds)} a sequence",
    )
    if verbose:
        lines += labelled("", _shares(token.parts))
    per_gpu = token.tokens_per_second_per_gpu
    each = f" ({format_rate(per_gpu)} per accelerator)" if scenario.cluster.num_gpus > 1 else ""
    words = f"{format_rate(token.tokens_per_second)}{each}"
    if verbose:
        words += (
            f" while a batch of answers of {time.answer_len:,} tokens takes "
            f"{format_seconds(time.batch_seconds)}"
        )
    return lines + labelled("Together", words)


def _shares(parts: Mapping[str, float]) -> str:
    """Return the parts of at least SMALL, largest first, as shares."""
    whole = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{TIME_WORDS[name]} {100 * value / whole:.0f} %"
        for name, value in ordered
        if value >= SMALL * whole
    )


def short_head(scenario: ServingScenario, layout: str) -> list[str]:
    """Return the lines that repeat the question: model, load, cluster, layout."""
    cluster = cluster_words(scenario.cluster)
    return [*model_lines(scenario), *plain(f"{cluster} · {layout}")]


def model_lines(scenario: ServingScenario) -> list[str]:
    """Return model and workload, each line as wide as the terminal at most."""
    model, workload = scenario.model, scenario.workload
    size, active = f"{format_count(model.num_parameters)} parameters", active_parameters(model)
    if active < 0.99 * model.num_parameters:
        size += f" ({format_count(active)} active)"
    formats = f"weights {workload.weight_precision}"
    if has_cache(model):
        formats += f", cache {workload.kv_precision}"
    served = f"{_sequences(workload.concurrency)} of {workload.context_len:,} tokens"
    return [*plain(f"{model.name}  {size}"), *plain(f"inference · {formats} · {served}")]


def _sequences(count: int) -> str:
    return f"{count:,} sequence{'s' if count != 1 else ''}"


def _replicas(scenario: ServingScenario, plan: Plan) -> str:
    ranks, each = plan.tensor_parallel * plan.pipeline_parallel, sequences_of(scenario, plan)
    cut = f"{ranks} accelerator{'s' if ranks > 1 else ''}"
    if plan.data_parallel == 1:
        return f"one replica on {cut}"
    return f"{plan.data_parallel} replicas of {cut}, up to {_sequences(each)} each"


def _where(scenario: ServingScenario, plan: Plan, memory: ServingMemory) -> str:
    where = MOMENTS[memory.moment]
    if memory.moment == "sampling" and not has_cache(scenario.model):
        where = "at the scores of every token"
    if plan.pipeline_parallel > 1:
        return f"on stage {memory.limiting_stage}, the fullest, {where}"
    return where


def _cache(scenario: ServingScenario, plan: Plan, memory: ServingMemory) -> str:
    """Return the cache of a token, and of a sequence if it differs by sequence."""
    ranks = plan.tensor_parallel * plan.pipeline_parallel
    stages = f" over {plan.pipeline_parallel} stages" if plan.pipeline_parallel > 1 else ""
    words = f"{format_bytes(memory.kv_bytes_per_token)} a token{stages}"
    beyond = memory.kv_bytes_per_token_beyond_windows
    if beyond < memory.kv_bytes_per_token:
        words += f" ({format_bytes(beyond) if beyond else 'nothing more'} beyond the window)"
    if ranks > 1:
        words += " on each tensor-parallel rank" if plan.tensor_parallel > 1 else ""
    each = memory.parts["kv_cache"] / sequences_of(scenario, plan)
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
        parts.append(words + " (model limit)" * (longest == scenario.model.max_seq_len))
    return labelled("Maximum", ", or ".join(parts)) if parts else []


def fixes_of(ways_out: Sequence[ServingWayOut]) -> list[Fix]:
    """Return the ways out; their pace is not compared."""
    return [Fix(way.change, way.peak_bytes, "", way.options) for way in ways_out]
