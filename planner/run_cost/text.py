"""Text of a training run: cost without failures, and with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cost_models.units import format_bytes, format_count, format_seconds
from planner.assessment.assess import Assessment
from planner.run_cost.training_run import DAY
from planner.text.paragraphs import labelled

if TYPE_CHECKING:
    from planner.run_cost.failures import RunCostWithFailures, TrainingRun
    from planner.run_cost.training_run import RunCost

WATT_HOUR: Final = 3600.0


def dollars(value: float | None) -> str:
    """Format an amount of money; unknown is a dash.

    >>> dollars(1.5), dollars(801.2), dollars(2112859.0)
    ('$1.50', '$801', '$2,110,000')
    """
    if value is None:
        return "–"
    return f"${value:,.2f}" if value < 100 else f"${amount(value)}"


def amount(value: float | None) -> str:
    """Format a number with three figures; unknown is a dash.

    >>> amount(0.5), amount(12.34), amount(29507.0)
    ('0.5', '12.3', '29,500')
    """
    if value is None:
        return "–"
    return f"{value:,.3g}" if value < 100 else f"{float(f'{value:.3g}'):,.0f}"


def days(seconds: float) -> str:
    """Format the days of a run.

    >>> days(0.0355 * DAY), days(1.66 * DAY), days(6147.8 * DAY)
    ('0.0355', '1.7', '6,150')
    """
    count = seconds / DAY
    return f"{count:,.1f}" if 1 <= count < 100 else amount(count)


def duration(seconds: float) -> str:
    """Format the time of a run: days, below one day hours or less.

    >>> duration(1.66 * DAY), duration(0.0355 * DAY)
    ('1.7 days', '51.1 min')
    """
    return f"{days(seconds)} days" if seconds >= DAY else format_seconds(seconds)


def run_lines(
    run: TrainingRun, assessment: Assessment, num_gpus: int, *, verbose: bool = True
) -> list[str]:
    """Return the paragraphs of a training run: days, hours, dollars, energy; then with failures."""
    if not verbose:
        return labelled("Job", short_words(run))
    lines = labelled("Job", run_words(run.cost, assessment, num_gpus))
    return lines + labelled("Failures", failure_words(run.with_failures))


def short_words(run: TrainingRun) -> str:
    """Return days, hours, dollars and CO2 of a training run with its failures."""
    tokens, whole = format_count(run.cost.tokens).replace(".00", ""), run.with_failures
    words = f"{tokens} tokens: {duration(whole.seconds)}, {amount(whole.gpu_hours)} GPU hours"
    if whole.dollars is not None:
        words += f", {dollars(whole.dollars)}"
    if whole.co2_kg is not None:
        words += f", {amount(whole.co2_kg / 1e3)} t CO2"
    return f"{words} (with failures){exceeded_limits(whole)}"


def run_words(cost: RunCost, assessment: Assessment, num_gpus: int) -> str:
    """Return a training run without failures in one sentence."""
    words = (
        f"{format_count(cost.tokens)} tokens are {cost.steps:,} steps: "
        f"{duration(cost.seconds)}, {amount(cost.gpu_hours)} accelerator hours"
    )
    if cost.dollars is not None:
        time = assessment.time
        low, high = (
            cost.dollars * seconds / time.step_seconds
            for seconds in (time.low_seconds, time.high_seconds)
        )
        words += f", {dollars(cost.dollars)} (likely {dollars(low)} to {dollars(high)})"
    words += energy_words(cost)
    peak = format_bytes(assessment.memory.peak_bytes)
    return f"{words}; on {num_gpus:,} accelerators with a peak of {peak}"


def energy_words(cost: RunCost | RunCostWithFailures) -> str:
    """Return energy and CO2, as far as known."""
    if cost.joules is None:
        return ""
    words = f", {amount(cost.joules / (1e6 * WATT_HOUR))} MWh of accelerators"
    return words if cost.co2_kg is None else f"{words}, {amount(cost.co2_kg / 1e3)} t CO2"


def failure_words(run: RunCostWithFailures) -> str:
    """Return failures, checkpoints and the cost with them in one sentence."""
    stall, written = run.checkpoint_stall_seconds, run.checkpoint_write_seconds
    behind = f" and takes {format_seconds(written)} to write" if written > stall else ""
    words = (
        f"one in {format_seconds(run.seconds_between_failures)}; a checkpoint of "
        f"{format_bytes(run.checkpoint_bytes)} every {run.checkpoint_every_steps:,} "
        f"steps ({format_seconds(run.checkpoint_interval_seconds)}) stops training for "
        f"{format_seconds(stall)}{behind}; {format_seconds(run.restart_seconds)} to start "
        f"again: {100 * run.goodput:.1f} % of the time is progress, {amount(run.failures)} "
        f"failures, {duration(run.seconds)}, {amount(run.gpu_hours)} accelerator hours"
    )
    if run.dollars is not None:
        words += f", {dollars(run.dollars)}"
    return words + energy_words(run) + exceeded_limits(run)


def exceeded_limits(run: RunCostWithFailures) -> str:
    """Return the options whose limits a training run exceeds."""
    over = [
        option
        for within, option in ((run.within_days, "--days"), (run.within_budget, "--budget"))
        if within is False
    ]
    return f": more than {' and '.join(over)}" if over else ""
