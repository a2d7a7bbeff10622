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
            help="parts of another plan, such as tp=16,pp=4 (may be repeated)",
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

    answer = ask(plan, why_not=why_not or (), sensitivity=sensitivity)
    print_answer(answer, json=json, verbose=verbose)
