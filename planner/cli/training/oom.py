"""``shardplan oom``: its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_text
from hardware_profiles.options import Option
from planner.cli.options import Json
from planner.cli.outputs import print_answer
from planner.request.requests import StatedRun


def oom(
    run: StatedRun,
    file: Annotated[
        Path | None,
        Option("FILE", help="a traceback or a log; without: standard input"),
    ] = None,
    json: Json = False,
) -> int:
    """Explain an out-of-memory error of torch: which tensor, where in the step, what would help."""
    from planner.out_of_memory.explanation import explain_out_of_memory
    from planner.out_of_memory.run import priced_run

    if file is None and sys.stdin.isatty():
        raise InputError("give a FILE, or the traceback on standard input")
    text = sys.stdin.read() if file is None else read_text(file, "a traceback")
    print_answer(explain_out_of_memory(text, priced_run(run, text)), json=json)
    return 0
