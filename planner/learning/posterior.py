r"""Posterior of switches and rates, from measured runs.

    y = b + Σ_k e_k[o_k] + J x + noise      x ~ N(0, 1)      noise ~ N(0, s²)

Symbols   y  log measured step times and peaks   b  log predictions of the profile
          e_k[o]  effect of option o of switch k   J  effect of one prior width of each rate
          s  noise that no mechanism explains: of time and of memory

For each combination of options the rates are a linear regression, whose evidence is

    N(y - b - Σ e;  0,  J Jᵀ + diag(s²))

times the prior of the options: 1 - p for the profile's own, p shared by all others.

Leaves out: that effects do not add up where a maximum or an overlap changes sides (``refinement``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from planner.learning.effects import Effects, Logs
from planner.learning.mechanisms import Prior

MOST: Final = 200_000  # combinations
TELLS: Final = 0.004  # of a logarithm: an option with smaller effects on all runs is not weighed


@dataclass(frozen=True, slots=True)
class Posterior:
    """Weights of the combinations of options, and the rates under each."""

    combinations: np.ndarray[Any, np.dtype[np.int64]]  # (combinations, switches): option
    weights: Logs  # (combinations,), sum 1
    means: Logs  # (combinations, rates), prior widths
    covariance: Logs  # (rates, rates), prior widths; the same under every combination
    log_evidence: float

    @property
    def best(self) -> int:
        """The most likely combination."""
        return int(np.argmax(self.weights))

    def of_option(self, switch: int, count: int) -> Logs:
        """Return the probability of each option of a switch."""
        chosen = self.combinations[:, switch, None] == np.arange(count)
        return np.asarray(self.weights @ chosen)

    @property
    def mean(self) -> Logs:
        """Mean of the rates, prior widths."""
        return np.asarray(self.weights @ self.means)

    @property
    def deviation(self) -> Logs:
        """Standard deviation of the rates, prior widths; 1: nothing was learned."""
        between = self.weights @ (self.means - self.mean) ** 2
        return np.asarray(np.sqrt(np.diag(self.covariance) + between))


Flags = np.ndarray[Any, np.dtype[np.bool_]]


def flat(values: Logs, known: Flags) -> Logs:
    """Return the measured quantities of (..., runs, 2) along one axis."""
    return values[..., known]


def noise_of(known: Flags, prior: Prior) -> Logs:
    """Return the noise of every measured quantity."""
    both = np.broadcast_to([prior.noise.time, prior.noise.memory], known.shape)
    return np.asarray(both[known])


def option_priors(count: int, prior: Prior) -> Logs:
    """Return log priors of the options of a switch; the first is the profile's own."""
    rest = math.log(prior.departs / max(1, count - 1))
    return np.array([math.log(1.0 - prior.departs), *[rest] * (count - 1)])


def combinations_of(effects: Effects, known: Flags) -> Any:
    """Return all combinations of options that a run could tell apart from the profile's own.

    An option that a run's plan does not allow (NaN) is left out: the trainer ran that plan.
    """
    choices = []
    for change in effects.by_option:
        seen = flat(change, known)
        allowed = [not np.isnan(option).any() for option in change]
        tells = np.abs(np.nan_to_num(seen)).max(axis=1, initial=0.0) > TELLS
        choices.append([0, *(n for n in range(1, len(change)) if allowed[n] and tells[n])])
    while math.prod(map(len, choices)) > MOST:
        max(choices, key=len).pop()
    found = list(product(*choices))
    return np.array(found, dtype=np.int64).reshape(len(found), len(choices))


def posterior(effects: Effects, measured: Logs, prior: Prior) -> Posterior:
    """Return the posterior after runs; ``measured``: logarithms (runs, 2), NaN: not measured."""
    known = ~np.isnan(measured) & ~np.isnan(effects.base)
    combinations = combinations_of(effects, known)
    residual = (measured - effects.base)[known]
    changes = np.zeros((len(combinations), len(residual)))
    log_prior = np.zeros(len(combinations))
    for number, change in enumerate(effects.by_option):
        picked = combinations[:, number]
        changes += np.nan_to_num(flat(change, known))[picked]
        log_prior += option_priors(len(change), prior)[picked]
    slopes = np.nan_to_num(flat(effects.by_rate, known)).T  # (quantities, rates)
    return regression(combinations, residual - changes, slopes, noise_of(known, prior), log_prior)


def regression(
    combinations: Any, residuals: Logs, slopes: Logs, noise: Logs, log_prior: Logs
) -> Posterior:
    """Return the posterior of rates under every combination, and the combinations' weights.

    ``residuals``: (combinations, quantities); ``slopes``: (quantities, rates).
    """
    spread = slopes @ slopes.T + np.diag(noise**2)
    inverse = np.linalg.inv(spread)
    _, log_size = np.linalg.slogdet(spread)
    weighted = residuals @ inverse
    constant = log_size + len(noise) * math.log(2.0 * math.pi)
    log_joint = log_prior - 0.5 * ((residuals * weighted).sum(axis=1) + constant)
    top = float(log_joint.max())
    weights = np.exp(log_joint - top)
    total = float(weights.sum())
    return Posterior(
        combinations=combinations,
        weights=weights / total,
        means=weighted @ slopes,
        covariance=np.eye(slopes.shape[1]) - slopes.T @ inverse @ slopes,
        log_evidence=top + math.log(total),
    )


def predictive(effects: Effects, run: int, found: Posterior) -> tuple[Logs, Logs]:
    """Return mean and covariance (2, 2) of a run's logarithms, without noise.

    The covariance is of everything that the posterior leaves open: options of the combinations,
    options that no run has told apart, rates.
    """
    return _predictive(
        effects.base[run],
        [np.nan_to_num(change[:, run]) for change in effects.by_option],
        np.nan_to_num(effects.by_rate[:, run]),
        found,
    )


def _predictive(
    base: Logs, by_option: Sequence[Logs], by_rate: Logs, found: Posterior
) -> tuple[Logs, Logs]:
    values = base + found.means @ by_rate
    for number, change in enumerate(by_option):
        values = values + change[found.combinations[:, number]]
    mean = found.weights @ values
    apart = values - mean
    between = (found.weights[:, None] * apart).T @ apart
    return mean, between + by_rate.T @ found.covariance @ by_rate
