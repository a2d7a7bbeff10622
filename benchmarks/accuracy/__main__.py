"""Tables of errors in the documentation and README: ``python -m benchmarks.accuracy --write``.

Prices every published run (``planner.validate``) in two minutes, and writes the tables between the
``<!-- generated: NAME -->`` marks of PAGES. ``--check`` compares instead, and exits with 1
where a table differs. Figures of slower commands come from files of this folder: ``left_out.csv``,
``memory_left_out.csv`` and ``memory_verdicts.csv``, which
``benchmarks.accuracy.cross_validate --write`` writes, ``blind_rounds.csv``, the first prices of
each round, and ``recorded.toml``.
"""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.accuracy.published_step_times import TABLES
from benchmarks.unseen import validated

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = tuple(
    ROOT / name for name in ("docs/accuracy.md", "docs/reference/errors.md", "README.md")
)
HERE: Final = Path(__file__).parent
MARKED: Final = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FIGURES: Final = ("median_absolute_error", "p90_absolute_error", "bias")
Row = Iterable[str]
Errors = tuple[float | str | None, float | str | None, float | str | None]


@dataclass(frozen=True)
class Short:
    """One row of the short table; errors are fractions, None or empty where none is printed."""

    what: str
    of: str
    errors: Errors  # median, 90th percentile, bias
    command: str
    commit: str = ""  # whose code gave it, where that of today gives another


@cache
def recorded() -> dict[str, Any]:
    """Return the figures that other commands printed."""
    return tomllib.loads((HERE / "recorded.toml").read_text(encoding="utf-8"))


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file of this folder."""
    with (HERE / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def percent(value: float | str | None, *, signed: bool = False) -> str:
    """Return a fraction as text.

    >>> percent(0.0388), percent("-0.0197", signed=True), percent(0.0001)
    ('3.9 %', '−2.0 %', '0.01 %')
    """
    if value is None or value == "":
        return "–"
    share = float(value)
    digits = 2 if 0.0 < abs(share) < 0.005 and not signed else 1
    text = f"{100.0 * share:{'+' if signed else ''}.{digits}f} %"
    return text.replace("-", "−")


def table(heads: Iterable[str], rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    names = list(heads)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _errors(figures: Mapping[str, Any]) -> Errors:
    median, p90, bias = (figures[key] for key in FIGURES)
    return median, p90, bias


def _recorded_errors(row: Mapping[str, str], of: str = "") -> Errors:
    return row[f"median{of}"], row[f"p90{of}"], row[f"bias{of}"]


def short_rows() -> list[Short]:
    """Return the rows of the short table, from the best known runs to the least known ones."""
    published = validated("published").summary
    time, memory = (published[what]["over_groups"] for what in ("time", "memory"))
    left_out, peaks = (rows_of(name)[-1] for name in ("left_out", "memory_left_out"))
    bundled = recorded()["bundled_peaks"]
    cross_validate = "python -m benchmarks.accuracy.cross_validate"
    return [
        Short("step time", _runs(time), _errors(time), "shardplan validate --time"),
        Short(
            "step time",
            "the same, each source left out of the fit",
            _recorded_errors(left_out, "_left_out"),
            cross_validate,
        ),
        latest_round("time", "step time"),
        Short("peak memory", _runs(memory), _errors(memory), "shardplan validate --memory"),
        Short(
            "peak memory",
            f"{peaks['runs']} runs, each trainer as an unknown one",
            _recorded_errors(peaks, "_undescribed"),
            f"{cross_validate} --memory",
        ),
        latest_round("peak", "peak memory"),
        Short(
            "peak memory",
            bundled["of"],
            (bundled["median"], bundled["p90"], None),
            bundled["command"],
        ),
    ]


def _runs(figures: Mapping[str, Any]) -> str:
    return f"{figures['n']:,} published runs of {len(figures['groups'])} sources"


def latest_round(quantity: str, what: str) -> Short:
    """Return the row of the latest round of runs that were priced unseen."""
    *_, row = (row for row in rows_of("blind_rounds") if row["quantity"] == quantity)
    of = f"{row['runs']} unseen runs of {row['sources']} sources, {day_of(row['table'])}"
    command = f"shardplan validate benchmarks/unseen/{row['table']}.csv"
    return Short(what, of, _recorded_errors(row), command, row["commit"])


def day_of(table: str) -> str:
    """Return the day of a round.

    >>> day_of("2026_12_03_times")
    '3 December'
    """
    _, month, day, *_ = table.split("_")
    return f"{int(day)} {date(2026, int(month), 1):%B}"


def short(*, commands: bool = True) -> str:
    """Return the short table of docs/accuracy.md, or without commands that of the README."""
    heads = ("predicted", "compared with", "median error", "90th percentile", "bias", "command")
    rows = [
        (
            row.what,
            row.of,
            *_cells_of(row.errors),
            f"`{row.command}`" + (f" at commit `{row.commit}`" if row.commit else ""),
        )
        for row in short_rows()
    ]
    shown = len(heads) if commands else -1
    return table(heads[:shown], (row[:shown] for row in rows))


HEADS: Final = ("source", "runs", "median", "mean", "90th", "bias", "inside", "half-width")


def _cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{figures['n']:,}",
        percent(figures["median_absolute_error"]),
        percent(figures["mean_absolute_error"]),
        percent(figures["p90_absolute_error"]),
        percent(figures["bias"], signed=True),
        percent(figures["coverage"]),
        percent(figures["median_half_width"]),
    ]


def by_source(what: str) -> str:
    """Return the errors of the published runs by source, and of all of them."""
    figures = validated("published").summary[what]
    left_out = figures["left_out"]
    groups = figures["by"]["source_group"]
    return table(
        HEADS,
        [
            *(_cells(key, found) for key, found in groups.items() if key not in left_out),
            _cells("**mean over sources**", figures["over_groups"]),
            *(
                _cells(f"{key}, not in the mean: {why}", groups[key])
                for key, why in left_out.items()
                if key in groups
            ),
        ],
    )


def left_out() -> str:
    """Return the errors of step times with each source left out of the fit."""
    heads = ("source", "runs", "median", "90th", "bias")
    apart = ("left out: median", "90th", "bias", "constants that move")
    return table(
        (*heads, *apart),
        (
            [
                row["source"],
                row["runs"],
                *_cells_of(_recorded_errors(row)),
                *_cells_of(_recorded_errors(row, "_left_out")),
                row["constants_that_move"],
            ]
            for row in rows_of("left_out")
        ),
    )


def memory_left_out() -> str:
    """Return the errors of peaks with the profiles of trainers, and without any."""
    heads = ("source", "runs", "median", "90th", "bias", "inside")
    return table(
        (*heads, "without a profile: median", *heads[3:]),
        (
            [
                row["source"],
                row["runs"],
                *(
                    cell
                    for of in ("", "_undescribed")
                    for cell in (*_cells_of(_recorded_errors(row, of)), percent(row[f"inside{of}"]))
                ),
            ]
            for row in rows_of("memory_left_out")
        ),
    )


def _cells_of(errors: Errors) -> tuple[str, str, str]:
    median, p90, bias = errors
    return percent(median), percent(p90), percent(bias, signed=True)


def blind_rounds(quantity: str) -> str:
    """Return the errors of the first prices of every round of runs found later."""
    more = {
        "time": {"refused": "rows refused"},
        "peak": {
            "dead_said_to_fit": "out of memory, said to fit",
            "living_said_not_to": "ran, said not to fit",
            "tight": "tight",
        },
    }[quantity]
    return table(
        ("table", "commit", "runs", "sources", "median", "90th", "bias", "inside", *more.values()),
        (
            [
                *(row[name] for name in ("table", "commit", "runs", "sources")),
                *_cells_of(_recorded_errors(row)),
                percent(row["inside"]),
                *(row[name] for name in more),
            ]
            for row in rows_of("blind_rounds")
            if row["quantity"] == quantity
        ),
    )


def apart(what: str) -> str:
    """Return the errors of rows that deny themselves or leave much unsaid, by source."""
    found = validated("published").summary[what]["partial"]["by"]
    return table(HEADS, (_cells(key, figures) for key, figures in found.items()))


def well_known() -> str:
    """Return the mean errors of tables that every reader knows."""
    rows = validated("published").rows
    cells = []
    for name, (group, most) in TABLES.items():
        errors = rows[rows.source_group == group].head(most).time_error.dropna().astype(float)
        cells.append(
            [
                name,
                f"{len(errors)}",
                percent(float(errors.abs().mean())),
                percent(float(errors.abs().quantile(0.9))),
                percent(float(errors.mean()), signed=True),
            ]
        )
    return table(("table", "runs", "mean error", "90th percentile", "bias"), cells)


def ranking() -> str:
    """Return how well plans of the same work are ranked."""
    figures = ("Spearman", "pairs in order", "mean regret", "worst", "error between plans")
    return table(
        ("source", "groups of plans", *figures),
        (
            [
                name,
                f"{found['groups']}",
                f"{found['spearman']:.2f}",
                percent(found["pairs_in_order"]),
                percent(found["mean_regret"]),
                percent(found["worst_regret"]),
                percent(found["error_between_plans"]),
            ]
            for name, found in validated("published").summary["ranking"].items()
        ),
    )


def verdicts() -> str:
    """Return how many verdicts were wrong: of published runs, then also of those found later."""
    published = {
        "prices": "published, with the profiles",
        **validated("published").summary["verdicts"],
    }
    return table(
        ("runs", "out of memory, said to fit", "ran, said not to fit", "TIGHT"),
        (
            [
                row["prices"],
                f"{row['died_said_to_fit']} of {int(row['died']):,}",
                f"{row['lived_said_not_to_fit']} of {int(row['lived']):,}",
                percent(row["tight_share"]),
            ]
            for row in (published, *rows_of("memory_verdicts"))
        ),
    )


def checks() -> str:
    """Return the figures that other commands printed."""
    return table(
        ("what", "result", "command", "date"),
        (
            [found["what"], found["result"], f"`{found['command']}`", f"{found['date']}"]
            for found in recorded()["check"]
        ),
    )


GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    "short": short,
    "readme": lambda: short(commands=False),
    "time": lambda: by_source("time"),
    "time_apart": lambda: apart("time"),
    "left_out": left_out,
    "memory": lambda: by_source("memory"),
    "memory_apart": lambda: apart("memory"),
    "memory_left_out": memory_left_out,
    "blind_times": lambda: blind_rounds("time"),
    "blind_peaks": lambda: blind_rounds("peak"),
    "well_known": well_known,
    "ranking": ranking,
    "verdicts": verdicts,
    "checks": checks,
}


def filled(text: str) -> str:
    """Return a page with every generated part made anew."""
    return MARKED.sub(lambda match: match[1] + GENERATED[match[2]]() + match[4], text)


def main() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if "--write" in sys.argv[1:]:
            page.write_text(new, encoding="utf-8")
        elif new != text:
            wrong.append(f"{page.name}: python -m benchmarks.accuracy --write")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
