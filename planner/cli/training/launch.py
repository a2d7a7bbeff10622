"""``shardplan launch``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.options import Option
from hardware_profiles.terminal import say, show
from planner.cli.options import Force, PlanPath
from planner.cli.outputs import refuse_existing
from planner.launchers.job import LaunchOptions, System


def launch(
    plan: PlanPath,
    run_options: Annotated[
        list[str] | None,
        Option("OPTIONS", help="after --, of shardplan run: -- --data FILE --steps 100"),
    ] = None,
    *,
    on: Annotated[System, Option("--on", common=True, help="{values}")],
    options: LaunchOptions,
    dry_run: Annotated[
        bool, Option(common=True, help="write the job file, or print it, and submit nothing")
    ] = False,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", common=True, help="write the job file here"),
    ] = None,
    force: Force = False,
) -> None:
    """Write the job file and submit it."""
    from hardware_profiles.fields import write_text_atomically
    from planner.launchers.launch import job_file, require_program, submit, submit_command

    if output is not None:
        refuse_existing(output, force=force)
    job, text = job_file(plan, on, run_options or (), options)
    if not dry_run:
        require_program(on)
    if output is not None:
        write_text_atomically(output, text, force=force)
        following = f"; submit it: {submit_command(on, job, output)}" if dry_run else ""
        say(f"wrote {output}{following}")
    elif dry_run:
        show(text.rstrip("\n"))
    if not dry_run:
        submit(on, job, text)
