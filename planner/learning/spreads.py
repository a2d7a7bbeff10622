r"""90 % intervals after learning: as wide as the runs were wrong before it, and still are after it.

    s² = (v s0² + Σ r²) / (v + n) + f² Σ d² / n

Symbols   d  log(measured / predicted) of the n learned runs before learning
          r  the same after it; of step times as the other runs predict them (``unexplained``)
          s0    noise that no mechanism explains   v  runs for which it counts
          f     share of the errors before learning that other runs keep

The interval reaches from exp(-below · s) to exp(above · s) times the prediction; below and above
hold 90 % of the other runs of sources that were left out (``python -m benchmarks.accuracy.learn
--fit``).

Leaves out: that a plan unlike all learned ones is further off than one between them.
"""

from __future__ import annotations

import math

import numpy as np

from hardware_profiles.software.profile import LearnedSpread
from planner.learning.effects import Logs
from planner.learning.mechanisms import Prior

QUANTITIES = ("time", "memory")


def deviations(measured: Logs, before: Logs, after: Logs, prior: Prior) -> Logs:
    """Return s of step time and of peak memory; arguments: logarithms (runs, 2), NaN: unknown."""
    left, wrong = measured - after, measured - before
    known = ~np.isnan(left) & ~np.isnan(wrong)
    count = known.sum(axis=0)
    squares = np.where(known, left, 0.0) ** 2
    first = np.where(known, wrong, 0.0) ** 2
    noise = np.array([prior.noise.time, prior.noise.memory])
    counted = prior.noise.runs
    own = (counted * noise**2 + squares.sum(axis=0)) / (counted + count)
    kept = prior.noise.kept**2 * first.sum(axis=0) / np.maximum(count, 1)
    return np.asarray(np.sqrt(own + kept))


def learned_spreads(
    measured: Logs, before: Logs, after: Logs, prior: Prior
) -> dict[str, LearnedSpread]:
    """Return the intervals of the quantities that any run measured, relative to predictions."""
    found = {}
    sizes = deviations(measured, before, after, prior)
    for quantity, name in enumerate(QUANTITIES):
        runs = int((~np.isnan(measured[:, quantity])).sum())
        ends = prior.spreads(runs)
        if ends is not None:
            multiple, size = getattr(ends, name), float(sizes[quantity])
            below, above = -math.expm1(-multiple.below * size), math.expm1(multiple.above * size)
            found[name] = LearnedSpread(
                round(below, 3), min(10.0, round(above, 3)), multiple.source, runs
            )
    return found
