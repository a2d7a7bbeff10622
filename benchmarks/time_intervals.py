"""Intervals of step times from sources left out: ``python -m benchmarks.time_intervals --write``.

Prices the published runs and the tables of runs that were found later (``benchmarks/unseen_*.csv``)
and prints, for every kind (software profile, architecture, mixture of experts or not): runs, the
interval of ``cost_models/time_intervals.csv``, the share of the runs inside it, and the shortest
interval that holds 90 % of them. Then, for every source, the share of its runs inside the intervals
that the other sources give. ``--write`` writes the file.

The size of an error is |log(measured / predicted)|; that of a source, the mean over its runs of a
kind. The size expected of a new source is a weighted mean of logarithms of the sizes of the sources
of its kind, which shrinks towards a prior: the mean of its trainer's and of its accelerator's, plus
the difference that experts make. Those three shrink towards that of all sources. A source weighs
n / (n + ``FEW``) with n runs, a prior ``TOWARDS``. Both ends of an interval are multiples of the
expected size, the same for all kinds: the shortest pair that holds 90 % of the runs, each divided
by the size expected without its source, with a source counted as its runs, at most ``MOST``.
"""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.accuracy import UNSEEN, answer
from benchmarks.memory_intervals import beside, shortest
from cost_models.uncertainty import ANY, TIME_COLUMNS, TIME_INTERVALS, Spread, compared_kind
from planner.validation.cluster_of_row import accelerator_of
from planner.validation.reading import Reading
from planner.validation.runs_file import PUBLISHED, read_runs

FEW: Final = 4.0  # runs with which a source weighs half
TOWARDS: Final = 2.0  # sources that a prior weighs
MOST: Final = 10  # runs that a source counts as
LEAST: Final = 0.01  # size of the errors of a source
PROPERTIES: Final = ("kind", "architecture", "experts")
Ends = tuple[float, float]  # multiples of the expected size, below and above


@dataclass(frozen=True, slots=True)
class Sizes:
    """Logarithms of expected sizes: one of all sources, the others for every cell."""

    every: float
    by_property: dict[str, np.ndarray]
    of_kind: np.ndarray


def compared_runs() -> pd.DataFrame:
    """Return the published runs whose time is compared, with ``error`` as in ``shortest``."""
    validated = answer("published")
    rows = validated.rows
    counted = rows.source_group.isin(validated.summary["time"]["over_groups"]["groups"])
    return _described(rows[rows.time_error.notna() & ~rows.partial & counted], "published")


def _described(rows: pd.DataFrame, table: str) -> pd.DataFrame:
    named = {row.name: row for row in read_runs(UNSEEN.get(table, PUBLISHED))}
    cards = [accelerator_of(Reading(named[name])) for name in rows.row_id]
    return rows.assign(
        error=1.0 / (1.0 + rows.time_error.astype(float)) - 1.0,
        log_error=-np.log1p(rows.time_error.astype(float)),
        experts=rows.model_kind.fillna("").str.startswith("moe"),
        card=cards,
        architecture=[card.architecture for card in cards],
        kind=[compared_kind(software) for software in rows.software],
        found_later=table in UNSEEN,
    )


def all_runs() -> pd.DataFrame:
    """Return published runs and those found later, without those that stay out of the mean."""
    tables = []
    for table in ("published", *UNSEEN):
        rows = answer(table).rows
        counts = rows.time_error.notna() & ~rows.partial & rows.left_out.isna()
        tables.append(_described(rows[counts], table))
    rows = pd.concat(tables, ignore_index=True)
    return rows.assign(cell=rows.groupby([*PROPERTIES, "source_group"]).ngroup())


def cells_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return kind, source, runs and size of errors of every source's runs of a kind."""
    grouped = rows.groupby("cell")
    cells = grouped[[*PROPERTIES, "source_group"]].first()
    size = rows.log_error.abs().groupby(rows.cell).mean()
    return cells.assign(size=np.maximum(size, LEAST), runs=grouped.size())


def expected_sizes(cells: pd.DataFrame, used: np.ndarray) -> Sizes:
    """Return the sizes expected of a new source from the cells that are ``used``."""
    runs = cells.runs.to_numpy()
    weights = used * runs / (runs + FEW)
    logs = np.log(cells["size"].to_numpy())
    every = float(np.average(logs, weights=weights))

    def shrunk(names: list[str], prior: np.ndarray) -> np.ndarray:
        codes = cells.groupby(names).ngroup().to_numpy()
        total, weight = np.bincount(codes, weights * logs), np.bincount(codes, weights)
        return np.asarray((total[codes] + TOWARDS * prior) / (weight[codes] + TOWARDS))

    by_property = {name: shrunk([name], np.full(len(cells), every)) for name in PROPERTIES}
    trainer, accelerator, experts = (by_property[name] for name in PROPERTIES)
    prior = (trainer + accelerator) / 2.0 + experts - every
    return Sizes(every, by_property, shrunk(list(PROPERTIES), prior))


def relative_errors(rows: pd.DataFrame, cells: pd.DataFrame, used: np.ndarray) -> pd.Series:
    """Return log errors over the sizes expected without their source; NaN outside ``used``."""
    found = pd.Series(np.nan, index=rows.index)
    source, cell = cells.source_group.to_numpy(), rows.cell.to_numpy()
    for one in np.unique(source[used]):
        own = (source == one)[cell]
        sizes = np.exp(expected_sizes(cells, used & (source != one)).of_kind)
        found[own] = rows.log_error[own] / sizes[cell[own]]
    return found


def source_weights(rows: pd.DataFrame) -> np.ndarray:
    """Return what every run counts: a source its runs, at most ``MOST``."""
    runs = rows.groupby("source_group").cell.transform("size")
    return (np.minimum(runs, MOST) / runs).to_numpy()


def ends_of(rows: pd.DataFrame, cells: pd.DataFrame, used: np.ndarray) -> Ends:
    """Return the ends of intervals in expected sizes, from the cells that are ``used``."""
    relative = relative_errors(rows, cells, used).dropna()
    return shortest(relative.to_numpy(), source_weights(rows.loc[relative.index]))


def left_out(rows: pd.DataFrame) -> pd.DataFrame:
    """Add to every run the interval that the other sources give, and whether it is inside."""
    cells = cells_of(rows)
    source, cell = cells.source_group.to_numpy(), rows.cell.to_numpy()
    found = rows.assign(below=np.nan, above=np.nan)
    for one in np.unique(source):
        used = source != one
        below, above = ends_of(rows, cells, used)
        sizes = np.exp(expected_sizes(cells, used).of_kind)[cell]
        own = ~used[cell]
        found.loc[own, "below"] = -np.expm1(-below * sizes[own])
        found.loc[own, "above"] = np.expm1(above * sizes[own])
    inside = (found.error >= -found.below) & (found.error <= found.above)
    others = found.groupby(list(PROPERTIES)).source_group.transform("nunique") - 1
    return found.assign(inside=inside, others=others)


def table_text(rows: pd.DataFrame) -> str:
    """Return the text of the file."""
    cells = cells_of(rows)
    used = np.ones(len(cells), dtype=bool)
    sizes, ends = expected_sizes(cells, used), ends_of(rows, cells, used)
    kinds: dict[tuple[object, object, object], tuple[float, pd.DataFrame | None]] = {}
    kinds[ANY, ANY, ANY] = sizes.every, None
    for place, name in enumerate(PROPERTIES):
        for value, log in zip(cells[name], sizes.by_property[name], strict=True):
            kind: list[object] = [ANY, ANY, ANY]
            kind[place] = value
            kinds[kind[0], kind[1], kind[2]] = float(log), None
    logs = pd.Series(sizes.of_kind, index=cells.index)
    for (trainer, architecture, experts), part in cells.groupby(list(PROPERTIES)):
        kinds[trainer, architecture, experts] = float(logs[part.index[0]]), part
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(TIME_COLUMNS)
    for (trainer, architecture, experts), (log, part) in kinds.items():
        below, above = -np.expm1(-ends[0] * np.exp(log)), np.expm1(ends[1] * np.exp(log))
        about = [0, ""] if part is None else [part.runs.sum(), "; ".join(part.source_group)]
        flag = experts if experts == ANY else int(bool(experts))
        writer.writerow([trainer, architecture, flag, f"{below:.3f}", f"{above:.3f}", *about])
    return stream.getvalue()


def main() -> None:
    """Print both tables; with ``--write`` write the file."""
    rows = all_runs()
    text = table_text(rows)
    if "--write" in sys.argv[1:]:
        TIME_INTERVALS.write_text(text, encoding="utf-8")
    print(f"{'':<46} runs   stated             inside   shortest")
    for one in csv.DictReader(io.StringIO(text)):
        spread = Spread(float(one["below"]), float(one["above"]), one["sources"])
        trainer, architecture = one["software"], one["architecture"]
        experts = {"1": ", experts", "0": ", dense"}.get(one["experts"], "")
        of_kind = (rows.kind == trainer) & (rows.architecture == architecture)
        errors = rows[of_kind & (rows.experts == (one["experts"] == "1"))].error.to_numpy()
        name = f"{trainer}, {architecture}{experts}"
        if one["sources"]:
            print(f"{name:<46} {beside(spread, errors)}")
        else:
            print(f"{name:<46}        -{100 * spread.below:4.1f} % +{100 * spread.above:5.1f} %")
    apart = left_out(rows)
    print("\nintervals that the other sources give: runs of a source inside")
    for source, part in apart.groupby("source_group"):
        print(f"{source:<30} {_coverage(part)}")
    known = apart.others > 0
    for what, part in (
        ("kind met in other sources", apart[known]),
        ("kind in no other source", apart[~known]),
        ("found later", apart[apart.found_later]),
        ("all", apart),
    ):
        share = 100.0 * np.average(part.inside, weights=source_weights(part))
        print(f"{what:<30} {_coverage(part)}; a source as at most {MOST} runs: {share:.1f} %")


def _coverage(part: pd.DataFrame) -> str:
    below, above = 100.0 * part.below.mean(), 100.0 * part.above.mean()
    return f"{len(part):4d} {100.0 * part.inside.mean():6.1f} %   -{below:.0f} % +{above:.0f} %"


if __name__ == "__main__":
    main()
