"""Text of the answers, at most 100 columns wide: verdict, parts, assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from cost_models.memory.parts import MemoryParts
from cost_models.model.parameters import active_parameters
from cost_models.plan.plan import Plan
from cost_models.pricing.prediction import TimePrediction
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TimeParts
from cost_models.units import GIB, format_bytes, format_count, format_gib, format_seconds
from hardware_profiles.cluster.build import describe
from planner.assessment.assess import Assessment, MemoryAssessment, PeakMemory, amounts
from planner.assessment.confidence import confidence
from planner.assessment.host_memory import host_text
from planner.assessment.reach import Reach
from planner.assessment.verdict import WORDS, Budget
from planner.request.command import describe_plan, plan_command
from planner.request.stage_layers import layers_option, recompute_cell, stage_recompute_options
from planner.run_cost.text import run_lines
from planner.text.paragraphs import INDENT, MOMENT_WORDS, labelled
from planner.text.tables import marked_table

if TYPE_CHECKING:
    from planner.advice.ways_out import WayOut
    from planner.refinement.best_partition import StagedPlan
    from planner.refinement.placement import AxisPlace, PlacedPlan
    from planner.run_cost.failures import TrainingRun
    from planner.search.search import Counts

MOST_REASONS: Final = 3  # legality rules that are listed

BAR: Final = 40
MOST_RANKS: Final = 16  # ranks of an order that are listed
CONFIDENCE_WORDS: Final = {
    "measured": "measured: rates were measured on this machine",
    "published": "published: runs of such a model on this accelerator were compared with",
    "datasheet": "datasheet: rates come from the vendor; no run of this kind was compared yet",
}
TIME_WORDS: Final = {
    "compute": "computation",
    "recompute": "recomputation",
    "host": "waiting for the host (starting kernels, offloaded activations)",
    "tensor_communication": "tensor-parallel communication",
    "expert_communication": "tokens to experts and back",
    "context_communication": "context-parallel communication that is not hidden",
    "pipeline_communication": "pipeline sends",
    "bubble": "pipeline bubble",
    "data_communication": "data-parallel communication that is not hidden",
    "optimizer": "the optimizer",
}

SAME_TRAINING: Final = "same training"
# by the groups of ways out (``planner.advice.changes``)
GROUP_LABEL: Final = {
    SAME_TRAINING: "Ways out",
    "another training": "Or train",
    "more hardware": "Or use",
}


def head(scenario: Scenario) -> list[str]:
    """Return the lines that repeat the request: model, workload, cluster."""
    model, workload = scenario.model, scenario.workload
    size = format_count(model.num_parameters)
    active = active_parameters(model)
    if active < 0.99 * model.num_parameters:
        size += f" parameters ({format_count(active)} active)"
    else:
        size += " parameters"
    if workload.adapter != "none":
        trained = format_count(model.num_trainable_parameters)
        size += f", {trained} trained ({workload.adapter}, rank {workload.adapter_rank})"
    if workload.freeze:
        trained = format_count(model.num_trainable_parameters)
        size += f", {trained} trained ({workload.freeze} frozen)"
    return [
        f"{model.name}  {size} · {workload.precision} {workload.optimizer} · "
        f"{workload.seq_len:,} tokens · global batch {workload.global_batch_size:,}",
        describe(scenario.cluster),
    ]


def bars(parts: Mapping[str, float], whole: float) -> list[str]:
    """Return memory parts as bars; ``whole``: bytes of a full bar, the budget."""
    lines = []
    for name, value in parts.items():
        if value <= 0.0:
            continue
        filled = min(BAR, round(BAR * value / whole))
        lines.append(f"  {name:<12} {'█' * filled or '▏':<{BAR}} {format_bytes(value):>10}")
    return lines


def time_line(time: TimePrediction) -> str:
    """Return the step time with its interval and rates in one line."""
    words = (
        f"{format_seconds(time.step_seconds)} a step ({format_seconds(time.low_seconds)} to "
        f"{format_seconds(time.high_seconds)}), "
        f"{time.tokens_per_second_per_gpu:,.0f} tokens/s per accelerator"
    )
    if time.mfu is not None:
        words += f", MFU {100 * time.mfu:.1f} %"
    return words


def rates_line(time: TimePrediction) -> str:
    """Return tokens/s of all accelerators, shares of the step and HFU in one line."""
    words = f"{time.tokens_per_second:,.0f} tokens/s together; {shares(time)}"
    if time.mfu is not None and time.hfu is not None and time.hfu > time.mfu * (1.0 + 1e-9):
        words += f"; HFU {100 * time.hfu:.1f} %, with recomputation"
    return words


def shares(time: TimePrediction) -> str:
    """Return the parts of the step of at least 0.5 %, as shares."""
    return ", ".join(_largest_shares(time.parts, time.step_seconds))


def _largest_shares(parts: TimeParts, step: float, most: int | None = None) -> list[str]:
    """Return the largest parts of a step in words, at most ``most``, without those below 0.5 %."""
    seconds = amounts(parts)
    largest = sorted(seconds, key=lambda name: -seconds[name])[:most]
    return [
        f"{TIME_WORDS[name]} {100 * seconds[name] / step:.0f} %"
        for name in largest
        if seconds[name] >= 0.005 * step
    ]


def binds(assessment: Assessment) -> str:
    """Return the largest parts of time and memory."""
    memory = assessment.memory
    where = f"stage {memory.limiting_stage}, {MOMENT_WORDS[memory.moment]}"
    return binding_parts(assessment.time, memory, where)


class TimeOfParts(Protocol):
    """Seconds of a step with their parts."""

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        ...

    @property
    def parts(self) -> TimeParts:
        """Its parts."""
        ...


class MemoryOfParts(Protocol):
    """Bytes at the peak with their parts."""

    @property
    def peak_bytes(self) -> float:
        """The whole peak."""
        ...

    @property
    def parts(self) -> MemoryParts:
        """Its parts."""
        ...


def binding_parts(time: TimeOfParts, memory: MemoryOfParts, where: str) -> str:
    """Return the largest parts of time and memory; ``where``: stage and moment of the peak."""
    shown = _largest_shares(time.parts, time.step_seconds, 3)
    sizes = amounts(memory.parts)
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"time: {', '.join(shown)}; memory: {largest} "
        f"({format_bytes(sizes[largest])} of {format_bytes(memory.peak_bytes)}, {where})"
    )


def verdict_line(assessed: MemoryAssessment[PeakMemory]) -> str:
    """Return verdict, peak, margin and interval in one line."""
    verdict, memory = WORDS[assessed.verdict], assessed.memory
    budget = assessed.budget.size
    margin = assessed.margin_bytes
    word = "margin" if margin >= 0 else "short of"
    return (
        f"{verdict:<{max(INDENT, len(verdict) + 2)}}peak {format_gib(memory.peak_bytes)} of "
        f"{format_bytes(budget)}   {word} {format_bytes(abs(margin))} "
        f"({100 * abs(margin) / budget:.0f} %)   likely {format_gib(memory.low_bytes)} to "
        f"{format_gib(memory.high_bytes)} GiB"
    )


def budget_words(budget: Budget) -> str:
    """Return how much of the capacity a plan may use, with the source."""
    return f"{budget.size / GIB:.2f} of {budget.capacity / GIB:.2f} GiB; {budget.reason}"


def fit_text(
    scenario: Scenario,
    plan: Plan,
    assessment: Assessment,
    *,
    assumptions: Sequence[str],
    ways_out: Sequence[WayOut],
    reach: Reach | None,
    largest: str,
    not_run: str | None,
    job: TrainingRun | None = None,
) -> str:
    """Return the answer of ``fit`` as text."""
    memory, fits = assessment.memory, assessment.fits
    lines = [*head(scenario), "", verdict_line(assessment)]
    if assessment.verdict == "does_not_fit" and any(way.is_another_plan for way in ways_out):
        lines += labelled("", "FITS with another plan on this cluster: see Ways out")
    stages = [] if scenario.layer_ranges is None else [layers_option(scenario.layer_ranges)]
    stages += stage_recompute_options(scenario.stage_recompute_layers)
    lines += labelled("", " ".join([describe_plan(plan), *stages]))
    where = f"{MOMENT_WORDS[memory.moment]}"
    if plan.pipeline_parallel > 1:
        where = f"stage {memory.limiting_stage} is the fullest, {where}"
    lines += labelled("", f"peak {where}")
    lines += bars(amounts(memory.parts), assessment.budget.size)
    lines += labelled("Budget", budget_words(assessment.budget))
    host = host_text(assessment.host)
    if host is not None:
        lines += labelled("Host", host)
    if not fits:
        lines += labelled("Largest", largest)
    lines += labelled("Step", time_line(assessment.time))
    lines += labelled("", rates_line(assessment.time))
    if job is not None:
        lines += run_lines(job, assessment, plan.world_size)
    lines += _reach(reach) if fits else _ways(ways_out)
    lines += labelled("Assumed", "; ".join(assumptions))
    lines += labelled("Confidence", CONFIDENCE_WORDS[confidence(scenario)])
    if not_run is not None:
        lines += labelled("Not run", not_run)
    lines += labelled("Next", _next_command(scenario, plan, ways_out))
    return "\n".join(lines)


def _reach(reach: Reach | None) -> list[str]:
    parts = []
    if reach is not None and reach.largest_micro_batch_size:
        parts.append(f"micro-batch size {reach.largest_micro_batch_size:,}")
    if reach is not None and reach.longest_seq_len:
        parts.append(f"sequences of {reach.longest_seq_len:,} tokens")
    return labelled("Maximum", " · ".join(parts)) if parts else []


def _ways(ways_out: Sequence[WayOut]) -> list[str]:
    if not ways_out:
        return labelled("Ways out", "none found with up to 1,024 nodes of this kind")
    lines: list[str] = []
    group = None
    for way in ways_out:
        words = (
            f"{way.change}: {format_bytes(way.peak_bytes)}, "
            f"{format_seconds(way.step_seconds)} a step   {way.options}"
        )
        label = "" if way.group == group else GROUP_LABEL[way.group] if lines else "Ways out"
        lines += labelled(label, words)
        group = way.group
    return lines


def _next_command(scenario: Scenario, plan: Plan, ways_out: Sequence[WayOut]) -> str:
    if ways_out:
        return "add the options of one of the ways out (each was checked to fit)"
    return plan_command(scenario, plan)


COLUMNS: Final = (
    ("dp", "data_parallel"),
    ("rep", "dp_replicate"),
    ("cp", "context_parallel"),
    ("cp method", "context_parallel_method"),
    ("tp", "tensor_parallel"),
    ("ep", "expert_parallel"),
    ("etp", "expert_tensor_parallel"),
    ("pp", "pipeline_parallel"),
    ("vp", "virtual_stages"),
    ("zero", "zero_stage"),
    ("sp", "sequence_parallel"),
    ("recompute", "recompute"),
    ("offload", "offload"),
    ("micro", "micro_batch_size"),
)
# columns shown only if a plan has another value
USUAL: Final[Mapping[str, object]] = {
    "dp_replicate": 1,
    "context_parallel": 1,
    "context_parallel_method": Plan().context_parallel_method,
    "expert_parallel": 1,
    "expert_tensor_parallel": True,
    "offload": "none",
}
SHORT_SCHEDULE: Final = {
    "interleaved_1f1b": "interleaved",
    "zero_bubble": "zero-bubble",
    "interleaved_zero_bubble": "interleaved zb",
}


def ranked_table(assessments: Sequence[Assessment]) -> list[str]:
    """Return a table of the plans, best first."""
    columns = [
        (name, field)
        for name, field in COLUMNS
        if any(getattr(assessment.plan, field) != USUAL.get(field) for assessment in assessments)
    ]
    rows = [
        [*(name for name, _ in columns), "schedule", "GiB", "margin", "step", "tok/s/gpu", "MFU"]
    ]
    for assessment in assessments:
        plan, time = assessment.plan, assessment.time
        cells = [
            recompute_cell(plan) if field == "recompute" else _cell(getattr(plan, field))
            for _, field in columns
        ]
        cells.append(
            SHORT_SCHEDULE.get(plan.pipeline_schedule, plan.pipeline_schedule)
            if plan.pipeline_parallel > 1
            else "–"
        )
        cells.append(format_gib(assessment.memory.peak_bytes))
        cells.append(f"{100 * assessment.margin_bytes / assessment.budget.size:.0f} %")
        cells.append(format_seconds(time.step_seconds))
        cells.append(f"{time.tokens_per_second_per_gpu:,.0f}")
        cells.append("–" if time.mfu is None else f"{100 * time.mfu:.1f} %")
        rows.append(cells)
    return marked_table(rows)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "–"
    return str(value)


def plan_text(
    scenario: Scenario,
    counts: Counts,
    assessments: Sequence[Assessment],
    *,
    assumptions: Sequence[str],
    staged: StagedPlan | None = None,
    placed: PlacedPlan | None = None,
) -> str:
    """Return the answer of ``plan`` as text."""
    best = assessments[0]
    lines = [*head(scenario), ""]
    if best.verdict == "tight":
        lines += labelled("TIGHT", tight_words(scenario, best.plan))
    lines += ranked_table(assessments)
    lines.append("")
    lines += labelled("Best", time_line(best.time))
    lines += labelled("Binds", binds(best))
    if len(assessments) > 1:
        lines += labelled("Runner-up", _why_not(best, assessments[1]))
    if staged is not None:
        lines += labelled("Stages", _stages(staged, written=placed is None))
    if placed is not None:
        lines += labelled("Order", placed_words(placed))
    lines += labelled("Searched", searched(counts))
    lines += labelled("Assumed", "; ".join(assumptions))
    lines += labelled("Confidence", CONFIDENCE_WORDS[confidence(scenario)])
    return "\n".join(lines)


def tight_words(scenario: Scenario, plan: Plan) -> str:
    """Return what a tight plan means, and which option may find plans that fit."""
    words = "no plan fits with its whole interval; these may run out of memory"
    if scenario.on_gpu and plan.offload == "none":
        words += " (--allow offload also looks at plans that keep parts in the host's memory)"
    return words


def _why_not(best: Assessment, other: Assessment) -> str:
    slower = other.time.step_seconds - best.time.step_seconds
    more = other.memory.peak_bytes - best.memory.peak_bytes
    if slower < -1e-9 * best.time.step_seconds:
        return f"{format_seconds(-slower)} faster, but needs {format_bytes(more)} more memory"
    if slower <= 1e-9 * best.time.step_seconds:
        if more <= 0.0:
            return "as fast with the same memory, but splits more"
        return f"as fast, but needs {format_bytes(more)} more memory"
    before, after = amounts(best.time.parts), amounts(other.time.parts)
    lost = max(after, key=lambda name: after[name] - before[name])
    difference = after[lost] - before[lost]
    return (
        f"{format_seconds(slower)} slower ({100 * slower / best.time.step_seconds:.1f} %): "
        f"{TIME_WORDS[lost]} costs {format_seconds(difference)} more"
    )


def _stages(staged: StagedPlan, *, written: bool) -> str:
    """Return the gain of uneven stages, with their options of ``fit``."""
    options = [layers_option(staged.layer_ranges)] if len(staged.layers) > 1 else []
    options += stage_recompute_options(staged.by_stage)
    which = "the best plan" if staged.rank == 0 else f"plan {staged.rank + 1} of these"
    return (
        f"{format_seconds(staged.step)} instead of {format_seconds(staged.even_step)} a step "
        f"({100 * staged.gain:.1f} % less, simulated) with {which} and "
        f"--recompute {staged.plan.recompute} {' '.join(options)}"
        + ("; that is what -o writes" if written else "")
    )


def searched(counts: Counts) -> str:
    """Return the counts of a search in one sentence."""
    illegal = list(counts.illegal.items())
    shown = ", ".join(f"{code} {number:,}" for code, number in illegal[:MOST_REASONS])
    excluded = sum(counts.excluded.values())
    words = (
        f"{counts.enumerated:,} candidates in {format_seconds(counts.seconds)}: "
        f"{counts.priced:,} legal and priced, {counts.too_large:,} too large, "
        f"{counts.tight:,} tight, {counts.fitting:,} fit"
    )
    if excluded:
        words += f", {excluded:,} excluded by requirements"
    if counts.part_recomputed:
        words += f"; {counts.part_recomputed:,} more recompute a part of their layers"
    if counts.simulated:
        words += f"; {counts.simulated:,} simulated, {counts.bounded_away:,} cannot win"
    return words + (f"; illegal mostly by {shown}" if shown else "")


def placed_words(placed: PlacedPlan) -> str:
    """Return the gain of an order of ranks and its links, for the answer of ``plan``."""
    which = "the best plan" if placed.rank == 0 else describe_plan(placed.plan)
    shown = ", ".join(map(str, placed.order[:MOST_RANKS]))
    more = f", … ({len(placed.order):,} in all)" if len(placed.order) > MOST_RANKS else ""
    proven = "no order is better" if placed.proven else "the best of the orders that were tried"
    return (
        f"{format_seconds(placed.step)} instead of {format_seconds(placed.usual_step)} a step "
        f"({100 * placed.gain:.1f} % less, simulated) with {which} and ranks 0, 1, 2, … on the "
        f"accelerators {shown}{more}; {'; '.join(map(_talk, placed.places))}; {proven}; that is "
        "what -o writes"
    )


def _talk(place: AxisPlace) -> str:
    """Return the links of the groups of an axis, in this order and in the default order.

    >>> from planner.refinement.placement import AxisPlace
    >>> _talk(AxisPlace("tensor", 2, 1.25e9, "PCIe switch", 25e9, "UPI", 5e9))
    'tensor groups of 2 (1.25 GB a step) talk over PCIe switch, 25 GB/s, instead of UPI, 5 GB/s'
    """
    kind = "stages in lines" if place.axis == "pipeline" else f"{place.axis} groups"
    words = f"{kind} of {place.size} ({place.sent / 1e9:.3g} GB a step)"
    here = f"{place.level}, {place.bandwidth / 1e9:.3g} GB/s"
    if not place.moved:
        return f"{words} stay on {here}"
    there = f"{place.usual_level}, {place.usual_bandwidth / 1e9:.3g} GB/s"
    return f"{words} talk over {here}, instead of {there}"
