"""``shardplan replan``, ``compare`` and ``calibrate``: plans and the runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hardware_profiles.options import Option
from hardware_profiles.terminal import say, show
from planner.cli.options import Force, Json, PlanPath
from planner.cli.outputs import print_answer, refuse_existing


def replan(
    plan: PlanPath,
    gpus: Annotated[int, Meta(ge=1), Option("--gpus", help="remaining accelerators")],
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="write the new plan here")
    ],
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the best plan for the remaining accelerators."""
    from cost_models.plan_file import write_plan_file
    from cost_models.units import format_seconds
    from planner.answer.text import short_plan
    from planner.runs.replan import replan as ask
    from planner.text.answer import json_text
    from planner.text.paragraphs import plain

    refuse_existing(output, force=force)
    answer = ask(plan, gpus)
    write_plan_file(output, answer.file, force=force)
    for note in answer.notes:
        say(f"note: {note}")
    if json:
        show(json_text(answer.to_dict()))
        return
    step = format_seconds(answer.file.prediction["time"]["step_seconds"])
    show("\n".join([f"wrote {output}", *plain(f"{short_plan(answer.file.plan)}, {step} a step")]))


def compare(
    plan: PlanPath,
    other: Annotated[Path, Option("OTHER", help="another plan.json, or the folder of a run")],
    json: Json = False,
) -> None:
    """Print the differences, term by term."""
    from planner.runs.compare import compare as ask

    answer = ask(plan, other)
    print_answer(answer, json=json)


def calibrate(
    source: Annotated[
        list[Path] | None,
        Option("--from", metavar="RUN_DIR", help="calibrate with this run (may be repeated)"),
    ] = None,
    processes: Annotated[
        int | None, Meta(ge=1, le=128), Option(help="measure again with this many CPU processes")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="write the cluster to this file (TOML, a CLUSTER)",
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure, or learn from runs, and write the figures of the cluster."""
    from planner.runs.calibrate import calibrate as ask

    if output is not None:
        refuse_existing(output, force=force)
    answer = ask(source or [], processes=processes, output=output, force=force, say=say)
    print_answer(answer, json=json)
