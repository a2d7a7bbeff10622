"""``fit()``: whether a plan fits, from Python or from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cost_models.legality.rules import FEWEST, require_legal
from cost_models.partition.schedules import default_virtual_stages
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from planner.answer.answers import FitAnswer
from planner.assessment.assess import Assessment, assess
from planner.assessment.host_memory import about_offload
from planner.request.clusters import cluster_of
from planner.request.command import describe_plan
from planner.request.executor_process import is_module, refuse_inputs
from planner.request.model import model_of
from planner.request.pins import check_fixed, pinned_or_default
from planner.request.requests import (
    AdapterOptions,
    CommonOptions,
    FitRequest,
    LayerOptions,
    ServingOptions,
    WholeRunOptions,
    option,
    part,
    plan_fields,
    takes,
)
from planner.request.scenario import AssumedScenario, adapting, build_scenario
from planner.request.stage_layers import without_list
from planner.run_cost.failures import training_run_with_notes
from planner.run_cost.prices import parse_prices
from planner.run_cost.training_run import parse_run_request

if TYPE_CHECKING:
    from planner.serving.fit import ServingAnswer
    from planner.traced.answers import TracedFitAnswer


@takes(FitRequest)
def fit(request: FitRequest) -> FitAnswer | ServingAnswer | TracedFitAnswer:
    """Return whether a model trains on a cluster with a plan, and with which margin.

    The arguments are the fields of :class:`~planner.request.requests.FitRequest`: a model, a
    cluster, and options such as ``tensor_parallel=2``. Options that are not given take their
    documented default: no tensor or pipeline parallelism, data parallelism over all that is left,
    ZeRO-3 (or what the trainer can), sequence parallelism wherever there is tensor parallelism, one
    sequence a micro-batch, and the least recomputation that fits. If that plan does not fit, the
    simplest of the fastest plans with the given options is taken
    (``planner.api.searched_plan``). ``layers``: those of every stage in order (``"3,5,5,3"``), even
    ones by default. ``inputs``: arguments of a ``module:package.path:factory``
    (``"x=float32[B,3,224,224]"``).

    ``tokens`` of a whole run add its days, dollars (``price`` of an accelerator's hour), energy,
    CO2 (``carbon``: grams a kilowatt hour) and share of progress (``failures``) to the answer.

    ``inference``: whether the cluster serves ``concurrency`` sequences at once, of ``context_len``
    tokens each (prompt and answer); see ``planner.serving.fit``.
    """
    if request.inference:
        return _serve(request)
    _refuse_serving_options(request)
    fixed, by_stage = without_list(check_fixed(plan_fields(request), "plan"))
    common, of_layers, adapters = (
        part(request, group) for group in (CommonOptions, LayerOptions, AdapterOptions)
    )
    of_layers["stage_recompute_layers"] = by_stage
    whole = part(request, WholeRunOptions)
    if is_module(request.model):
        from planner.traced.fit_and_plan import fit_module

        return fit_module(
            str(request.model),
            cluster_of(request.cluster),
            inputs=request.inputs,
            **common,
            unknown={**of_layers, **adapters, **whole},
            fixed=fixed,
        )
    refuse_inputs(request.inputs)
    job = parse_run_request(request.tokens, None, None, request.carbon, request.failures)
    prices = parse_prices(request.price)
    if request.price is not None and not job.is_given:
        raise InputError("--price: needs --tokens, such as --tokens 300B")
    question = build_scenario(
        model_of(request.model),
        cluster_of(request.cluster),
        micro_batch_size=fixed.get("micro_batch_size", 1),
        adapter=adapting(**adapters),
        **common,
        **of_layers,
    )
    question, plan, assumptions = _default_plan(
        question, fixed, batch_given=request.global_batch_size is not None
    )
    scenario = question.scenario
    asked = plan
    some = by_stage is not None or plan.recompute_layers > 0
    if some and "recompute" not in fixed:
        asked = replace(plan, recompute="full")  # some layers, so these wholly
    require_legal(scenario, asked)
    if "recompute" in fixed:
        assessment = assess(scenario, plan)
    elif some:
        plan, assessment = asked, assess(scenario, asked)
        assumptions.append("recompute full (default: where --recompute-layers is given)")
    else:
        plan, assessment, why = _least_recompute(scenario, plan)
        assumptions.append(f"recompute {plan.recompute} (default: {why})")
    known_unfit: tuple[str, ...] = ()
    if assessment.verdict == "does_not_fit" and not some:
        from planner.api.searched_plan import searched_plan  # not imported where a default fits

        found = searched_plan(scenario, fixed)
        if found is not None:
            note = f"the default, {describe_plan(plan)}, does not fit"
            plan, assessment = found
            assumptions = [f"plan {describe_plan(plan)} (searched: {note})"]
        elif not fixed:
            known_unfit = ("none",)
    assumptions += about_offload(scenario, plan, assessment.host)
    run, said = training_run_with_notes(scenario, plan, assessment, job, prices)
    assumptions += said
    return FitAnswer(
        scenario=scenario,
        plan=plan,
        assessment=assessment,
        assumptions=(*question.assumptions, *assumptions),
        job=run,
        known_unfit=known_unfit,
    )


def _serve(request: FitRequest) -> ServingAnswer:
    """Answer for serving; an option of training alone is an error."""
    from planner.serving.fit import fit_serving
    from planner.serving.request import SHARED, refuse_training_options
    from planner.serving.scenario import PLAN_FIELDS

    refuse_training_options(request)
    parts = {name: value for name, value in plan_fields(request).items() if name in PLAN_FIELDS}
    asked = {name: getattr(request, name) for name in SHARED} | part(request, ServingOptions)
    model, cluster = model_of(request.model), cluster_of(request.cluster)
    return fit_serving(model, cluster, check_fixed(parts, "plan"), **asked)


def _refuse_serving_options(request: FitRequest) -> None:
    """Raise where an option of serving is given without ``--inference``."""
    given = part(request, ServingOptions)
    asked = [
        option(FitRequest, name).flags[0] for name, value in given.items() if value is not None
    ]
    if asked:
        raise InputError(f"{', '.join(asked)}: needs --inference")


def _least_recompute(scenario: Scenario, plan: Plan) -> tuple[Plan, Assessment, str]:
    """Return the plan with the least recomputation that fits, or else with the most."""
    for recompute in SEARCHED_RECOMPUTE:
        candidate = replace(plan, recompute=recompute)
        assessment = assess(scenario, candidate)
        if assessment.fits:
            return candidate, assessment, "the least that fits"
    return candidate, assessment, "nothing fits, so the one that saves most"


def _default_plan(
    question: AssumedScenario, fixed: Mapping[str, Any], *, batch_given: bool
) -> tuple[AssumedScenario, Plan, list[str]]:
    """Fill in a plan; the batch follows from it where nobody gave one."""
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
    data = value("data_parallel", max(1, num_gpus // ranks), "all accelerators that are left")
    micro = value("micro_batch_size", 1, "one sequence")
    if not batch_given:
        count = fixed.get("num_microbatches") or _fewest_microbatches(fixed, pipeline)
        question = _with_batch(question, micro * count * data)
    share = question.scenario.workload.global_batch_size // (micro * data)
    count = fixed.get("num_microbatches", max(1, share))
    schedule = fixed.get("pipeline_schedule")
    plan = replace(
        Plan(**fixed),
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_stages=virtual,
        pipeline_schedule=schedule or ("interleaved_1f1b" if virtual > 1 else "1f1b"),
        zero_stage=value(
            "zero_stage",
            int(question.scenario.software.sharding.largest_zero_stage)
            if data * context > 1
            else 0,
            "shard all that the trainer can over data-parallel ranks",
        ),
        sequence_parallel=(
            value("sequence_parallel", True, "wherever there is tensor parallelism")
            if tensor > 1
            else fixed.get("sequence_parallel", False)
        ),
        micro_batch_size=micro,
        num_microbatches=count,
    )
    return question, plan, assumptions


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
