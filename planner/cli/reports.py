"""``shardplan trace``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.options import Option
from hardware_profiles.terminal import show
from planner.cli.options import Force, PlanOrRun
from planner.cli.outputs import refuse_existing


def trace(
    plan: PlanOrRun,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="write the trace here")
    ] = Path("trace.json"),
    force: Force = False,
) -> None:
    """Write one step as a trace: passes, collectives, copies and memory of every stage."""
    from planner.reports.trace import trace as ask

    refuse_existing(output, force=force)
    found = ask(plan)
    found.save(output, force=force)
    show(f"wrote {output}: {found}")
