"""``shardplan report``, ``trace``, ``explain`` and ``export``: what they make of a plan.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.command_line.help import OUTPUT
from hardware_profiles.errors import InputError
from hardware_profiles.options import Option
from hardware_profiles.terminal import say, show
from planner.cli.options import Force, Json, PlanOrRun, PlanPath, Verbose
from planner.cli.outputs import print_answer, refuse_existing
from planner.exchange.names import target_names
from planner.request.options import proposals
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


def explain(
    plan: PlanPath,
    why_not: Annotated[
        list[str] | None,
        Option(
            "--why-not",
            metavar="NAME=VALUE,…",
            complete=proposals.plan_parts,
            help="compare with another plan, given by parts such as tp=16,pp=4 (may be repeated); "
            "-v: after the whole explanation",
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        Option(
            "--sensitivity/--no-sensitivity",
            help="effect of the machine and the batch on the choice",
        ),
    ] = True,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Explain a plan: its limits, sensitivity of the choice, and comparisons with other plans."""
    from planner.explanation.explain import explain as ask

    others = why_not or ()
    shown = sensitivity and (json or verbose or not others)  # it takes several searches
    answer = ask(plan, why_not=others, sensitivity=shown)
    print_answer(answer, json=json, verbose=verbose)


def export_plan(
    plan: PlanPath,
    to: Annotated[str, Option("--to", metavar="TARGET", values=target_names, help="{values}")],
    output: Annotated[
        Path,
        Option(
            "--output",
            "-o",
            metavar="DIR|FILE",
            group=OUTPUT,
            help="folder of the files, or the file's name where there is one",
        ),
    ] = Path("."),
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the files, and print what they do not hold and the launch command."""
    from hardware_profiles.fields import write_text_atomically
    from planner.api.export import export
    from planner.text.answer import json_text

    answer = export(plan, to)
    folder, names = output, list(answer.files)
    if output.suffix in {Path(name).suffix for name in names} and not output.is_dir():
        if len(names) > 1:
            raise InputError(f"{output}: name a folder: {to} takes {' and '.join(names)}")
        folder, names = output.parent, [output.name]
        answer = answer.renamed(output.name)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a folder")
    paths = {folder / name: text for name, text in zip(names, answer.files.values(), strict=True)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror or error}") from None
    for path in paths:
        refuse_existing(path, force=force)
    for path, text in paths.items():
        write_text_atomically(path, text, force=force)
    show(json_text(answer.to_dict()) if json else str(answer))
    say(f"wrote {', '.join(map(str, paths))}")
