"""The most likely combinations of mechanisms, priced exactly and weighed again.

One Gauss-Newton step from the rates that the sum of effects gives: the residual of the exact price
replaces that of the sum, with the same slopes. Far from the profile that step may overshoot: of the
step, its start, and points between them and the profile's rates, each priced exactly, the most
likely counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hardware_profiles.progress import tracked
from hardware_profiles.software.trainer import SoftwareProfile
from planner.learning.effects import Effects, Logs, log_predictions
from planner.learning.mechanisms import Prior
from planner.learning.posterior import Posterior, noise_of, option_priors, regression
from planner.validation.rows.case import Case

PRICED: Final = 4  # combinations
LEAST: Final = 0.01  # weight of one that is priced
TOLD: Final = 0.95  # of its prior width: a rate with a larger deviation stays the profile's


@dataclass(frozen=True, slots=True)
class LearnedFigures:
    """The most likely options, and the rates that runs told."""

    options: tuple[int, ...]  # of every switch
    rates: Logs  # prior widths
    weight: float  # of the combination among those priced exactly
    figures: Mapping[str, Any]


def figures_of(
    effects: Effects, software: SoftwareProfile, options: Sequence[int], rates: Logs, prior: Prior
) -> dict[str, Any]:
    """Return the changed figures of a combination."""
    figures: dict[str, Any] = {}
    for switch, option in zip(effects.switches, options, strict=True):
        if option:
            figures |= list(switch.options.values())[option - 1]
    changed = software.changed(figures)
    for rate, x in zip(effects.rates, rates, strict=True):
        if x:
            figures[rate.figure] = rate.value(changed, float(x) * prior.widths[rate.figure])
    return figures


def refined(
    effects: Effects, cases: Sequence[Case], measured: Logs, found: Posterior, prior: Prior
) -> LearnedFigures:
    """Return the figures of the combination that explains the runs best."""
    software = cases[0].scenario.software
    told = np.sqrt(np.diag(found.covariance)) < TOLD
    order = np.argsort(-found.weights)[:PRICED]
    order = order[found.weights[order] >= LEAST * found.weights[order[0]]]
    kept, residuals, starts, logs = [], [], [], []
    for number in tracked(order.tolist(), "combination {number} of {total}"):
        options, start = found.combinations[number], np.where(told, found.means[number], 0.0)
        figures = figures_of(effects, software, options, start, prior)
        exact = log_predictions(cases, figures)
        if np.isnan(exact[~np.isnan(measured)]).any():
            continue  # such a trainer refuses the plan that ran
        kept.append(options)
        residuals.append(measured - exact)
        starts.append(start)
        own = zip(options, effects.by_option, strict=True)
        logs.append(sum(option_priors(len(change), prior)[option] for option, change in own))
    if not kept:
        none = np.zeros(len(effects.rates))
        return LearnedFigures((0,) * len(effects.switches), none, 1.0, {})
    known = ~np.isnan(measured) & ~np.isnan(effects.base)
    slopes = np.nan_to_num(effects.by_rate[:, known]).T * told
    left = np.stack([r[known] for r in residuals]) + np.stack(starts) @ slopes.T
    again = regression(np.stack(kept), left, slopes, noise_of(known, prior), np.array(logs))
    best = again.best
    options = tuple(int(option) for option in kept[best])
    step, start = np.where(told, again.means[best], 0.0), starts[best]
    noise = noise_of(known, prior)
    rates, most = 0.0 * start, -np.inf
    chosen: dict[str, Any] = {}
    for tried in (step, 0.5 * (step + start), start, 0.5 * start, 0.25 * start, 0.0 * start):
        changed = figures_of(effects, software, options, tried, prior)
        wrong = (measured - log_predictions(cases, changed))[known]
        likely = -0.5 * float(((wrong / noise) ** 2).sum() + (tried**2).sum())
        if likely > most:
            rates, chosen, most = tried, changed, likely
    return LearnedFigures(options, rates, float(again.weights[best]), chosen)
