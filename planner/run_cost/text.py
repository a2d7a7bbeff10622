"""A whole run as text: what it takes without failures, and by the clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cost_models.units import format_bytes, format_count, format_seconds
from planner.assessment.assess import Assessment
from planner.run_cost.training_run import DAY
from planner.text.paragraphs import labelled

WATT_HOUR: Final = 3600.0


def dollars(value: float | None) -> str:
    """Print an amount of money; unknown is a dash."""
    if value is None:
        return "–"
    return f"${value:,.2f}" if value < 100 else f"${value:,.0f}"


def amount(value: float | None) -> str:
    """Print a number with three figures or more."""
    if value is None:
        return "–"
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def run_lines(job: Mapping[str, Any], assessment: Assessment, num_gpus: int) -> list[str]:
    """Return the paragraphs of a whole run: days, hours, dollars, energy; then with failures."""
    lines = labelled("Job", job_words(job, assessment, num_gpus))
    return lines + labelled("Failures", failure_words(job["with_failures"]))


def job_words(job: Mapping[str, Any], assessment: Assessment, num_gpus: int) -> str:
    """The whole run in one sentence, nothing failing."""
    words = (
        f"{format_count(job['tokens'])} tokens are {job['steps']:,} steps: "
        f"{job['seconds'] / DAY:,.1f} days, {job['gpu_hours']:,.0f} accelerator hours"
    )
    if job["dollars"] is not None:
        time = assessment.time
        low, high = (
            job["dollars"] * seconds / time.step_seconds
            for seconds in (time.low_seconds, time.high_seconds)
        )
        words += f", {dollars(job['dollars'])} (likely {dollars(low)} to {dollars(high)})"
    words += energy_words(job)
    peak = format_bytes(assessment.memory.peak_bytes)
    return f"{words}; on {num_gpus:,} accelerators with a peak of {peak}"


def energy_words(job: Mapping[str, Any]) -> str:
    """Energy, and CO2 where it is known."""
    if job["joules"] is None:
        return ""
    words = f", {amount(job['joules'] / (1e6 * WATT_HOUR))} MWh of accelerators"
    return words if job["co2_kg"] is None else f"{words}, {amount(job['co2_kg'] / 1e3)} t CO2"


def failure_words(run: Mapping[str, Any]) -> str:
    """What failures and checkpoints add, in one sentence."""
    stall, written = run["checkpoint_stall_seconds"], run["checkpoint_write_seconds"]
    behind = f", written in {format_seconds(written)} behind it" if written > stall else ""
    words = (
        f"one in {format_seconds(run['seconds_between_failures'])}; a checkpoint of "
        f"{format_bytes(run['checkpoint_bytes'])} every {run['checkpoint_every_steps']:,} steps "
        f"({format_seconds(run['checkpoint_interval_seconds'])}) stops training for "
        f"{format_seconds(stall)}{behind}; {format_seconds(run['restart_seconds'])} to start "
        f"again: {100 * run['goodput']:.1f} % of the time is progress, {amount(run['failures'])} "
        f"failures, {run['seconds'] / DAY:,.1f} days, {run['gpu_hours']:,.0f} accelerator hours"
    )
    if run["dollars"] is not None:
        words += f", {dollars(run['dollars'])}"
    over = [
        option
        for name, option in (("within_days", "--days"), ("within_budget", "--budget"))
        if run[name] is False
    ]
    told = f": more than {' and '.join(over)}" if over else ""
    return words + energy_words(run) + told
