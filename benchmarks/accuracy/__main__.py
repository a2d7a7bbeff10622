"""Tables of docs/accuracy.md and of the README: ``python -m benchmarks.accuracy --write``.

Prices every published run (``planner.validate``) and the tables of runs that were found after
the constants of the formulas were fixed (``benchmarks/unseen/*.csv``), in a few minutes, and
writes the tables between the ``<!-- generated: NAME -->`` marks of both files. ``--check`` compares
instead, and exits with 1 where a table differs. Figures of slower commands come from
``benchmarks/accuracy/recorded.toml``, which says when each was run.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from benchmarks.accuracy.published_step_times import TABLES
from benchmarks.unseen import UNSEEN, WITH_BOTH, validated

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "docs" / "accuracy.md", ROOT / "README.md")
RECORDED: Final = Path(__file__).parent / "recorded.toml"
MARKED: Final = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FIGURES: Final = ("median_absolute_error", "p90_absolute_error", "bias")
Row = Iterable[str]


@dataclass(frozen=True)
class Short:
    """One row of the short table; errors are fractions, None where the command prints no such."""

    what: str
    of: str
    errors: tuple[float | None, float | None, float | None]  # median, 90th percentile, bias
    command: str
    readme: tuple[str, str] | None = None  # how the README calls it, and its runs


@cache
def recorded() -> dict[str, Any]:
    """Return the figures that other commands printed."""
    return tomllib.loads(RECORDED.read_text(encoding="utf-8"))


def percent(value: float | None, *, signed: bool = False) -> str:
    """Return a fraction as text.

    >>> percent(0.0388), percent(-0.0197, signed=True), percent(0.0001)
    ('3.9 %', '−2.0 %', '0.01 %')
    """
    if value is None:
        return "–"
    digits = 2 if 0.0 < abs(value) < 0.005 and not signed else 1
    text = f"{100.0 * value:{'+' if signed else ''}.{digits}f} %"
    return text.replace("-", "−")


def table(heads: Iterable[str], rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    names = list(heads)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _errors(figures: Mapping[str, Any]) -> tuple[float, float, float]:
    median, p90, bias = (float(figures[key]) for key in FIGURES)
    return median, p90, bias


def short_rows() -> list[Short]:
    """Return the rows of the short table, from the best known runs to the least known ones."""
    published = validated("published").summary
    first, second, *blind, third = (
        Short(
            row["what"],
            row["of"],
            (row["median"], row["p90"], row.get("bias")),
            row["command"],
            (row["readme"], row["runs"]) if "readme" in row else None,
        )
        for row in recorded()["short"]
    )

    def of(name: str, what: str) -> dict[str, Any]:
        found: dict[str, Any] = validated(name).summary[what]
        return found

    time, memory = published["time"]["over_groups"], published["memory"]["over_groups"]
    found = ("runs", "trainers")
    runs, trainers = (of(name, "time")["all_rows"] for name in found)
    peaks, more_peaks = (of(name, "memory")["all_rows"] for name in found)
    return [
        Short(
            "Step time",
            f"{time['n']:,} published runs of {len(time['groups'])} sources (mean over sources)",
            _errors(time),
            "shardplan validate --time",
            ("step time, published runs", f"{time['n']:,}"),
        ),
        first,
        Short(
            "Step time, two trainers that were described from their source code",
            f"{runs['n']} runs found after all constants were fixed",
            _errors(runs),
            "shardplan validate benchmarks/unseen/runs.csv",
        ),
        second,
        *(row for row in blind if row.what.startswith("Step time")),
        Short(
            "The same after describing trainers and accelerators, nothing fitted",
            f"{trainers['n']} runs of 19 of these sources",
            _errors(trainers),
            "shardplan validate benchmarks/unseen/trainers.csv",
        ),
        Short(
            "Peak memory",
            f"{memory['n']} published runs of {len(memory['groups'])} sources (mean over sources)",
            _errors(memory),
            "shardplan validate --memory",
            ("peak memory, published runs", f"{memory['n']}"),
        ),
        Short(
            "Peak memory, runs found later",
            f"{peaks['n']} of two trainers",
            _errors(peaks),
            "shardplan validate benchmarks/unseen/runs.csv",
        ),
        Short(
            "Peak memory, runs found later",
            f"{more_peaks['n']} of 19 more sources",
            _errors(more_peaks),
            "shardplan validate benchmarks/unseen/trainers.csv",
        ),
        *(row for row in blind if row.what.startswith("Peak memory")),
        third,
    ]


def _short_cells(row: Short) -> list[str]:
    median, p90, bias = row.errors
    return [row.what, row.of, percent(median), percent(p90), percent(bias, signed=True)]


def short() -> str:
    """Return the short table of docs/accuracy.md."""
    heads = ("predicted", "compared with", "median error", "90th percentile", "bias", "command")
    return table(heads, ([*_short_cells(row), f"`{row.command}`"] for row in short_rows()))


def readme() -> str:
    """Return the table of the README."""
    rows = [(row.readme, row.errors) for row in short_rows() if row.readme is not None]
    return table(
        ("predicted", "runs", "median error", "90th percentile", "bias"),
        (
            [*names, percent(median), percent(p90), percent(bias, signed=True)]
            for names, (median, p90, bias) in rows
        ),
    )


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


def by_source(name: str, what: str, *, mean: bool = True) -> str:
    """Return the errors of a table of runs by source, and of all of them."""
    figures = validated(name).summary[what]
    left_out = figures["left_out"]
    groups = figures["by"]["source_group"]
    rows = [_cells(key, found) for key, found in groups.items() if key not in left_out]
    if mean:
        rows.append(_cells("**mean over sources**", figures["over_groups"]))
    else:
        rows.append(_cells("**all**", figures["all_rows"]))
    rows += [
        _cells(f"{key}, not in the mean: {why}", groups[key])
        for key, why in left_out.items()
        if mean and key in groups
    ]
    return table(HEADS, rows)


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
    """Return how many verdicts were wrong."""
    found = validated("published").summary["verdicts"]
    return (
        f"Verdicts: of {found['died']} runs that ran out of memory, {found['died_said_to_fit']} "
        f"are said to fit; of {found['lived']} that did not, {found['lived_said_not_to_fit']} are "
        f"said not to fit; {percent(found['tight_share'])} of all are called TIGHT.\n"
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
    "readme": readme,
    "time": lambda: by_source("published", "time"),
    "time_apart": lambda: apart("time"),
    "memory": lambda: by_source("published", "memory"),
    "memory_apart": lambda: apart("memory"),
    "well_known": well_known,
    "ranking": ranking,
    "verdicts": verdicts,
    "checks": checks,
    **{
        f"{name}_{what}": partial(by_source, name, what, mean=False)
        for name in WITH_BOTH
        for what in ("time", "memory")
    },
    **{
        name: partial(by_source, name, "time" if name.endswith("times") else "memory", mean=False)
        for name in UNSEEN
        if name not in WITH_BOTH
    },
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
