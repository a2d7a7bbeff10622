"""``plan()``: the best plans, from Python or from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import structs

from cost_models.legality.capabilities import capabilities, trainer_named
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, NoLegalPlanError
from hardware_profiles.options import check_value, declared
from hardware_profiles.software.trainer import software_names
from planner.answer.plan_answer import PlanAnswer
from planner.exchange.names import target_names
from planner.request.clusters import clusters_of
from planner.request.config_file import with_config
from planner.request.constraints import Constraint, parse_requirements, require_consistent
from planner.request.executor_process import is_module, refuse_inputs
from planner.request.limits import pins_of, require_possible, runnable
from planner.request.model import model_of
from planner.request.optimal_tokens import with_optimal_tokens
from planner.request.options.arguments import takes
from planner.request.options.choices import FINDS, OBJECTIVES, Objective
from planner.request.options.search import SurveyOptions, WholeRunOptions
from planner.request.options.training import AdapterOptions, CommonOptions, LayerOptions
from planner.request.pins import SHORT_NAMES, check_fixed, parse_fixed
from planner.request.requests import PlanRequest, values_of
from planner.request.scenario import adapting, check_choice
from planner.request.stage_layers import without_list
from planner.run_cost.prices import parse_prices, require_known
from planner.run_cost.training_run import parse_run_request
from planner.survey.cases import (
    WorkloadRequest,
    models_of,
    read_at_most,
    read_batches,
    read_precisions,
    scenarios_of,
    sizes_of,
)
from planner.survey.compare_cases import (
    OFFLOADED,
    SurveyCase,
    SurveyRequest,
    offloads_of,
    ranked,
    survey,
)

if TYPE_CHECKING:
    from planner.survey.answer import SurveyAnswer
    from planner.survey.inverse import InverseAnswer
    from planner.traced.answers import TracedPlanAnswer

    PlannedAnswer = PlanAnswer | SurveyAnswer | InverseAnswer
    PlanAnswers = PlannedAnswer | TracedPlanAnswer

USUAL_TOP: Final = 10  # plans unless --top is given
MOST_ALIKE: Final = 4  # plans that share a row of a table


@takes(PlanRequest)
def plan(request: PlanRequest) -> PlanAnswers:
    """Search for the best plan; ``fix`` pins parts of it (``"tp=2,zero=1"`` or a mapping).

    ``require``: constraints on parts and results (``"tp<=8 and memory<=70GiB"``). ``objective``:
    time, cost, memory or energy; ``pareto``: the exact front of two of them ("time,memory").
    ``cluster`` may name several ("8xA100-80GB,1..4x8xH100-SXM"), ``precision`` too ("bf16,fp8").
    ``gpus_at_most`` tries parts of a cluster. ``allow``: "offload". ``price``: dollars an hour of
    one accelerator; ``tokens`` (``compute_optimal``: 20 for each parameter), ``budget`` (dollars),
    ``days``: of the whole run;
    ``carbon``: grams of CO2 a kilowatt hour, ``failures``: "mtbf=50000,restart=11,stall=5".
    ``to``: a trainer whose plans alone are searched ("deepspeed"); ``source``: its file, from which
    workload and trainer are taken.
    ``find``: an inverse question (``planner.survey.inverse``). ``layers`` pins those of every stage
    ("3,5,5,3").
    Raises NoLegalPlanError if no plan fits; it names the rules that removed the most candidates.
    """
    request, limits = _with_target(with_optimal_tokens(request))
    fixed, by_stage = without_list(fixed_parts(request.fix))
    if limits is not None:
        require_possible(limits, fixed)
        if stages := _stages_priced_apart(request, limits, fixed):
            return _best_of_stages(request, limits, stages)
        if request.software is None:
            request = replace(request, software=capabilities(limits).software)
    options = _survey_request(request, limits, fixed)
    batches = read_batches(request.global_batch_size)
    if len(batches) > 1 and (request.find is not None or is_module(request.model)):
        raise InputError(
            f"global_batch_size = {request.global_batch_size}: one size is expected here (not with "
            "--find, nor for module:package.path:factory)"
        )
    if request.find is not None:
        check_choice("find", request.find, FINDS)
    if is_module(request.model):
        return _plan_module(request, options, next(iter(batches), None), by_stage)
    refuse_inputs(request.inputs)
    models = models_of(request.model, request.find)
    clusters = clusters_of(request.cluster, request.power)
    _require_prices(request, options, clusters)
    job = WorkloadRequest(
        model_of(models[0]),
        {
            "optimizer": request.optimizer,
            "adapter": adapting(**values_of(request, AdapterOptions)),
            **values_of(request, LayerOptions),
            "stage_recompute_layers": by_stage,
        },
        batches[0] if len(batches) == 1 else None,
        options.job.tokens,
    )
    at_most, precisions = read_at_most(request.gpus_at_most), read_precisions(request.precision)
    if request.find is not None:
        from planner.survey.inverse import answer_inverse

        return answer_inverse(request.find, job, models, clusters, precisions, options, at_most)
    sizes = sizes_of(clusters, at_most, fewer=bool(_objectives(options) & {"cost", "energy"}))
    whole_run = options.job.is_given
    scenarios = scenarios_of(job, sizes, precisions, batches=batches, whole_run=whole_run)
    for one in scenarios if limits is not None else ():
        problem = capabilities(str(limits)).problem_of_workload(one.scenario.workload)
        if problem is not None:
            raise InputError(f"--to {limits}: {problem}")
    cases = tuple(survey(scenarios, options))
    simple = (
        len(cases) == 1
        and options.pareto is None
        and not whole_run
        and request.price is None
        and request.objective in ("time", "memory")
    )
    if simple and cases[0].result is not None and cases[0].result.plans:
        return _plan_answer(request, limits, options, cases[0])
    return _answer(cases, options)


def _survey_request(
    request: PlanRequest, limits: str | None, fixed: Mapping[str, Any]
) -> SurveyRequest:
    """Return the options of the search in every case."""
    rows = request.top
    if rows is not None:
        rows = check_value(declared(PlanRequest)["top"], rows)
    constraints = parse_requirements(request.require)
    require_consistent(constraints, fixed)
    if limits is not None:
        experts = any(model_of(one).has_experts for one in models_of(request.model, request.find))
        constraints = (*constraints, runnable(limits, experts=experts))
        fixed = {**pins_of(limits), **fixed}
    return SurveyRequest(
        fixed=fixed,
        require=constraints,
        objective=_objective("objective", request.objective),
        pareto=_two_objectives(request.pareto),
        offloads=_offloads(request.allow),
        job=parse_run_request(
            request.tokens, request.budget, request.days, request.carbon, request.failures
        ),
        prices=parse_prices(request.price),
        top=_shown(rows) * (1 if rows is None else MOST_ALIKE),
        rows=rows,
        trainer=limits or "",
    )


def _shown(rows: int | None) -> int:
    """Return the number of plans that are shown."""
    return rows or USUAL_TOP


def _objectives(options: SurveyRequest) -> set[Objective]:
    return {options.objective, *(options.pareto or ())}


def _require_prices(request: PlanRequest, options: SurveyRequest, clusters: list[Cluster]) -> None:
    """Raise where the answer needs dollars or watts that are not known."""
    objectives = _objectives(options)
    money = (
        "cost" in objectives or options.job.budget is not None or request.find == "cheapest-cluster"
    )
    for what in (["cost"] if money else []) + (["energy"] if "energy" in objectives else []):
        require_known(clusters, options.prices, what=what)


def _plan_module(
    request: PlanRequest,
    options: SurveyRequest,
    batch: int | None,
    by_stage: tuple[int, ...] | None,
) -> TracedPlanAnswer:
    """Answer for a ``module:package.path:factory``."""
    from planner.traced.fit_and_plan import ModuleQuestion, plan_module

    _refuse_for_modules(request)
    of_layers = {**values_of(request, LayerOptions), "stage_recompute_layers": by_stage}
    question = ModuleQuestion(
        model=str(request.model),
        cluster=_one_of(clusters_of(request.cluster, request.power), str(request.model)),
        inputs=request.inputs,
        **{**values_of(request, CommonOptions), "global_batch_size": batch},
        unknown={**of_layers, **values_of(request, AdapterOptions)},
        fixed=options.fixed,
    )
    return plan_module(question, top=_shown(options.rows), rows=options.rows)


def _plan_answer(
    request: PlanRequest, limits: str | None, options: SurveyRequest, case: SurveyCase
) -> PlanAnswer:
    """Return the answer of a single case that has plans."""
    result, top = case.result, _shown(options.rows)
    assert result is not None
    by_time = limits is None and request.objective == "time"
    return PlanAnswer(
        scenario=case.scenario,
        result=result.first(top),
        ranked=case.found[:top],
        assumptions=case.assumptions,
        fixed=dict(options.fixed),
        further=() if options.rows is None else case.found[top:],
        rows=options.rows,
        require=options.require if by_time else None,
        compares_trainers=by_time and request.software is None,
    )


def _with_target(request: PlanRequest) -> tuple[PlanRequest, str | None]:
    """Return the request with the options of a trainer's file, and the target that limits it.

    A target is named by ``to``, by ``software``, or by the file.
    """
    if request.software is not None:
        request = replace(request, software=trainer_named(request.software))
    named = None if request.software in software_names() else request.software
    target = request.to or (named if named and named in target_names() else None)
    if target is not None:
        capabilities(target)  # the name exists
        if named == target:
            request = replace(request, software=None)
    if target is None and request.source is None:
        return request, None
    if is_module(request.model):
        raise InputError("--to, --from: are not for module:package.path:factory")
    clusters = clusters_of(request.cluster)
    reading = None
    if request.source is not None:
        request, reading = with_config(request, _one_of(clusters, "--from"))
    return request, target or (None if reading is None else reading.target)


def _stages_priced_apart(
    request: PlanRequest, limits: str, fixed: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the ZeRO stages of a target with software profiles of their own; () for one search."""
    table = capabilities(limits)
    if request.software is not None:
        return ()
    if "zero_stage" in fixed:
        return (fixed["zero_stage"],)
    if not table.software_of_zero_stage:
        return ()
    stages = tuple(int(stage) for stage in table.limits()["zero_stage"])
    constraints = parse_requirements(request.require)
    wanted = (one for one in stages if _allows(limits, constraints, {**fixed, "zero_stage": one}))
    return tuple(wanted) or stages


def _allows(limits: str, constraints: Sequence[Constraint], fixed: Mapping[str, Any]) -> bool:
    """Whether a target and requirements leave plans with pinned parts."""
    try:
        require_possible(limits, fixed)
        require_consistent(constraints, fixed)
    except InputError:
        return False
    return True


def _best_of_stages(request: PlanRequest, limits: str, stages: tuple[int, ...]) -> PlanAnswers:
    """Return the best answer over ZeRO stages, each priced with its own software profile."""
    table, fixed = capabilities(limits), fixed_parts(request.fix)
    found: list[PlanAnswers] = []
    refused: NoLegalPlanError | None = None
    for stage in stages:
        one = replace(
            request,
            to=limits,
            source=None,
            software=table.software_for(stage, adapters=bool(request.lora or request.qlora)),
            fix={**fixed, "zero_stage": stage},
        )
        try:
            found.append(plan(**vars(one)))
        except NoLegalPlanError as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    if request.find is not None:
        best = min((cast("InverseAnswer", answer) for answer in found), key=_furthest)
        asked = structs.replace(best.answer.request, fixed=fixed)
        return replace(best, answer=replace(best.answer, request=asked))
    surveys = [answer for answer in found if not isinstance(answer, PlanAnswer)]
    if len(surveys) < len(found):
        alone = (answer for answer in found if isinstance(answer, PlanAnswer))
        return replace(min(alone, key=_rank), fixed=fixed)
    every = zip(*(cast("SurveyAnswer", answer).cases for answer in surveys), strict=True)
    options = structs.replace(_survey_request(request, limits, fixed), fixed=fixed)
    return _answer(tuple(_of_stages(same, options) for same in every), options)


def _of_stages(cases: Sequence[SurveyCase], options: SurveyRequest) -> SurveyCase:
    """Return the best of one case's ZeRO stages; for a front, with the plans of all like it."""
    best = min(cases, key=_rank)
    if options.pareto is None:
        return best
    alike = (case for case in cases if _rank(case)[:2] == _rank(best)[:2])
    return structs.replace(best, found=tuple(one for case in alike for one in case.found))


def _rank(answer: PlanAnswer | SurveyCase) -> tuple[float, ...]:
    """Order answers of ZeRO stages: plans that fit, without offload that was not asked for."""
    plans = answer.ranked if isinstance(answer, PlanAnswer) else answer.found
    if not plans:
        return (2.0,)
    offloaded = any(words.endswith(OFFLOADED) for words in answer.assumptions)
    return not plans[0].fits, offloaded, plans[0].step.seconds


def _furthest(answer: InverseAnswer) -> tuple[float, float]:
    """Order answers of an inverse question: what is asked for, then the time of a token."""
    first = answer.answer.ranked[0]
    if answer.find == "cheapest-cluster":
        amount = first.value("cost")
    elif answer.find == "largest-model":
        amount = -first.scenario.model.num_parameters
    else:
        amount = answer.value if answer.find == "fewest-gpus" else -answer.value
    return amount, first.value("time")


def _answer(cases: tuple[SurveyCase, ...], survey_request: SurveyRequest) -> SurveyAnswer:
    from planner.survey.answer import assumptions_of, no_plan_error, survey_answer

    best = ranked(cases, survey_request)
    if not best:
        raise no_plan_error(cases, survey_request)
    found = tuple(best)
    return survey_answer(
        survey_request, cases, found, tuple(assumptions_of(cases, found, survey_request))
    )


def _objective(name: str, word: str) -> Objective:
    return cast(Objective, check_choice(name, word, OBJECTIVES))


def _two_objectives(pareto: str | Sequence[str] | None) -> tuple[Objective, Objective] | None:
    if pareto is None:
        return None
    words = [w.strip() for w in pareto.split(",")] if isinstance(pareto, str) else list(pareto)
    if len(words) != 2 or words[0] == words[1]:
        raise InputError(
            f"--pareto {pareto!r}: must be two different ones of {', '.join(OBJECTIVES)}, such as "
            "time,memory"
        )
    return _objective("pareto", words[0]), _objective("pareto", words[1])


def _offloads(allow: str | Sequence[str] | None) -> tuple[str, ...]:
    texts = [allow] if isinstance(allow, str) else list(allow or ())
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    return offloads_of(words)


def _one_of(clusters: Sequence[Cluster], model: str) -> Cluster:
    if len(clusters) > 1:
        names = ", ".join(cluster.name for cluster in clusters)
        raise InputError(f"cluster = {names}: {model} takes one cluster at a time")
    return clusters[0]


def _refuse_for_modules(request: PlanRequest) -> None:
    """Raise for options of models whose layers are known."""
    given = values_of(request, SurveyOptions) | values_of(request, WholeRunOptions)
    named = [name for name, value in given.items() if value is not None and value != []]
    if request.objective != "time":
        named.append("objective")
    if named:
        flag = declared(PlanRequest)[named[0]].flags[0]
        raise InputError(f"{flag} is not for module:package.path:factory")


def fixed_parts(fix: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the pinned parts of a plan by name."""
    if fix is None or isinstance(fix, Mapping):
        given = {name: value for name, value in (fix or {}).items() if value is not None}
        return check_fixed({SHORT_NAMES.get(name, name): value for name, value in given.items()})
    if isinstance(fix, str):
        return parse_fixed(fix)
    raise InputError(f"fix = {fix!r} (must be text such as 'tp=2,zero=1' or a mapping)")
