"""The pages of errors and the README's table say what ``validate`` finds."""

import re

from benchmarks.accuracy.__main__ import (
    GENERATED,
    MARKED,
    PAGES,
    percent,
    recorded,
    rows_of,
)


def tables(number: int) -> dict[str, str]:
    """Return the generated parts of a page by name."""
    text = PAGES[number].read_text(encoding="utf-8")
    return {name: part for _, name, part, _ in MARKED.findall(text)}


def test_every_part_is_in_a_page() -> None:
    assert set(tables(0)) | set(tables(1)) | set(tables(2)) == set(GENERATED)


def test_the_readme_repeats_the_short_table() -> None:
    short = tables(0)["short"]
    rows = re.findall(r"^\| \w+ [^|]*\|[^|]*(\|.*\|)$", tables(2)["readme"], re.MULTILINE)
    assert len(rows) >= 5
    assert [row for row in rows[1:] if row not in short] == []


def test_recorded_figures_are_in_the_short_table() -> None:
    latest = {row["quantity"]: row for row in rows_of("blind_rounds")}.values()
    for row in (recorded()["bundled_peaks"], *latest):
        assert f"| {percent(row['median'])} | {percent(row['p90'])} |" in tables(0)["short"]
