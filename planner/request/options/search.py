"""Options of a search and of the cost of a whole training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta

from cost_models.plan.plan import Plan
from hardware_profiles.options import Option, declared
from planner.exchange.names import target_names
from planner.request.options import proposals
from planner.request.options.choices import ALLOWED, FINDS, OBJECTIVES

WHOLE_RUN: Final = "whole run"
SEARCH: Final = "search"
whole_run = partial(Option, group=WHOLE_RUN)
searching = partial(Option, group=SEARCH)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class WholeRunOptions:
    """Cost of a whole training run."""

    price: Annotated[
        str | float | None,
        whole_run(
            metavar="DOLLARS",
            complete=proposals.prices,
            help="an accelerator's hour; of each: H100-SXM-80GB=3,…",
            elsewhere=("cost", "hourly", "price_per_hour"),
        ),
    ] = None
    tokens: Annotated[
        str | float | None,
        whole_run(
            metavar="COUNT",
            help="tokens of the whole run, such as 300B or 1.5T",
            elsewhere=("num_tokens", "total_tokens", "train_tokens", "max_tokens"),
        ),
    ] = None
    compute_optimal: Annotated[
        bool | None,
        whole_run(
            "--compute-optimal",
            help="tokens = 20 for each parameter that a token uses (Chinchilla)",
            elsewhere=("chinchilla",),
            default="off",
            why="the most of a training run's FLOP; models that serve long are trained on more "
            "([goodput.md](../how-to/goodput.md))",
        ),
    ] = None
    carbon: Annotated[
        str | float | None,
        whole_run(
            metavar="GRAMS",
            help="CO2 of a kilowatt hour at the place of the run",
            default="none: no CO₂ in the answer",
            why="grams a kilowatt hour differ by place tenfold",
        ),
    ] = None
    failures: Annotated[
        str | None,
        whole_run(
            metavar="FIGURES",
            complete=proposals.failures,
            help="mtbf=HOURS of one accelerator, restart=MINUTES, stall=SECONDS of a checkpoint, "
            "storage=GB/s of a node (commas)",
            default="mtbf 50,677 h of one accelerator, restart 11 min, stall 5 s, storage "
            "0.98 GB/s a node",
            why="published figures ([goodput.md](../how-to/goodput.md)); the answer lists them",
        ),
    ] = None


def pinnable() -> list[str]:
    """Return the names of the parts of a plan in ``--fix``."""
    return [one.short for one in declared(Plan).values() if one.option is not None]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SearchOptions:
    """Freedom and objective of a search."""

    fix: Annotated[
        str | Mapping[str, Any] | None,
        searching(
            metavar="NAME=VALUE,…",
            as_text=True,
            common=True,
            values=pinnable,
            complete=proposals.plan_parts,
            help="pin parts of the plan, such as tp=2,zero=1: {values}",
            collects=Plan,
        ),
    ] = None
    objective: Annotated[
        str,
        searching(
            metavar="NAME",
            common=True,
            values=OBJECTIVES,
            help="the least {values} (default: {default})",
        ),
    ] = "time"
    top: Annotated[
        int | None,
        Meta(ge=1, le=1000),
        searching(
            common=True,
            help="plans to show (default: as many as the answer has room for, 10 with -v)",
            default="10, in a short answer as many as it has room for",
            why="an answer of at most 15 lines",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SurveyOptions:
    """Constraints, several clusters, and inverse questions: of models whose layers are known."""

    require: Annotated[
        Sequence[str] | str | None,
        searching(
            metavar="CONSTRAINT",
            common=True,
            help="tp<=8, zero!=3, schedule==1f1b, memory<=70GiB, step<=10s, mfu>=0.4 (several: "
            "commas)",
        ),
    ] = None
    pareto: Annotated[
        str | Sequence[str] | None,
        searching(
            metavar="A,B",
            as_text=True,
            values=OBJECTIVES,
            help="the exact front of two of {values}",
        ),
    ] = None
    allow: Annotated[
        str | Sequence[str] | None,
        searching(
            metavar="WHAT",
            as_text=True,
            values=ALLOWED,
            help="plans that are left out otherwise: {values}",
        ),
    ] = None
    gpus_at_most: Annotated[
        int | None, searching(help="try parts of the cluster, up to this number of accelerators")
    ] = None
    budget: Annotated[str | float | None, whole_run(metavar="DOLLARS", help="of the whole run")] = (
        None
    )
    days: Annotated[str | float | None, whole_run(metavar="COUNT", help="of the whole run")] = None
    to: Annotated[
        str | None,
        searching(
            metavar="TARGET",
            values=target_names,
            help="only plans that this trainer runs, which `export` writes: {values}",
        ),
    ] = None
    find: Annotated[
        str | None,
        searching(
            metavar="WHAT",
            values=FINDS,
            help="an inverse question: {values}; largest-model: MODEL lists them with commas",
        ),
    ] = None
