"""A validation in a notebook: one sentence and a table of sources for each quantity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.text.html_page import Html, element, note, table
from planner.text.notebook import headline
from planner.validation.text import HEADS, KEYS, WHAT

PER_CENT = "all but n in per cent of the measurement; bias is signed"


def validation_parts(summary: Mapping[str, Any], what: Sequence[str]) -> Iterator[Html]:
    """Yield the figures of each quantity."""
    rows, priced = summary["rows"], summary["priced"]
    yield headline(f"{priced:,} of {rows:,} runs predicted", "")
    for quantity in what:
        yield from _quantity(WHAT[quantity], summary[quantity])


def _quantity(name: str, figures: Mapping[str, Any]) -> Iterator[Html]:
    if "all_rows" not in figures:
        return
    rows, over = figures["all_rows"], figures["over_groups"]
    yield element(
        "p",
        element("b", f"{name}: "),
        f"median error {100 * rows['median_absolute_error']:.1f} % over {rows['n']:,} runs, "
        f"{100 * rows['coverage']:.0f} % of them inside the stated interval",
        f"; {100 * over['median_absolute_error']:.1f} % as the mean over "
        f"{len(over['groups'])} sources."
        if len(over["groups"]) > 1
        else ".",
    )
    cells = [
        (group, f"{found['n']:,}", *(_per_cent(key, found[key]) for key in KEYS))
        for group, found in figures["by"]["source_group"].items()
    ]
    yield table(cells, ("source", *HEADS))
    yield note(PER_CENT)


def _per_cent(key: str, value: float) -> str:
    return f"{100 * value:+.1f}" if key == "bias" else f"{100 * value:.1f}"
