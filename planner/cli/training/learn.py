"""``shardplan learn``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.errors import InputError
from hardware_profiles.message import error_text
from hardware_profiles.options import Option
from hardware_profiles.terminal import say
from planner.cli.options import Force, Json
from planner.cli.outputs import print_answer, refuse_existing


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
