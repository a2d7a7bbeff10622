"""``shardplan report`` and ``trace``: their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.errors import InputError
from hardware_profiles.options import Option
from hardware_profiles.terminal import show
from planner.cli.options import Force, PlanOrRun
from planner.cli.outputs import refuse_existing
from planner.text.paragraphs import plain


def report(
    plan: PlanOrRun,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="write the page here")
    ] = Path("report.html"),
    pdf: Annotated[bool, Option("--pdf", help="print it to a PDF, too (needs Chromium)")] = False,
    force: Force = False,
) -> None:
    """Write one page: verdict, memory, time, passes, other plans, and what a run measured."""
    from planner.reports.pdf import find_browser, write_pdf
    from planner.reports.report import report as ask

    printed = output.with_suffix(".pdf")
    if pdf:
        if printed == output:
            raise InputError(
                f"-o {output}: name the page, such as -o {output.with_suffix('.html')}; "
                f"--pdf writes {output} as well"
            )
        find_browser()
        refuse_existing(printed, force=force)
    refuse_existing(output, force=force)
    found = ask(plan)
    found.save(output, force=force)
    words = f"wrote {output}: the report of {found.name}; open it in a browser"
    show("\n".join(plain(words)))
    if pdf:
        write_pdf(found.html, printed)
        show(f"wrote {printed}")


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
    show("\n".join(plain(f"wrote {output}: {found}")))
