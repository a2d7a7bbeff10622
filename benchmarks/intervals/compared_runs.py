"""Makes planner/assessment/compared_runs.csv.

    python -m benchmarks.intervals.compared_runs --write

For every software profile and accelerator, mixtures of experts apart: the number of published runs
whose step time was compared, the median error, the trainers and the sources. ``--check`` compares
the file with the runs.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Iterable
from typing import Final

from benchmarks.intervals.times import compared_runs
from planner.assessment.confidence import COLUMNS, COMPARED_RUNS

# of a framework's name: version, commit and remarks
REMARKS: Final = re.compile(r"\s*\(.*|/\d.*|\s+\d\d\.\d\d.*")


def main() -> None:
    """Write the table or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true")
    choice.add_argument("--check", action="store_true")
    text = table()
    if parser.parse_args().write:
        COMPARED_RUNS.write_text(text, encoding="utf-8")
    elif COMPARED_RUNS.read_text(encoding="utf-8") != text:
        raise SystemExit(
            f"{COMPARED_RUNS.name}: python -m benchmarks.intervals.compared_runs --write"
        )


def table() -> str:
    """Return the text of the file."""
    rows = compared_runs()
    rows = rows.assign(
        accelerator=rows.card.map(lambda card: card.name),
        trainer=rows.framework.map(lambda name: REMARKS.sub("", name)),
    )
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (software, accelerator, experts), few in rows.groupby(
        ["software", "accelerator", "experts"]
    ):
        error = few.time_error.abs().median()
        names = _most_frequent(few.trainer), _most_frequent(few.source_group)
        writer.writerow([software, accelerator, int(experts), len(few), f"{error:.3f}", *names])
    return stream.getvalue()


def _most_frequent(names: Iterable[str]) -> str:
    """Return distinct names, the most frequent first."""
    listed = list(names)
    return "; ".join(sorted(set(listed), key=lambda name: (-listed.count(name), name)))


if __name__ == "__main__":
    main()
