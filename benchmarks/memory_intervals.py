"""Intervals of published peaks, stated and shortest: ``python -m benchmarks.memory_intervals``.

For every interval of ``cost_models/uncertainty.py``: how many published runs it is about, the share
of them inside it, and the shortest interval around the prediction that holds 90 % of them, either
end at least 2 %. That of what a device shows is about a trainer's runs of every kind of
measurement; that of live tensors about those that report these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd

import planner
from cost_models.uncertainty import Spread, memory_spread

HELD: Final = 0.9  # share of the runs
LEAST: Final = 0.02  # of either end


def shortest(errors: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """Return how far below and above the shortest interval reaches.

    ``errors``: measured / predicted - 1 of every run; ``weights``: what each run counts.

    >>> errors = np.array([-0.5, -0.03, -0.01, 0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05])
    >>> shortest(errors)
    (0.03, 0.05)
    >>> shortest(errors, np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]))
    (0.02, 0.05)
    """
    shares = np.ones(len(errors)) if weights is None else weights
    needed = HELD * float(shares.sum()) * (1.0 - 1e-9)
    order = np.argsort(errors)
    errors, shares = errors[order], shares[order]
    found = []
    for low in {LEAST, *(-errors[errors < -LEAST])}:
        held = np.cumsum(np.where(errors >= -low, shares, 0.0))
        if held[-1] >= needed:
            found.append((float(low), max(LEAST, float(errors[np.argmax(held >= needed)]))))
    return min(found, key=lambda ends: (sum(ends), ends))


def beside(spread: Spread, errors: np.ndarray) -> str:
    """Return a line: runs, the stated interval, how many are inside, the shortest interval."""
    inside = float(np.mean((errors >= -spread.below) & (errors <= spread.above)))
    below, above = shortest(errors)
    return (
        f"{len(errors):4d}   -{100 * spread.below:4.1f} % +{100 * spread.above:5.1f} %  "
        f"{100 * inside:5.1f} %   -{100 * below:4.1f} % +{100 * above:5.1f} %"
    )


def compared_runs() -> pd.DataFrame:
    """Return the published runs whose peak is compared, with ``error`` as in ``shortest``."""
    rows = planner.validate(what="memory").rows
    rows = rows[rows.memory_error.notna() & ~rows.partial]
    return rows.assign(error=1.0 / (1.0 + rows.memory_error.astype(float)) - 1.0)


def by_interval(rows: pd.DataFrame) -> Iterator[tuple[Spread, np.ndarray]]:
    """Yield every stated interval with the errors of the runs that it is about."""
    names, kinds = list(rows.software), list(rows.memory_kind)
    device = [memory_spread(name) for name in names]
    own = [memory_spread(name, kind) for name, kind in zip(names, kinds, strict=True)]
    for spreads in (device, own):
        for spread in sorted(set(spreads), key=lambda spread: spread.source):
            if spreads is device or spread not in device:
                about = np.array([one == spread for one in spreads])
                yield spread, rows.error.to_numpy()[about]


def main() -> None:
    """Print the table."""
    print(f"{'':<66} runs   stated             inside   shortest")
    for spread, errors in by_interval(compared_runs()):
        print(f"{spread.source:<66} {beside(spread, errors)}")


if __name__ == "__main__":
    main()
