"""Options that several commands share, besides those of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.options import Option

Json = Annotated[bool, Option("--json", help="one JSON document on stdout")]
Force = Annotated[bool, Option("--force", help="overwrite the output file")]
PlanPath = Annotated[Path, Option("PLAN", help="a plan.json")]
