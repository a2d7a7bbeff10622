"""``shardplan explain``: its options."""

from __future__ import annotations

from typing import Annotated

from hardware_profiles.options import Option
from planner.cli.options import Json, PlanPath, Verbose
from planner.cli.outputs import print_answer
from planner.request.options import proposals


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
