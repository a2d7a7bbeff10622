"""Intervals for sources that were not compared yet, from the errors of those that were.

The size of an error is |log(measured / predicted)|; that of a source, the mean over its runs of a
kind (all properties of a ``Rule`` alike). The size expected of a new source is a weighted mean of
logarithms of the sizes of the sources of its kind, which shrinks towards a prior: that of all
sources, and the differences that the properties make, each of which shrinks towards none. A source
weighs n / (n + few) with n runs, a prior ``TOWARDS``: a kind that one source alone has met is
expected to err nearly as much as its properties say.

Ends of intervals are multiples of the expected size, the same for all kinds: the shortest pair that
holds 90 % of the first predictions, each divided by the size expected without its source, with a
source counted as its runs, at most ``MOST``. First predictions (``blind``) are those made before
anybody had looked at the run; the formulas have learned from all others, so these say how kinds
differ but not how far off a new source will be. The source to come counts as one that is outside,
as split conformal prediction has it: of few sources, the quantile of those at hand is too small.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from cost_models.uncertainty import ANY

HELD: Final = 0.9  # share of the runs
NARROWEST: Final = 0.02  # either end of ``shortest``
TOWARDS: Final = 2.0  # sources that a prior weighs
MOST: Final = 10  # runs that a source counts as
# size of the errors of a source: one run within 4 % may be luck, and its logarithm would pull down
# the size of its kind. From 0.01 to 0.08 intervals become narrower; above 0.04 those of unknown
# trainers hold fewer peaks of the next round (88 % at 0.04, 85 % at 0.08)
LEAST: Final = 0.04
Ends = tuple[float, float]  # multiples of the expected size, below and above


@dataclass(frozen=True, slots=True)
class Sizes:
    """Logarithms of expected sizes: one of all sources, the others for every cell."""

    every: float
    by_property: dict[str, np.ndarray]
    of_kind: np.ndarray


@dataclass(frozen=True, slots=True)
class Rule:
    """Properties of a run that make its kind (columns), and what the prior of a kind has of each.

    ``shares``: of the difference between runs with the property and all runs. ``few``: runs with
    which a source weighs half.
    """

    properties: tuple[str, ...]
    shares: tuple[float, ...]
    few: float = 4.0

    def with_cells(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the runs with the number of their source's runs of a kind."""
        return rows.assign(cell=rows.groupby([*self.properties, "source_group"]).ngroup())

    def cells_of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return kind, source, runs and size of errors of every source's runs of a kind.

        Columns ``<property>_code`` and ``kind_code`` number the groups of ``expected_sizes``.
        """
        grouped = rows.groupby("cell")
        cells = grouped[[*self.properties, "source_group"]].first()
        size = np.log1p(rows.error).abs().groupby(rows.cell).mean()
        codes = {f"{name}_code": cells.groupby(name).ngroup() for name in self.properties}
        codes["kind_code"] = cells.groupby(list(self.properties)).ngroup()
        return cells.assign(size=np.maximum(size, LEAST), runs=grouped.size(), **codes)

    def expected_sizes(self, cells: pd.DataFrame, used: np.ndarray) -> Sizes:
        """Return the sizes expected of a new source from the cells that are ``used``."""
        runs = cells.runs.to_numpy()
        weights = used * runs / (runs + self.few)
        logs = np.log(cells["size"].to_numpy())
        every = float(np.average(logs, weights=weights))

        def shrunk(name: str, prior: np.ndarray) -> np.ndarray:
            codes = cells[f"{name}_code"].to_numpy()
            total, weight = np.bincount(codes, weights * logs), np.bincount(codes, weights)
            return np.asarray((total[codes] + TOWARDS * prior) / (weight[codes] + TOWARDS))

        by_property = {n: shrunk(n, np.full(len(cells), every)) for n in self.properties}
        prior = np.full(len(cells), every)
        for name, share in zip(self.properties, self.shares, strict=True):
            prior = prior + share * (by_property[name] - every)
        return Sizes(every, by_property, shrunk("kind", prior))

    def relative_errors(
        self, rows: pd.DataFrame, cells: pd.DataFrame, used: np.ndarray
    ) -> pd.Series:
        """Return errors of first predictions over the sizes expected without their source.

        Both as logarithms, of the cells ``used``.
        """
        source, cell = cells.source_group.to_numpy(), rows.cell.to_numpy()
        sizes = np.full(len(cells), np.nan)
        for one in np.unique(source[used]):
            own = source == one
            sizes[own] = np.exp(self.expected_sizes(cells, used & ~own).of_kind)[own]
        return (np.log1p(rows.error) / sizes[cell])[used[cell] & rows.blind.to_numpy()]

    def ends_of(self, rows: pd.DataFrame, cells: pd.DataFrame, used: np.ndarray) -> Ends:
        """Return the ends of intervals in expected sizes, from the cells that are ``used``."""
        relative = self.relative_errors(rows, cells, used)
        return shortest(relative.to_numpy(), *counted(rows.loc[relative.index]))

    def intervals(
        self, rows: pd.DataFrame, cells: pd.DataFrame, used: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how far every run's interval reaches below and above, from the cells ``used``."""
        below, above = self.ends_of(rows, cells, used)
        sizes = np.exp(self.expected_sizes(cells, used).of_kind)[rows.cell.to_numpy()]
        return -np.expm1(-below * sizes), np.expm1(above * sizes)

    def left_out(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Add to every run the interval that the other sources give, and whether it is inside."""
        cells = self.cells_of(rows)
        source, cell = cells.source_group.to_numpy(), rows.cell.to_numpy()
        found = rows.assign(below=np.nan, above=np.nan)
        for one in np.unique(source):
            used = source != one
            below, above = self.intervals(rows, cells, used)
            own = ~used[cell]
            found.loc[own, "below"], found.loc[own, "above"] = below[own], above[own]
        inside = (found.error >= -found.below) & (found.error <= found.above)
        others = found.groupby(list(self.properties)).source_group.transform("nunique") - 1
        return found.assign(inside=inside, others=others)

    def kinds(self, rows: pd.DataFrame) -> Iterator[tuple[tuple[object, ...], float, pd.DataFrame]]:
        """Yield kinds (ANY: every value), their expected sizes, and the cells of whole ones."""
        cells = self.cells_of(rows)
        sizes = self.expected_sizes(cells, np.ones(len(cells), dtype=bool))
        yield (ANY,) * len(self.properties), float(np.exp(sizes.every)), cells[:0]
        for place, name in enumerate(self.properties):
            logs = pd.Series(sizes.by_property[name], index=cells.index)
            for value, log in logs.groupby(cells[name]).first().items():
                kind: list[object] = [ANY] * len(self.properties)
                kind[place] = value
                yield tuple(kind), float(np.exp(log)), cells[:0]
        logs = pd.Series(sizes.of_kind, index=cells.index)
        for kind_, part in cells.groupby(list(self.properties)):
            yield tuple(kind_), float(np.exp(logs[part.index[0]])), part

    def table(self, rows: pd.DataFrame, columns: tuple[str, ...], ends: tuple[Ends, ...]) -> str:
        """Return the text of a file of intervals.

        ``columns``: of the file; ``ends``: pairs of ends in expected sizes, a pair of columns each.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        for kind, size, part in self.kinds(rows):
            words = [int(value) if isinstance(value, bool | np.bool_) else value for value in kind]
            spreads = [
                f"{end:.3f}"
                for below, above in ends
                for end in (-np.expm1(-below * size), np.expm1(above * size))
            ]
            runs, sources = int(part.runs.sum()), "; ".join(part.source_group)
            writer.writerow([*words, *spreads, runs, sources])
        return stream.getvalue()


def source_weights(rows: pd.DataFrame) -> np.ndarray:
    """Return what every run counts: a source its runs, at most ``MOST``."""
    runs = rows.groupby("source_group").source_group.transform("size")
    return (np.minimum(runs, MOST) / runs).to_numpy()


def counted(rows: pd.DataFrame) -> tuple[np.ndarray, float]:
    """Return what every run counts, and what the source to come does: as much as the mean one."""
    weights = source_weights(rows)
    return weights, float(weights.sum()) / rows.source_group.nunique()


def shortest(errors: np.ndarray, weights: np.ndarray | None = None, outside: float = 0.0) -> Ends:
    """Return how far below and above the shortest interval reaches.

    ``errors``: measured / predicted - 1 of every run; ``weights``: what each run counts;
    ``outside``: what runs count that no interval holds.

    >>> errors = np.array([-0.5, -0.03, -0.01, 0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05])
    >>> shortest(errors)
    (0.03, 0.05)
    >>> shortest(errors, np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]))
    (0.02, 0.05)
    >>> shortest(errors, outside=1.0)
    (0.5, 0.05)
    """
    shares = np.ones(len(errors)) if weights is None else weights
    every = float(shares.sum())
    needed = min(HELD * (every + outside), every) * (1.0 - 1e-9)
    order = np.argsort(errors)
    errors, shares = errors[order], shares[order]
    found = []
    for low in {NARROWEST, *(-errors[errors < -NARROWEST])}:
        held = np.cumsum(np.where(errors >= -low, shares, 0.0))
        if held[-1] >= needed:
            high = max(NARROWEST, float(errors[np.argmax(held >= needed)]))
            found.append((float(low), high))
    return min(found, key=lambda ends: (sum(ends), ends))


def quantile(errors: np.ndarray, weights: np.ndarray, share: float, outside: float = 0.0) -> float:
    """Return the smallest error that a share of the runs do not exceed.

    ``outside``: what runs count that exceed all.

    >>> quantile(np.array([0.3, 0.1, 0.2]), np.array([1.0, 1.0, 2.0]), 0.5)
    0.2
    """
    order = np.argsort(errors)
    every = float(weights.sum())
    needed = min(share * (every + outside), every) * (1.0 - 1e-9)
    return float(errors[order][np.argmax(np.cumsum(weights[order]) >= needed)])


def coverage_lines(apart: pd.DataFrame) -> Iterator[str]:
    """Yield the share of runs inside the intervals that other sources give, by source and in all.

    ``apart``: of ``Rule.left_out``, with the column ``found_later``.
    """
    yield "\nintervals that the other sources give: runs of a source inside"
    for source, part in apart.groupby("source_group"):
        yield f"{source:<30} {_coverage(part)}"
    known = apart.others > 0
    for what, part in (
        ("kind met in other sources", apart[known]),
        ("kind in no other source", apart[~known]),
        ("found later", apart[apart.found_later]),
        ("all", apart),
    ):
        if part.empty:
            continue
        share = 100.0 * np.average(part.inside, weights=source_weights(part))
        yield f"{what:<30} {_coverage(part)}; a source as at most {MOST} runs: {share:.1f} %"


def _coverage(part: pd.DataFrame) -> str:
    below, above = 100.0 * part.below.mean(), 100.0 * part.above.mean()
    return f"{len(part):4d} {100.0 * part.inside.mean():6.1f} %   -{below:.0f} % +{above:.0f} %"
