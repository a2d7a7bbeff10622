"""``shardplan validate`` and ``learn``: tables of measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.errors import InputError
from hardware_profiles.message import error_text
from hardware_profiles.options import Option
from hardware_profiles.software.trainer import software_names
from hardware_profiles.terminal import say, show
from planner.cli.options import Force, Json
from planner.cli.outputs import print_answer, refuse_existing


def source_groups() -> list[str]:
    """Return the source groups of the published runs, for completion."""
    import csv

    from planner.validation.rows.runs_file import PUBLISHED

    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return sorted({row["source_group"] for row in csv.DictReader(file)})


def validate(
    runs: Annotated[
        Path | None,
        Option("RUNS.csv", help="measured runs; without: the published ones"),
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="DIR", help="write rows and groups into this folder"),
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(
            "--only",
            metavar="NAME",
            values=source_groups,
            help="a source group (may be repeated): {values}",
        ),
    ] = None,
    software: Annotated[
        str | None,
        Option(
            "--software",
            metavar="NAME",
            values=software_names,
            help="profile of all rows, such as a file of shardplan learn",
        ),
    ] = None,
    time: Annotated[bool, Option("--time", help="only step times")] = False,
    memory: Annotated[bool, Option("--memory", help="only peak memory")] = False,
    force: Force = False,
    json: Json = False,
) -> int:
    """Print predictions next to measurements by row and by group; 2 where cells cannot be read."""
    from planner.text.answer import json_text
    from planner.validation.answer import What, refuse_existing_files
    from planner.validation.answer import validate as ask
    from planner.validation.rows.runs_file import bad_cells_text

    if time and memory:
        raise InputError("--time and --memory: choose one of them, or none for both")
    if output is not None:
        refuse_existing_files(output, force=force)
    what: What | None = "time" if time else "memory" if memory else None
    answer = ask(runs, only=only, what=what, software=software)
    if output is not None:
        answer.write(output, force=force)
    show(json_text(answer.to_dict()) if json else answer.without_bad_cells())
    if output is not None:
        say(f"wrote rows.csv, groups.csv and validation.json into {output}")
    if answer.path is None or not answer.bad_cells:
        return 0
    say(error_text(f"shardplan: {bad_cells_text(answer.path, answer.bad_cells)}"))
    return InputError.exit_code


def learn(
    runs: Annotated[
        Path,
        Option(
            "RUNS.csv", help="one to five short runs of one trainer (docs/reference/validate.md)"
        ),
    ],
    output: Annotated[
        Path,
        Option("--output", "-o", metavar="FILE.toml", help="write the profile here (--software)"),
    ],
    force: Force = False,
    json: Json = False,
) -> int:
    """Learn switches and rates of your trainer from your runs; 2 where cells cannot be read."""
    from planner.learning.answer import learn as ask
    from planner.validation.rows.runs_file import bad_cells_text

    refuse_existing(output, force=force)
    answer = ask(runs, output, force=force)
    print_answer(answer, json=json)
    if not answer.bad_cells:
        return 0
    say(error_text(f"shardplan: {bad_cells_text(runs, answer.bad_cells)}"))
    return InputError.exit_code
