"""Predicted against traced memory: ``python -m benchmarks.memory_truth``.

Every case builds the real Hugging Face module at its real width and runs two training steps of the
executor on fake tensors, as one rank of the plan's world (``executor.verify.rehearsal``): our
sharding, FSDP2, schedules and optimizer, without memory and without a GPU. The peak of live
tensors, what it is made of and when it is are compared with the formulas. No constant was fitted on
these cases.

    --part K/N     every N-th case from the K-th on
    --only TEXT    cases whose line has this text; several: any of them
    --cases LINE   other cases than those of the matrix
    --quick        every seventh case
    --parts        what the peaks are made of, and the peaks of backward pass and optimizer
    --rows         instead, the rows of the ledger against the storages of each: all rows
                   at the peak, elsewhere those that are off, with the origins of their storages
    --json         one JSON document

Exits with 1 where a peak is more than 2 % off, or the median of the peaks, or of what one category
is off by as a share of the peak, is above 0.5 %; with ``--rows`` where a row at the peak is more
than 2 % of the peak off, or more than 0.5 % of the peak belongs to no row.

What the trace leaves out: memory inside a kernel, the caching allocator, the libraries' buffers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import pandas as pd

from benchmarks.memory_truth.cases import Case, read
from benchmarks.memory_truth.ledger_rows import UNATTRIBUTED, compared_events
from benchmarks.memory_truth.matrix import lines
from benchmarks.memory_truth.rows import PARTS, row_of

QUICK = 7
LARGEST_PERCENT, MEDIAN_PERCENT = 2.0, 0.5  # that predicted peaks may be off


def part(text: str) -> slice:
    """Read ``K/N``."""
    number, of = (int(n) for n in text.split("/"))
    if not 1 <= number <= of:
        raise ValueError
    return slice(number - 1, None, of)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the options ask for."""
    cases = [case for line in arguments.cases or lines() for case in read(line)]
    if arguments.only:
        cases = [case for case in cases if any(text in case.text for text in arguments.only)]
    return cases[:: QUICK if arguments.quick else 1][arguments.part]


def show(row: dict[str, Any], *, parts: bool) -> None:
    """Print one row."""
    gib = 2.0**30
    predicted, traced = row["predicted"] / gib, row["traced"] / gib
    print(
        f"{row['case']:<60} {row['stage']} {predicted:9.3f} {traced:9.3f} "
        f"{row['error_percent']:+7.2f} %  {row['moment']} / {row['traced_moment']}",
        flush=True,
    )
    if parts:
        for name in PARTS:
            predicted, traced = row["parts"][name] / gib, row["traced_parts"][name] / gib
            if max(predicted, traced) > 5e-4:
                print(f"    {name:<12} {predicted:9.3f} {traced:9.3f} {predicted - traced:+9.3f}")
        for name, size in row["phases"].items():
            predicted, traced = size / gib, row["traced_phases"][name] / gib
            print(f"    {name:<12} {predicted:9.3f} {traced:9.3f} {predicted - traced:+9.3f} peak")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the errors come to: of the peaks, and of their parts as shares of the peak."""
    table = pd.DataFrame(rows)
    error = table.error_percent.abs()
    found: dict[str, Any] = {
        "cases": len(table),
        "plans": int(table.case.nunique()),
        "median_percent": float(error.median()),
        "percentile_90_percent": float(error.quantile(0.9)),
        "largest_percent": float(error.max()),
        "bias_percent": float(table.error_percent.mean()),
    }
    for name in PARTS:
        shares = pd.Series(
            [
                100.0 * abs(row["parts"][name] - row["traced_parts"][name]) / row["traced"]
                for row in rows
            ]
        )
        found[f"{name}_median_percent_of_peak"] = float(shares.median())
        found[f"{name}_largest_percent_of_peak"] = float(shares.max())
    return found


def beyond(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """Say which bounds do not hold."""
    said = [
        f"{row['case']} stage {row['stage']}: {row['error_percent']:+.2f} % "
        f"(at most {LARGEST_PERCENT:g} %)"
        for row in rows
        if abs(row["error_percent"]) > LARGEST_PERCENT
    ]
    medians = {"peak": found["median_percent"]}
    medians |= {name: found[f"{name}_median_percent_of_peak"] for name in PARTS}
    return said + [
        f"{name}: median {median:.2f} % (at most {MEDIAN_PERCENT:g} %)"
        for name, median in medians.items()
        if median > MEDIAN_PERCENT
    ]


def row_by_row(cases: Sequence[Case], *, as_json: bool) -> int:
    """Compare the rows of cases and print them; 1 where a bound of a peak does not hold."""
    documents, said = [], []
    for case in cases:
        events = compared_events(case)
        peak = events[0]
        name = f"{case.text} stage {case.stage}"
        found = [event.to_dict() for event in events]
        documents.append({"case": case.text, "stage": case.stage, "events": found})
        if not as_json:
            print(f"{name} (predicted, traced, difference)")
            for event in events:
                print(*event.lines(every=event is peak), sep="\n", flush=True)
        for row in peak.rows:
            bound = MEDIAN_PERCENT if row.name == UNATTRIBUTED else LARGEST_PERCENT
            if abs(row.off) > bound / 100.0 * peak.traced:
                percent = 100.0 * row.off / peak.traced
                said.append(f"{name}: {row.name}: {percent:+.2f} % of the peak")
    if as_json:
        print(json.dumps({"schema_version": 1, "cases": documents, "beyond": said}, indent=1))
    for line in said:
        print(f"beyond the bound: {line}", file=sys.stderr)
    return int(bool(said))


def main(arguments_list: Sequence[str] | None = None) -> int:
    """Run the cases that the options ask for; 1 where one failed or a bound does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=part, default=slice(None), metavar="K/N")
    parser.add_argument("--only", action="append", metavar="TEXT")
    parser.add_argument("--cases", action="append", metavar="LINE")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(arguments_list)
    if arguments.rows:
        return row_by_row(chosen(arguments), as_json=arguments.json)
    rows, failed, started = [], [], time.monotonic()
    for case in chosen(arguments):
        try:
            row = row_of(case)
        except Exception as error:
            failed.append({"case": case.text, "stage": case.stage, "error": str(error)})
            print(f"{case.text} stage {case.stage}: {error}", file=sys.stderr, flush=True)
            continue
        rows.append(row)
        if not arguments.json:
            show(row, parts=arguments.parts)
    found = summary(rows) if rows else {}
    over = beyond(rows, found) if rows else []
    if arguments.json:
        document = {
            "schema_version": 1,
            "rows": rows,
            "failed": failed,
            "beyond": over,
            "summary": found,
        }
        print(json.dumps(document, indent=1))
        return int(bool(failed or over))
    if rows:
        print(
            f"{found['cases']} ranks of {found['plans']} plans in {time.monotonic() - started:.0f} "
            f"s: median absolute error {found['median_percent']:.2f} %, 90th percentile "
            f"{found['percentile_90_percent']:.2f} %, largest {found['largest_percent']:.2f} %, "
            f"bias {found['bias_percent']:+.2f} %"
        )
        for name in PARTS:
            print(
                f"  {name:<12} off by {found[f'{name}_median_percent_of_peak']:.2f} % of the peak "
                f"(median), {found[f'{name}_largest_percent_of_peak']:.2f} % (largest)"
            )
    for line in over:
        print(f"beyond the bound: {line}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} cases failed", file=sys.stderr)
    return int(bool(failed or over))


if __name__ == "__main__":
    sys.exit(main())
