"""``shardplan validate``: its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from hardware_profiles.errors import InputError
from hardware_profiles.options import Option
from planner.cli.options import Json
from planner.cli.outputs import print_answer


def validate(
    runs: Annotated[
        Path | None,
        Option("RUNS.csv", help="measured runs; without: the published ones"),
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="write rows and groups into this folder")
    ] = None,
    only: Annotated[
        list[str] | None, Option("--only", help="a source group (may be repeated)")
    ] = None,
    time: Annotated[bool, Option("--time", help="only step times")] = False,
    memory: Annotated[bool, Option("--memory", help="only peak memory")] = False,
    force: Annotated[bool, Option("--force", help="overwrite the files in DIR")] = False,
    json: Json = False,
) -> None:
    """How accurate is it? Predictions against published measurements, row by row and by group."""
    from planner.validation.answer import refuse_existing_files
    from planner.validation.answer import validate as ask

    if time and memory:
        raise InputError("--time and --memory: choose one of them, or none for both")
    if output is not None:
        refuse_existing_files(output, force=force)
    answer = ask(runs, only=only, what="time" if time else "memory" if memory else None)
    if output is not None:
        answer.write(output, force=force)
    print_answer(answer, json=json)
    if output is not None:
        print(f"wrote rows.csv, groups.csv and validation.json into {output}", file=sys.stderr)
