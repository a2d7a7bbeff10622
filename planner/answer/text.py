"""Lines and words that the texts of several answers share."""

from __future__ import annotations

from cost_models.memory.parts import PART_WORDS, MemoryParts
from cost_models.model.parameters import active_parameters
from cost_models.plan.plan import Plan
from cost_models.pricing.prediction import TimePrediction
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TIME_WORDS, TimeParts
from cost_models.units import GIB, format_bytes, format_count, format_gib, format_rate, format_step
from hardware_profiles.cluster.build import describe
from hardware_profiles.cluster.schema import Cluster
from planner.assessment.assess import Assessment, MemoryAssessment, PeakMemory, amounts
from planner.assessment.host_memory import host_text
from planner.assessment.verdict import WORDS, Budget
from planner.request.command import describe_plan
from planner.request.stage_layers import layers_option, stage_recompute_options
from planner.text.paragraphs import (
    INDENT,
    MOMENT_WORDS,
    hanging,
    labelled,
    labelled_line,
    plain,
    width,
)


def head(scenario: Scenario) -> list[str]:
    """Return the lines that repeat the request: model, workload, cluster with its links."""
    return [*model_lines(scenario), *plain(describe(scenario.cluster))]


def short_head(scenario: Scenario, *after: str) -> list[str]:
    """Return the same without links, and more text behind the cluster."""
    cluster = cluster_words(scenario.cluster)
    return [*model_lines(scenario), *plain(" · ".join([cluster, *after]))]


def cluster_words(cluster: Cluster) -> str:
    """Return a cluster without its links."""
    return describe(cluster).split(", ")[0]


def model_lines(scenario: Scenario) -> list[str]:
    """Return model and workload, each line as wide as the terminal at most."""
    model, workload = scenario.model, scenario.workload
    size = format_count(model.num_parameters)
    active = active_parameters(model)
    if active < 0.99 * model.num_parameters:
        size += f" parameters ({format_count(active)} active)"
    else:
        size += " parameters"
    if workload.adapter != "none":
        trained = format_count(model.num_trainable_parameters)
        on = "" if workload.adapter_targets == "all" else f" on {workload.adapter_targets}"
        size += f", {trained} trained ({workload.adapter_name}{on}, rank {workload.adapter_rank})"
    if workload.freeze:
        trained = format_count(model.num_trainable_parameters)
        size += f", {trained} trained ({workload.freeze} frozen)"
    length = f"{workload.seq_len:,}"
    if workload.target_seq_len:
        length += f" + {workload.target_seq_len:,}"
    line = (
        f"{model.name}  {size} · {workload.precision} {workload.optimizer} · "
        f"{length} tokens · global batch {workload.global_batch_size:,}"
    )
    for long, short in ((" parameters", ""), ("global batch", "batch")):
        if len(line) > width():
            line = line.replace(long, short, 1)
    return plain(line)


def time_line(time: TimePrediction) -> str:
    """Return the step time with its interval and rates in one line."""
    low, high, rate = time.low_seconds, time.high_seconds, time.tokens_per_second
    words = format_step(time.step_seconds, low, high, rate)
    words += f", {format_rate(time.tokens_per_second_per_gpu)} per device"
    if time.mfu is not None:
        words += f", MFU {100 * time.mfu:.1f} %"
    return words


def rates_line(time: TimePrediction) -> str:
    """Return tokens/s of all accelerators, shares of the step and HFU in one line."""
    shares = ", ".join(largest_shares(time.parts, time.step_seconds))
    words = f"{format_rate(time.tokens_per_second)} together; {shares}"
    if time.mfu is not None and time.hfu is not None and time.hfu > time.mfu * (1.0 + 1e-9):
        words += f"; HFU {100 * time.hfu:.1f} %, with recomputation"
    return words


def largest_shares(parts: TimeParts, step: float, most: int | None = None) -> list[str]:
    """Return the largest parts of a step in words, at most ``most``, without those below 0.5 %."""
    seconds = amounts(parts)
    largest = sorted(seconds, key=lambda name: -seconds[name])[:most]
    return [
        f"{TIME_WORDS[name]} {100 * seconds[name] / step:.0f} %"
        for name in largest
        if seconds[name] >= 0.005 * step
    ]


def bottleneck(assessment: Assessment) -> str:
    """Return the largest parts of time and memory."""
    memory = assessment.memory
    where = f"stage {memory.limiting_stage}, {MOMENT_WORDS[memory.moment]}"
    time = assessment.time
    return largest_parts(time.parts, time.step_seconds, memory.parts, memory.peak_bytes, where)


def largest_parts(
    time: TimeParts, step: float, memory: MemoryParts, peak: float, where: str
) -> str:
    """Return the largest parts of a step and of its peak; ``where``: stage and moment of that."""
    shown = largest_shares(time, step, 3)
    sizes = amounts(memory)
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"time: {', '.join(shown)}; memory: {PART_WORDS[largest]} "
        f"({format_bytes(sizes[largest])} of {format_bytes(peak)}, {where})"
    )


def verdict_lines(assessed: MemoryAssessment[PeakMemory]) -> list[str]:
    """Return verdict, peak, interval and margin, in one line if there is room."""
    verdict, memory = WORDS[assessed.verdict], assessed.memory
    budget = assessed.budget.size
    margin = assessed.margin_bytes
    word = "margin" if margin >= 0 else "short by"
    label = f"{verdict:<{max(INDENT, len(verdict) + 1)}}"
    words = (
        f"peak {format_gib(memory.peak_bytes)} of "
        f"{format_bytes(budget)}, likely {format_gib(memory.low_bytes)} to "
        f"{format_gib(memory.high_bytes)}; {word} {format_bytes(abs(margin))}"
    )
    percent = 100 * abs(margin) / budget
    share = f" ({percent:.0f} %)" if percent >= 1 else " (under 1 %)"
    lines = hanging(label, words + share if len(label + words + share) <= width() else words)
    if assessed.fits and memory.high_bytes > budget:  # a verdict looks less far than the interval
        lines += labelled("", f"at most one such run in ten needs more than {format_bytes(budget)}")
    return lines


def short_plan(plan: Plan) -> str:
    """Return a plan as options, without those that everybody expects.

    >>> short_plan(Plan(data_parallel=8, zero_stage=3)), short_plan(Plan())
    ('--dp 8 --zero 3 --micro-batch-size 1', '--micro-batch-size 1')
    """
    words = describe_plan(plan)
    expected = ["--recompute none", "--schedule 1f1b"]
    expected += ["--dp 1", "--zero 0"] if plan.world_size == 1 else []
    for option in expected:
        words = f" {words} ".replace(f" {option} ", " ").strip()
    return words


def own_stages(scenario: Scenario) -> list[str]:
    """Return the options of stages that are not even."""
    ranges = scenario.layer_ranges or ()
    stages = [layers_option(ranges)] if len(ranges) > 1 else []
    return [*stages, *stage_recompute_options(scenario.stage_recompute_layers)]


def short_plan_of(scenario: Scenario, plan: Plan) -> str:
    """Return a plan as ``short_plan`` does, with the options of stages that are not even."""
    return " ".join([short_plan(plan), *own_stages(scenario)])


def budget_words(budget: Budget) -> str:
    """Return how much of the capacity a plan may use, with the source."""
    return f"{budget.size / GIB:.2f} of {budget.capacity / GIB:.2f} GiB; {budget.reason}"


def host_condition(assessed: Assessment) -> str:
    """Return what a node must have for the verdict, where nobody knows whether it has."""
    return f"if a node has {assessed.host.unchecked} for it, which is not known"


def host_lines(best: Assessment) -> list[str]:
    """Return the line of a proposed plan about the host of a node, if the plan offloads."""
    host = host_text(best.host)
    if host is None or best.plan.offload == "none":
        return []
    return labelled("Host", host_condition(best) if best.host.unchecked else host)


def bottleneck_line(time: TimePrediction) -> str:
    """Return the largest parts of a step in one labelled line."""
    return labelled_line("Bottleneck", largest_shares(time.parts, time.step_seconds))
