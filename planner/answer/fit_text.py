"""Text of the answer of ``fit``: short, or with all details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cost_models.plan.plan import Plan
from cost_models.pricing.prediction import MemoryPrediction
from cost_models.scenario import Scenario
from cost_models.units import format_bytes
from planner.answer.text import (
    bottleneck_line,
    budget_words,
    head,
    host_condition,
    own_stages,
    rates_line,
    short_head,
    short_plan,
    short_plan_of,
    time_line,
    verdict_lines,
)
from planner.assessment.assess import Assessment, amounts
from planner.assessment.confidence import confidence_words
from planner.assessment.host_memory import host_text
from planner.assessment.reach import Reach
from planner.assessment.verdict import WORDS
from planner.request.command import describe_plan, plan_command
from planner.run_cost.text import run_lines
from planner.text.assumed import assumed
from planner.text.bars import bars_with_room, part_bars
from planner.text.fixes import fix_lines
from planner.text.paragraphs import MOMENT_WORDS, commanded, hanging, labelled, labelled_line

if TYPE_CHECKING:
    from planner.advice.ways_out import WayOut
    from planner.run_cost.failures import TrainingRun


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
    whole_run: Mapping[str, object] | None = None,
    verbose: bool = False,
) -> str:
    """Return the answer of ``fit`` as text."""
    fits = assessment.fits
    verdict = [*_verdict_lines(assessment), *_another_plan(assessment, ways_out)]
    if verbose:
        above = [*head(scenario), "", *verdict]
        above += labelled("", " ".join([describe_plan(plan), *own_stages(scenario)]))
        above += labelled("", _where(plan, assessment))
    else:
        above = [*short_head(scenario, short_plan_of(scenario, plan)), *verdict]
    lines: list[str] = []
    if verbose:
        lines += labelled("Budget", budget_words(assessment.budget))
        lines += labelled("Memory", _memory_figures(assessment.memory))
    host = None if assessment.is_short_on_the_host_alone else host_text(assessment.host)
    said = assessment.host.unchecked and assessment.margin_bytes >= 0.0  # next to the verdict
    told = verbose or plan.offload != "none" or assessment.host.short_of
    if host is not None and told and not said:
        lines += labelled("Host", host)
    if not fits:
        shortened = [labelled_line("Largest", largest.split("; "), between="; ")]
        lines += labelled("Largest", largest) if verbose else shortened
    if verbose or fits:
        lines += labelled("Step", time_line(assessment.time))
    if verbose:
        lines += labelled("", rates_line(assessment.time))
    elif fits:
        lines += [bottleneck_line(assessment.time)]
    if job is not None:
        lines += run_lines(job, assessment, plan.world_size, verbose=verbose)
    lines += _reach(reach)
    lines += assumed(assumptions, verbose=verbose)
    if verbose:
        lines += labelled("Confidence", confidence_words(scenario))
        if not_run is not None:
            lines += labelled("Executor", f"not executable: {not_run}")
    if fits:
        lines += commanded("Next", plan_command(scenario, plan, whole_run))
    others = len(above) + len(lines) + (0 if fits else len(ways_out) + 1)
    most = None if verbose else bars_with_room(others)
    bars = part_bars(amounts(assessment.memory.parts), assessment.budget.size, most)
    lines = [*above, *bars, *lines]
    if not fits:
        from planner.advice.ways_out import fixes_of  # searches: loaded where they are needed

        lines += fix_lines(fixes_of(scenario, assessment, ways_out), len(lines), verbose=verbose)
    return "\n".join(lines)


def _verdict_lines(assessed: Assessment) -> list[str]:
    """Return the verdict, which names the host where that alone is too small."""
    lines = verdict_lines(assessed)
    if not assessed.is_short_on_the_host_alone:
        unchecked = assessed.margin_bytes >= 0.0 and assessed.host.unchecked
        return lines + (labelled("", host_condition(assessed)) if unchecked else [])
    label = f"{WORDS['does_not_fit']} "
    room = lines[0].removeprefix(label), *(line.strip() for line in lines[1:])
    return [
        *hanging(label, f"the host: {host_text(assessed.host)}"),
        *labelled("", f"it fits the accelerator: {' '.join(room)}"),
    ]


def _another_plan(assessment: Assessment, ways_out: Sequence[WayOut]) -> list[str]:
    """Return the first plan with which the same training fits on the same cluster, if any."""
    if assessment.verdict != "does_not_fit":
        return []
    found = next((way for way in ways_out if way.is_another_plan), None)
    if found is None:
        return []
    options = min(found.options, short_plan(found.plan), key=len)
    peak = format_bytes(found.peak_bytes)
    return labelled("", f"FITS with another plan: {peak} with {options}")


def _memory_figures(memory: MemoryPrediction) -> str:
    figures = (
        ("live", memory.peak_allocated_bytes),
        ("reserved by torch", memory.peak_reserved_bytes),
        ("in nvidia-smi", memory.device_used_bytes),
    )
    return ", ".join(f"{format_bytes(size)} {words}" for words, size in figures)


def _where(plan: Plan, assessment: Assessment) -> str:
    memory = assessment.memory
    where = MOMENT_WORDS[memory.moment]
    if plan.pipeline_parallel > 1:
        where = f"stage {memory.limiting_stage} is the fullest, {where}"
    return f"peak {where}"


def _reach(reach: Reach | None) -> list[str]:
    parts = []
    if reach is not None and reach.largest_micro_batch_size:
        parts.append(f"micro-batch size {reach.largest_micro_batch_size:,}")
    if reach is not None and reach.longest_seq_len:
        parts.append(f"sequences of {reach.longest_seq_len:,} tokens")
    return labelled("Maximum", ", or ".join(parts) + ", with this plan") if parts else []
