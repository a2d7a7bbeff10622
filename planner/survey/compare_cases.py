"""Ranking of plans over several clusters, numbers of accelerators and precisions.

A *case* is one cluster with one precision and one global batch. All cases have the same sequences,
and the same batch unless batches are compared: what counts is the time, cost and energy of a token.
Within a case these give the same order (``objectives``); across cases they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from msgspec import Struct, field, structs
from numpy.typing import NDArray

from cost_models.plan.plan import OFFLOADS, Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.utilisation import least_step
from cost_models.scenario import Scenario
from cost_models.units import format_seconds
from hardware_profiles.errors import InputError
from hardware_profiles.progress import report, tracked
from planner.answer.ranked_plan import RankedPlan
from planner.assessment.assess import Assessment, assess, assess_plans
from planner.assessment.too_small import too_small
from planner.refinement.best_partition import StagedPlan, best_staged
from planner.refinement.placed_plan import PlacedPlan
from planner.refinement.placement import best_placed, can_be_placed, placed_front
from planner.request.constraints import Constraint, broken_by_result, holds_if_faster, only_breaks
from planner.request.objectives import pareto_front, results
from planner.request.options.choices import ALLOWED, PARTS, Objective
from planner.request.scenario import AssumedScenario
from planner.run_cost.prices import Prices, accelerator_cost
from planner.run_cost.training_run import DAY, RunRequest, StepCost
from planner.search.distinct import DISTINCT
from planner.search.first_plan import COMMON
from planner.search.search import SearchResult, search
from planner.search.simplicity import simplest_first
from planner.search.space import allowed_offloads

Floats = NDArray[np.float64]
SEARCHED: Final = 10  # cases; further ones that cannot be among the fastest are not searched
SEEN: Final = 40  # plans of a search among which stages are chosen, whatever their peaks
OFFLOADED: Final = "offload is allowed (nothing fits without it with its whole interval)"


class SurveyRequest(Struct, frozen=True):
    """Options of the search in every case."""

    fixed: Mapping[str, Any]
    require: tuple[Constraint, ...] = ()
    objective: Objective = "time"
    pareto: tuple[Objective, Objective] | None = None
    offloads: tuple[str, ...] = ("none",)
    offload_if_needed: bool = True  # if nothing fits without
    job: RunRequest = field(default_factory=RunRequest)
    prices: Prices = field(default_factory=Prices)
    top: int = 10  # plans that are found
    rows: int | None = None  # plans that are shown, where --top gives them
    trainer: str = ""  # whose plans alone are searched


class SurveyCase(Struct, frozen=True):
    """One cluster with one precision: the plans of its search, or the reason for none.

    ``found``: the best plan first. That is one with its own order of ranks or its own stages where
    that is faster than the best plan of the search; the plans of the search follow.
    """

    assumed: AssumedScenario
    result: SearchResult | None
    found: tuple[RankedPlan, ...]
    why: str | None = None  # invalid input, so that no search was made

    @property
    def usual(self) -> tuple[RankedPlan, ...]:
        """The plans of the search: with even stages and the default order of ranks."""
        return tuple(one for one in self.found if not one.is_own)

    @property
    def name(self) -> str:
        """Name of the cluster, as typed."""
        return self.scenario.cluster.name

    @property
    def scenario(self) -> Scenario:
        """Model, cluster, workload and software of the case."""
        return self.assumed.scenario

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions behind the scenario."""
        return self.assumed.assumptions


def survey(scenarios: Sequence[AssumedScenario], request: SurveyRequest) -> list[SurveyCase]:
    """Search every case; raise an InputError only if no case is valid.

    Those that may be the fastest are searched first; those that cannot win are left out, as they
    have a lower bound beyond SEARCHED other cases and as many plans as are asked.
    """
    cases: list[SurveyCase | None] = [None] * len(scenarios)
    errors: list[InputError] = []
    # seconds of a token: of the best plan of each case that fits, and of all plans
    best: list[float] = []
    plans: list[float] = []
    least = _least_seconds(scenarios, request)
    order = np.argsort(least, kind="stable").tolist()
    for place in tracked(order, "cluster {number} of {total}"):
        assumed = scenarios[place]
        report(assumed.scenario.cluster.name)
        if least[place] > max(_nth(best, SEARCHED), _nth(plans, request.top)):
            seconds = least[place] * assumed.scenario.workload.tokens_per_step
            why = f"{SEARCHED} others are faster: its steps take {format_seconds(seconds)} or more"
            cases[place] = SurveyCase(assumed, None, (), why)
            continue
        try:
            case = _search_case(assumed, request)
            where = f"{case.name}: " if len(scenarios) > 1 else ""
            case = cases[place] = _with_offload(case, request, f"{where}{OFFLOADED}")
        except InputError as error:
            errors.append(error)
            cases[place] = SurveyCase(assumed, None, (), str(error))
        else:
            fitting = [found.value("time") for found in case.found if found.fits]
            best, plans = [*best, *fitting[:1]], [*plans, *fitting]
    if len(errors) == len(cases):
        raise errors[0]
    return [case for case in cases if case is not None]


def _with_offload(case: SurveyCase, request: SurveyRequest, noted: str) -> SurveyCase:
    """Return the case with offload allowed, if only then it has plans, or plans that fit.

    ``noted``: the assumption that says so.
    """
    if _fits(case) or not _needs_offload(case, request):
        return case
    again = _search_case(case.assumed, structs.replace(request, offloads=OFFLOADS))
    if not _fits(again) and (case.found or not again.found):
        return case
    assumed = structs.replace(case.assumed, assumptions=(*case.assumptions, noted))
    return structs.replace(again, assumed=assumed)


def _fits(case: SurveyCase) -> bool:
    return any(found.fits for found in case.found)


def _nth(values: list[float], number: int) -> float:
    """Return the nth of the smallest values; infinity if they are fewer."""
    return sorted(values)[number - 1] if len(values) >= number else np.inf


def _least_seconds(scenarios: Sequence[AssumedScenario], request: SurveyRequest) -> Floats:
    """Return lower bounds of the seconds of a token in every case; 0 where all are searched.

    So are few cases, and those that a front or another objective ranks.
    """
    least = np.zeros(len(scenarios))
    if len(scenarios) <= SEARCHED or request.pareto is not None or request.objective != "time":
        return least
    if request.job.is_given:
        return least
    for place, assumed in enumerate(scenarios):
        with suppress(InputError):  # which its search raises, too
            tokens = assumed.scenario.workload.tokens_per_step
            least[place] = least_step(assumed.scenario) / tokens
    return least


def _search_case(assumed: AssumedScenario, request: SurveyRequest) -> SurveyCase:
    """Search one case; try stages of their own and, on irregular trees, orders of ranks."""
    scenario = assumed.scenario
    require = (*request.require, *job_limits(scenario, request))
    device = request.fixed.get("offload_device", "cpu")
    small = all(too_small(scenario, one, device) for one in request.offloads)
    run_search = partial(
        search,
        fixed={**COMMON, **request.fixed} if small else request.fixed,  # no plan fits in any case
        offloads=request.offloads,
        objective="memory" if request.objective == "memory" else "time",
        front=request.pareto is not None,
    )
    asked: dict[str, Any] = {
        "top": request.top,
        "distinct": request.rows or DISTINCT,
        "with_near": _ranks_by_step(request),
    }
    wide = run_search(scenario, require=require, **asked)
    wide = wide.simplest_first() if asked["with_near"] else wide
    result = wide if request.pareto else replace(wide.first(request.top), near=None)
    slower = [one for one in require if not only_breaks(one)]
    if not wide.plans and _out_of_reach(scenario, require):
        return SurveyCase(assumed, result, ())
    if not wide.plans and len(slower) < len(require) and _ranks_by_step(request):
        wide = run_search(
            scenario, require=slower, **asked
        )  # with their own stages or order, plans are faster
    seen = wide.plans[: max(request.top, SEEN)]
    staged = best_staged(
        scenario,
        seen,
        wide.near,
        min(wide.seconds, default=np.inf),
        recomputed=wide.recomputed,
        require=require,
    )
    placed: list[PlacedPlan | None] = []
    if can_be_placed(scenario.cluster) and wide.fits:
        # constraints that a plan may keep in an order of its own alone
        kept = [one for one in require if not one.of_result or holds_if_faster(one)]
        by_step = partial(search, fixed=run_search.keywords["fixed"], offloads=request.offloads)
        if request.pareto is not None:
            placed = [
                *placed_front(
                    scenario,
                    wide,
                    request.fixed,
                    lambda own, known, grids: run_search(
                        own, require=(*require, grids), known=known
                    ),
                )
            ]
        elif request.objective == "memory":  # which no order changes
            least = float(price(scenario, PlanTable.from_plans([seen[0]])).peak[0])
            kept.append(Constraint("memory", "<=", least, "the smallest peak"))
        if request.pareto is None:
            placed = [
                best_placed(
                    scenario,
                    seen,
                    staged,
                    lambda own, top, below: by_step(own, require=kept, top=top, below=below),
                    wide.near,
                    recomputed=wide.recomputed,
                    require=require,
                )
            ]
    own = [_placed(one, request) for one in placed if one is not None]
    own += [] if staged is None else [_staged(scenario, staged, request)]
    best = [found for found in own if _holds(found, require)]
    return SurveyCase(assumed, result, (*best, *found_of(scenario, result, request)))


def _out_of_reach(scenario: Scenario, require: Sequence[Constraint]) -> bool:
    """Whether a step must be shorter than the model's FLOP take at the best rate."""
    limits = [one.value for one in require if one.name == "step" and only_breaks(one)]
    return bool(limits) and least_step(scenario) > min(limits)


def _ranks_by_step(request: SurveyRequest) -> bool:
    return request.objective != "memory" and request.pareto is None


def _placed(placed: PlacedPlan, request: SurveyRequest) -> RankedPlan:
    """Return the plan with its own order of ranks."""
    assessment = assess(placed.scenario, placed.plan)
    return _found(placed.scenario, placed.plan, assessment, request, placed=placed)


def _staged(scenario: Scenario, staged: StagedPlan, request: SurveyRequest) -> RankedPlan:
    """Return the plan with stages of its own."""
    own = staged.scenario(scenario)
    return _found(own, staged.plan, assess(own, staged.plan), request, staged=staged)


def _holds(found: RankedPlan, require: Sequence[Constraint]) -> bool:
    """Whether a plan fits and meets the requirements on its results."""
    columns = results(
        found.scenario,
        PlanTable.from_plans([found.plan]),
        np.array([found.assessment.time.step_seconds]),
        np.array([found.assessment.memory.peak_bytes]),
    )
    return found.fits and not broken_by_result(require, columns, 1)[0]


def _needs_offload(case: SurveyCase, request: SurveyRequest) -> bool:
    """Whether offload may help: plans are too large, and no option fixes or forbids it.

    So are ZeRO stages of one rank, which some trainers have for offload alone. Plans that fit and
    are too slow for the request, offload would not make faster.
    """
    scenario, result = case.scenario, case.result
    limits = [*request.require, *job_limits(scenario, request)]
    times = {one.text for one in limits if one.of_result and one.name != "memory"}
    device = request.fixed.get("offload_device", "cpu")
    return (
        request.offload_if_needed
        and result is not None
        and (
            result.counts.too_large + result.counts.tight > 0
            or "zero_alone" in result.counts.illegal
        )
        and not times & set(result.counts.excluded)
        and scenario.on_gpu
        and scenario.cluster.accelerator.host_bandwidth is not None
        and "offload" not in request.fixed
        and request.offloads == ("none",)
        and not any(c.name == "offload" for c in request.require)
        and not all(too_small(scenario, one, device) for one in OFFLOADS)
    )


def found_of(
    scenario: Scenario, result: SearchResult, request: SurveyRequest
) -> tuple[RankedPlan, ...]:
    """Return the plans of a search with assessment and cost."""
    assessments = assess_plans(scenario, result.plans)
    return tuple(
        _found(scenario, plan, assessment, request)
        for plan, assessment in zip(result.plans, assessments, strict=True)
    )


def _found(
    scenario: Scenario,
    plan: Plan,
    assessment: Assessment,
    request: SurveyRequest,
    *,
    placed: PlacedPlan | None = None,
    staged: StagedPlan | None = None,
) -> RankedPlan:
    seconds, rate = assessment.time.step_seconds, accelerator_cost(scenario.cluster, request.prices)
    step = StepCost(seconds, scenario.workload.tokens_per_step, plan.world_size, rate)
    one = RankedPlan(scenario, plan, step, request.job, placed, staged, request.trainer)
    one.__dict__["assessment"] = assessment
    return one


def job_limits(scenario: Scenario, request: SurveyRequest) -> list[Constraint]:
    """Return constraints on the step from the budget and the days of a training run."""
    job = request.job
    if job.tokens is None:
        return []
    unit = StepCost(
        1.0,
        scenario.workload.tokens_per_step,
        scenario.cluster.num_gpus,
        accelerator_cost(scenario.cluster, request.prices),
    )
    steps = float(np.ceil(job.tokens / unit.tokens))
    limits = []
    if job.budget is not None and unit.dollars is not None:
        seconds = job.budget / (steps * unit.dollars)
        limits.append(Constraint("step", "<=", seconds, f"--budget {job.budget:,.0f}"))
    if job.days is not None:
        limits.append(Constraint("step", "<=", job.days * DAY / steps, f"--days {job.days:g}"))
    return limits


def ranked(cases: Sequence[SurveyCase], request: SurveyRequest) -> list[RankedPlan]:
    """Return the plans of all cases, best first: plans that fit, else tight ones.

    With ``pareto``: the exact front of the two objectives, sorted by the first. It follows from the
    fronts of time and memory of the cases, since every objective grows with one of these.
    """
    every = [found for case in cases for found in case.found]
    fitting = [found for found in every if found.fits] or every
    if request.pareto is None:
        fitting.sort(key=sort_key(request))
        return _simplest_first(fitting, request)[: request.top]
    first, second = (np.array([f.value(name) for f in fitting]) for name in request.pareto)
    known = np.isfinite(first) & np.isfinite(second)
    front = [row for row in pareto_front(first, second) if known[row]]
    return [fitting[row] for row in front]


def _simplest_first(plans: list[RankedPlan], request: SurveyRequest) -> list[RankedPlan]:
    """Return sorted plans with the simplest of the fastest in the first one's case first."""
    if not plans or not _ranks_by_step(request):
        return plans
    mine = [found for found in plans if found.scenario is plans[0].scenario]
    first = mine[simplest_first([f.step.seconds for f in mine], [f.plan for f in mine])[0]]
    return [first, *(found for found in plans if found is not first)]


def sort_key(request: SurveyRequest) -> Callable[[RankedPlan], tuple[float, ...]]:
    """Return the sort key of plans of all cases: the objective, then time, then memory.

    With a budget or days but no tokens: the most tokens first.
    """

    def key(found: RankedPlan) -> tuple[float, ...]:
        own = found.value(request.objective)
        rest = (found.value("time"), found.value("memory"), float(found.plan.world_size))
        finds_tokens = request.job.tokens is None and request.objective in ("time", "cost")
        if finds_tokens and found.run is not None:
            return (-found.run.cost.tokens, own, *rest)
        return (own, *rest)

    return key


def offloads_of(allow: Sequence[str]) -> tuple[str, ...]:
    """Return the values of Plan.offload that ``--allow`` names: offload, or some of its parts."""
    parts: set[str] = set()
    for word in allow:
        if word == "offload":
            parts |= set(PARTS)
        elif word.removeprefix("offload=") in PARTS:
            parts.add(word.removeprefix("offload="))
        else:
            raise InputError(
                f"--allow {word[:40]!r}: must be {', '.join(ALLOWED[:-1])} or {ALLOWED[-1]} "
                "(several: commas)"
            )
    return allowed_offloads(parts)
