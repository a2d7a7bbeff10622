"""Options that several commands share, besides those of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.command_line.help import OUTPUT
from hardware_profiles.options import Option

Json = Annotated[bool, Option("--json", group=OUTPUT, help="one JSON document on stdout")]
Verbose = Annotated[
    bool,
    Option(
        "--verbose",
        "-v",
        group=OUTPUT,
        help="all assumptions with reasons, sources, counts of the search",
    ),
]
Force = Annotated[bool, Option("--force", group=OUTPUT, help="overwrite the output file")]
PlanPath = Annotated[Path, Option("PLAN", help="a plan.json")]
PlanOrRun = Annotated[Path, Option("PLAN", help="a plan.json, or the folder of a run")]
