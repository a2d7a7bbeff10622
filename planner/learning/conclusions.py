"""What runs say about each mechanism, and their predictions before and after learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cost_models.units import format_gib, format_seconds
from hardware_profiles.software.trainer import SoftwareProfile
from planner.learning.effects import Effects, Logs, MeasuredRun
from planner.learning.mechanisms import Prior, figure_of
from planner.learning.posterior import Posterior, option_priors
from planner.learning.refinement import TOLD, LearnedFigures

SURE: Final = 0.9  # probability of a conclusion
SAME: Final = 0.02  # nats between posterior and prior: nothing was learned
NINETY: Final = 1.645  # standard deviations


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the runs say about one mechanism."""

    mechanism: str
    verdict: str  # concluded, leaning, unknown
    value: str  # option, or value of the figure
    words: str  # probability or range, and what it was before


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run before and after learning, in seconds and bytes; None: not measured."""

    run: str
    step: float | None
    step_before: float
    step_after: float
    step_explained: float  # by mechanisms alone
    peak: float | None
    peak_before: float
    peak_after: float


def compared_runs(
    runs: Sequence[MeasuredRun], before: Logs, explained: Logs, after: Logs
) -> list[ComparedRun]:
    """Return the runs with their predictions before and after learning."""
    return [
        ComparedRun(
            run.case.row.name,
            run.step,
            math.exp(before[n, 0]),
            math.exp(after[n, 0]),
            math.exp(explained[n, 0]),
            run.peak,
            math.exp(before[n, 1]),
            math.exp(after[n, 1]),
        )
        for n, run in enumerate(runs)
    ]


def about_switches(
    known: Effects, found: Posterior, learned: LearnedFigures, prior: Prior
) -> list[Conclusion]:
    """Return what the runs say about each switch."""
    conclusions = []
    for number, (switch, names) in enumerate(zip(known.switches, known.options, strict=True)):
        before = np.exp(option_priors(len(names), prior))
        after = found.of_option(number, len(names))
        weighed = len(set(found.combinations[:, number])) > 1
        top = learned.options[number]
        told = np.where(after > 0.0, after * np.log(np.maximum(after, 1e-300) / before), 0.0).sum()
        if not weighed or told < SAME:
            verdict = "unknown"
        else:
            verdict = "concluded" if after[top] >= SURE else "leaning"
        words = f"{100 * after[top]:.0f} % sure, {100 * before[top]:.0f} % before"
        if after[top] < after.max():  # the sum of effects prefers another one
            verdict, words = "leaning", f"in the combination that explains the runs best; {words}"
        if not weighed:
            words = "no option changes these runs, or their plans allow no other"
        conclusions.append(Conclusion(switch.name, verdict, names[top], words))
    return conclusions


def about_rates(
    known: Effects,
    found: Posterior,
    learned: LearnedFigures,
    software: SoftwareProfile,
    prior: Prior,
) -> list[Conclusion]:
    """Return what the runs say about each rate."""
    conclusions = []
    deviations = np.sqrt(np.diag(found.covariance))
    for number, rate in enumerate(known.rates):
        told = deviations[number]
        own = figure_of(software, rate.figure)
        value = learned.figures.get(rate.figure, own)
        verdict = "unknown" if told >= TOLD else "concluded" if told < 0.5 else "leaning"
        around = rate_range(rate.figure, known, found, learned, software, prior)
        words = f"{around}; the profile has {_shown(own, rate.shown_as)}"
        conclusions.append(Conclusion(rate.name, verdict, _shown(value, rate.shown_as), words))
    return conclusions


def rate_range(
    figure: str,
    known: Effects,
    found: Posterior,
    learned: LearnedFigures,
    software: SoftwareProfile,
    prior: Prior,
) -> str:
    """Return the 90 % range of a rate under the most likely options."""
    number = next(n for n, rate in enumerate(known.rates) if rate.figure == figure)
    rate, width = known.rates[number], prior.widths[figure]
    deviation = math.sqrt(max(0.0, found.covariance[number, number]))
    low, high = (
        rate.value(software, width * (learned.rates[number] + sign * NINETY * deviation))
        for sign in (-1.0, 1.0)
    )
    return f"{_shown(low, rate.shown_as)} to {_shown(high, rate.shown_as)}"


def _shown(value: float, unit: str) -> str:
    """Return a figure with its unit.

    >>> _shown(8e-06, "s"), _shown(0.764, ""), _shown(5.4e8, "bytes")
    ('8 µs', '0.76', '0.5 GiB')
    """
    if value == 0.0:
        return "none"
    if unit == "s":
        return format_seconds(value)
    return f"{format_gib(value)} GiB" if unit == "bytes" else f"{value:.2g}"
