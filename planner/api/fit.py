"""``fit()``: whether a plan fits, from Python or from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from cost_models.legality.capabilities import (
    capabilities,
    require_runnable_workload,
    trainer_named,
    usual,
)
from cost_models.legality.rules import FEWEST
from cost_models.partition.schedules import default_virtual_stages
from cost_models.plan.plan import Plan
from hardware_profiles.errors import InputError
from hardware_profiles.options import declared
from hardware_profiles.progress import report
from hardware_profiles.software.trainer import software_names
from planner.advice.nearest import require_runnable
from planner.answer.fit_answer import FitAnswer
from planner.assessment.assess import assess
from planner.assessment.host_memory import about_offload
from planner.assessment.verdict import VERDICTS
from planner.exchange.names import target_names
from planner.request.clusters import cluster_of
from planner.request.command import describe_plan
from planner.request.config_file import notes_of, with_config
from planner.request.executor_process import is_module, refuse_inputs
from planner.request.limits import with_limits
from planner.request.model import model_of
from planner.request.optimal_tokens import with_optimal_tokens
from planner.request.options.arguments import takes
from planner.request.options.search import WholeRunOptions
from planner.request.options.training import AdapterOptions, CommonOptions, LayerOptions
from planner.request.pins import check_fixed, pinned_or_default
from planner.request.requests import FitRequest, ServingOptions, plan_fields, values_of
from planner.request.scenario import AssumedScenario, adapting, build_scenario
from planner.request.stage_layers import without_list
from planner.run_cost.failures import training_run_with_notes
from planner.run_cost.prices import parse_prices
from planner.run_cost.training_run import parse_run_request
from planner.search.first_plan import FirstPlan, first_plan, is_complete
from planner.search.simplicity import CLOSE

if TYPE_CHECKING:
    from planner.exchange.target import ConfigReading
    from planner.serving.answer import ServingAnswer
    from planner.traced.answers import TracedFitAnswer


@takes(FitRequest)
def fit(request: FitRequest) -> FitAnswer | ServingAnswer | TracedFitAnswer:
    """Return whether a model trains on a cluster with a plan, and with which margin.

    The arguments are the fields of :class:`~planner.request.requests.FitRequest`: a model, a
    cluster, and options such as ``tensor_parallel=2``. The parts of the plan that are not given are
    searched: the verdict is that of the simplest of the fastest common plans
    (``planner.search.first_plan``), and no plan with the given parts fits where that one does not.
    Where data parallelism, ZeRO, recomputation and micro-batch size are all given, the plan is
    complete: other parts take their defaults. ``layers``: those of every stage in order
    (``"3,5,5,3"``), even ones by default. ``inputs``: arguments of a
    ``module:package.path:factory`` (``"x=float32[B,3,224,224]"``).

    ``tokens`` of a whole run (``compute_optimal``: 20 for each parameter) add its days, dollars
    (``price`` of an accelerator's hour), energy, CO2 (``carbon``: grams a kilowatt hour) and share
    of progress (``failures``) to the answer.

    ``source``: another trainer's file (``ds_config.json``, an Accelerate YAML, …), from which the
    options are taken that are not given.

    ``inference``: whether the cluster serves ``concurrency`` sequences at once, of ``context_len``
    tokens each (prompt and answer); see ``planner.serving.fit``.
    """
    if request.inference:
        return _serve(request)
    return _of_training(request)


def fit_as_stated(request: FitRequest) -> FitAnswer:
    """Return the answer of ``fit`` for a run as it is stated.

    Nothing is searched: parts of the plan that are not given take defaults, ZeRO stage 0 among
    them.
    """
    if is_module(request.model):
        raise InputError(f"{request.model}: a model of layers is expected here, not a module")
    answer = _of_training(request, searched=False)
    assert isinstance(answer, FitAnswer)
    return answer


def _of_training(request: FitRequest, *, searched: bool = True) -> FitAnswer | TracedFitAnswer:
    if request.software is not None:
        request = replace(request, software=trainer_named(request.software))
        if request.software in target_names() and request.software not in software_names():
            return _best_of_stages(request, request.software, searched=searched)
    return _fit(request, searched=searched)


def _fit(
    given: FitRequest, target: str | None = None, *, searched: bool = True
) -> FitAnswer | TracedFitAnswer:
    """Answer for training; ``target``: a trainer whose limits hold, whatever profile prices it."""
    request, reading = _with_config(with_optimal_tokens(given))
    _refuse_serving_options(request)
    fixed, by_stage = without_list(check_fixed(plan_fields(request), "plan"))
    common, of_layers, adapters = (
        values_of(request, group) for group in (CommonOptions, LayerOptions, AdapterOptions)
    )
    of_layers["stage_recompute_layers"] = by_stage
    whole = values_of(given, WholeRunOptions)
    if is_module(request.model):
        from planner.traced.fit_and_plan import ModuleQuestion, fit_module

        asked = ModuleQuestion(
            model=str(request.model),
            cluster=cluster_of(request.cluster, request.power),
            inputs=request.inputs,
            **common,
            unknown={**of_layers, **adapters, **whole},
            fixed=fixed,
        )
        return fit_module(asked)
    refuse_inputs(request.inputs)
    job = parse_run_request(request.tokens, None, None, request.carbon, request.failures)
    prices = parse_prices(request.price)
    if request.price is not None and not job.is_given:
        raise InputError("--price: needs --tokens, such as --tokens 300B")
    question = build_scenario(
        model_of(request.model),
        cluster_of(request.cluster, request.power),
        micro_batch_size=fixed.get("micro_batch_size", 1),
        adapter=adapting(**adapters),
        **common,
        **of_layers,
    )
    if target is not None:
        question = _limited(question, target)
    report("pricing the plan")
    if by_stage is not None or fixed.get("recompute_layers"):
        fixed.setdefault("recompute", "full")  # some layers, so these wholly
    question, plan, assumptions = _default_plan(
        question, fixed, batch_given=request.global_batch_size is not None, sharded=searched
    )
    scenario = question.scenario
    if searched and not is_complete(fixed):
        found = first_plan(scenario, fixed)
        if chosen := found.plan or found.smallest:
            plan, assumptions = chosen, [_searched(chosen, found)]
    require_runnable(scenario, plan)
    assessment = assess(scenario, plan)
    assumptions += about_offload(scenario, plan, assessment.host)
    run, said = training_run_with_notes(scenario, plan, assessment, job, prices)
    assumptions += said
    return FitAnswer(
        scenario=scenario,
        plan=plan,
        assessment=assessment,
        assumptions=(*question.assumptions, *assumptions),
        notes=() if reading is None else notes_of(request, scenario.cluster, reading),
        job=run,
        fixed=fixed if searched else {**_degrees(plan), **fixed},
        whole_run=whole,
    )


def _degrees(plan: Plan) -> dict[str, int]:
    """Return the parallelism that a trainer needs code for; ways out of a stated run keep it."""
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    return {name: getattr(plan, name) for name in names}


def _best_of_stages(
    request: FitRequest, target: str, *, searched: bool
) -> FitAnswer | TracedFitAnswer:
    """Return the best answer over the ZeRO stages of a trainer, each with its own profile."""
    table = capabilities(target)
    adapters = request.lora is not None or request.qlora is not None
    stages = table.limits()["zero_stage"] if searched else [0]
    stated = _with_config(request)[0].zero_stage
    if stated is not None:
        stages = [stated]
    found: list[Any] = []
    refused: InputError | None = None
    for stage in stages:
        profile = table.software_for(stage, adapters=adapters)
        try:
            asked = replace(request, software=profile, zero_stage=stage)
            answer: Any = _fit(asked, target, searched=searched)
        except InputError as error:
            refused = error
            continue
        note = f"software {profile} ({table.title} with ZeRO stage {stage})"
        found.append(replace(answer, assumptions=(*answer.assumptions, note)))
    if refused is not None and not found:
        raise refused
    best: FitAnswer | TracedFitAnswer = min(found, key=_amount)
    return best


def _limited(question: AssumedScenario, target: str) -> AssumedScenario:
    """Return the question with a trainer's limits in its software profile."""
    scenario = with_limits(question.scenario, target)
    require_runnable_workload(scenario.software, scenario.workload)
    return AssumedScenario(scenario, question.assumptions)


def _amount(answer: FitAnswer | TracedFitAnswer) -> tuple[int, float]:
    """Order answers by verdict, then by step time, or by memory where a plan does not fit."""
    one, verdict = answer.assessment, VERDICTS.index(answer.verdict)
    fits = answer.verdict != VERDICTS[-1]
    return verdict, one.time.step_seconds if fits else one.memory.peak_bytes


def _with_config(request: FitRequest) -> tuple[FitRequest, ConfigReading | None]:
    """Return the request with the options of another trainer's file."""
    if request.source is None:
        return request, None
    if is_module(request.model):
        raise InputError(f"--from {request.source}: is not for module:package.path:factory")
    return with_config(request, cluster_of(request.cluster))


def _serve(request: FitRequest) -> ServingAnswer:
    """Answer for serving; an option of training alone is an error."""
    from planner.serving.fit import fit_serving
    from planner.serving.request import SHARED, refuse_training_options
    from planner.serving.scenario import PLAN_FIELDS

    refuse_training_options(request)
    parts = {name: value for name, value in plan_fields(request).items() if name in PLAN_FIELDS}
    asked = {name: getattr(request, name) for name in SHARED} | values_of(request, ServingOptions)
    model, cluster = model_of(request.model), cluster_of(request.cluster, request.power)
    return fit_serving(model, cluster, check_fixed(parts, "plan"), **asked)


def _refuse_serving_options(request: FitRequest) -> None:
    """Raise where an option of serving is given without ``--inference``."""
    given = values_of(request, ServingOptions)
    asked = [
        declared(FitRequest)[name].flags[0] for name, value in given.items() if value is not None
    ]
    if asked:
        raise InputError(f"{', '.join(asked)}: needs --inference")


def _searched(plan: Plan, found: FirstPlan) -> str:
    """Return the assumption about a plan that was searched."""
    why = f"the simplest of the fastest within {100 * CLOSE:g} %" if found.plan else "the smallest"
    return f"plan {describe_plan(plan)} (searched: {why} of {found.priced:,} common plans)"


def _default_plan(
    question: AssumedScenario, fixed: Mapping[str, Any], *, batch_given: bool, sharded: bool
) -> tuple[AssumedScenario, Plan, list[str]]:
    """Fill in a plan; the batch follows from it where nobody gave one.

    ``sharded``: by default over all data-parallel ranks; else nothing is, nor recomputed.
    """
    num_gpus = question.scenario.cluster.num_gpus
    assumptions: list[str] = []
    value = partial(pinned_or_default, fixed, assumptions)
    tensor = value("tensor_parallel", 1, "none")
    pinned = question.scenario.layer_ranges
    virtual = fixed.get("virtual_stages")
    if virtual is None:
        virtual = default_virtual_stages(fixed.get("pipeline_schedule"))
    if pinned is None:
        pipeline = value("pipeline_parallel", 1, "none")
    else:
        stages = max(1, len(pinned) // virtual)
        pipeline = value("pipeline_parallel", stages, "a rank for the stages that are given")
    context = fixed.get("context_parallel", 1)
    ranks = tensor * pipeline * context
    if "data_parallel" not in fixed and num_gpus % ranks:
        raise InputError(
            f"tensor_parallel {tensor} x pipeline_parallel {pipeline}"
            + (f" x context_parallel {context}" if context > 1 else "")
            + f" = {ranks} does not divide "
            f"the {num_gpus} accelerators"
        )
    if batch_given:
        _require_whole_shares(question.scenario.workload.global_batch_size, fixed)
    data = value("data_parallel", max(1, num_gpus // ranks), "all accelerators that are left")
    micro = value("micro_batch_size", 1, "one sequence")
    if not sharded:
        value("recompute", "none", "keep all activations")
    if not batch_given:
        count = fixed.get("num_microbatches") or _fewest_microbatches(fixed, pipeline)
        question = _with_batch(question, micro * count * data)
    share = question.scenario.workload.global_batch_size // (micro * data)
    count = fixed.get("num_microbatches", max(1, share))
    schedule = fixed.get("pipeline_schedule")
    usually = partial(usual, question.scenario.software)
    largest_stage = int(question.scenario.software.sharding.largest_zero_stage)
    plan = replace(
        Plan(**fixed),
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_stages=virtual,
        pipeline_schedule=schedule or ("interleaved_1f1b" if virtual > 1 else "1f1b"),
        zero_stage=value(
            "zero_stage",
            usually("zero_stage", largest_stage if sharded else 0) if data * context > 1 else 0,
            "shard all that the trainer can over data-parallel ranks"
            if sharded
            else "shard nothing",
        ),
        sequence_parallel=(
            value(
                "sequence_parallel",
                usually("sequence_parallel", True),
                "wherever there is tensor parallelism",
            )
            if tensor > 1
            else fixed.get("sequence_parallel", False)
        ),
        context_parallel_method=fixed.get("context_parallel_method")
        or usually("context_parallel_method", Plan().context_parallel_method),
        micro_batch_size=micro,
        num_microbatches=count,
    )
    return question, plan, assumptions


def _require_whole_shares(batch: int, fixed: Mapping[str, Any]) -> None:
    """Raise where pinned ranks and micro-batches cannot share out the batch."""
    pinned = [f for f in ("micro_batch_size", "data_parallel") if f in fixed]
    share = prod(fixed[name] for name in pinned)
    if batch % share:
        given = " x ".join(f"{name} {fixed[name]}" for name in pinned)
        whole = f" = {share}" if len(pinned) > 1 else ""
        raise InputError(f"global_batch_size {batch} is not a multiple of {given}{whole}")


def _fewest_microbatches(fixed: Mapping[str, Any], pipeline: int) -> int:
    """Return how many micro-batches keep every rank busy, and are enough for the schedule."""
    schedule = fixed.get("pipeline_schedule")
    if pipeline == 1 or schedule not in FEWEST:
        return pipeline
    return max(pipeline, int(FEWEST[schedule](Plan(pipeline_parallel=pipeline))))


def _with_batch(question: AssumedScenario, batch: int) -> AssumedScenario:
    scenario = question.scenario
    if batch == scenario.workload.global_batch_size:
        return question
    workload = replace(scenario.workload, global_batch_size=batch)
    kept = [a for a in question.assumptions if not a.startswith("global_batch_size")]
    note = f"global_batch_size {batch} (default: the smallest that keeps every rank busy)"
    return AssumedScenario(replace(scenario, workload=workload), (*kept, note))
