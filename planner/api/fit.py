"""``fit()`` and ``plan()``: the questions, asked from Python as from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cost_models.legality.rules import FEWEST, require_legal
from cost_models.model.spec import ModelSpec
from cost_models.partition.schedules import default_virtual_stages
from cost_models.plan.plan import SEARCHED_RECOMPUTE, Plan
from cost_models.scenario import Scenario
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner.answer.answers import FitAnswer
from planner.api.plan import ADAPTERS, COMMON, OF_LAYERS, plan, refuse_inputs
from planner.assessment.assess import Assessment, assess
from planner.assessment.host_memory import about_offload
from planner.request.module_trace import is_module
from planner.request.pins import check_fixed
from planner.request.recompute import without_list
from planner.request.resolve import ModelLike, cluster_of, model_of
from planner.request.scenario import Question, adapting, build_question
from planner.run_cost.failures import run_of
from planner.run_cost.prices import parse_prices
from planner.run_cost.training_run import job_of
from planner.serving.fit import ServingAnswer, fit_serving
from planner.serving.request import (
    SERVING_ONLY,
    SHARED,
    refuse_serving_options,
    refuse_training_options,
)
from planner.serving.scenario import PLAN_FIELDS
from planner.traced.answers import TracedFitAnswer
from planner.traced.fit_and_plan import fit_module


def fit(
    model: ModelLike,
    cluster: str | Path | Cluster,
    *,
    seq_len: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    optimizer_state_precision: str | None = None,
    gradient_precision: str | None = None,
    master_weights: bool | None = None,
    attention_kernel: str | None = None,
    software: str | None = None,
    lora: int | None = None,
    qlora: int | None = None,
    lora_alpha: float | None = None,
    lora_targets: str | None = None,
    quantisation: str | None = None,
    freeze: str | None = None,
    layers: str | Sequence[int] | None = None,
    inputs: Sequence[str] | None = None,
    price: str | float | None = None,
    tokens: str | float | None = None,
    carbon: str | float | None = None,
    failures: str | None = None,
    inference: bool = False,
    concurrency: int | None = None,
    context_len: int | None = None,
    prompt_len: int | None = None,
    prefill_chunk: int | None = None,
    kv_precision: str | None = None,
    weight_precision: str | None = None,
    cuda_graphs: bool | None = None,
    **plan_options: Any,
) -> FitAnswer | ServingAnswer | TracedFitAnswer:
    """Say whether a model trains on a cluster with a plan, and with which margin.

    ``plan_options`` are fields of a plan (``tensor_parallel=2``). What is left out takes its
    documented default: no tensor or pipeline parallelism, data parallelism over all that is left,
    ZeRO-3 (or what the trainer can), sequence parallelism wherever there is tensor parallelism, one
    sequence a micro-batch, and the least recomputation that fits. ``layers``: those of every stage
    in order (``"3,5,5,3"``), which are even ones otherwise. ``inputs``: what a
    ``module:package.path:factory`` is called with (``"x=float32[B,3,224,224]"``).

    ``tokens``: of a whole run, whose days, dollars (``price`` of an accelerator's hour), energy,
    CO2 (``carbon``: grams a kilowatt hour) and share of progress (``failures``) are then said.

    ``inference``: whether the cluster serves ``concurrency`` sequences at once, of ``context_len``
    tokens each (prompt and answer); see ``planner.serving.fit``.
    """
    given: dict[str, Any] = {k: v for k, v in locals().items() if k != "plan_options"}
    if inference:
        return _serve(model_of(model), cluster_of(cluster), {**given, **plan_options})
    refuse_serving_options(given)
    if micro_batch_size is not None:
        plan_options["micro_batch_size"] = micro_batch_size
    options = {k: v for k, v in plan_options.items() if v is not None}
    fixed, by_stage = without_list(check_fixed(options, "plan"))
    common, of_layers, adapters = (
        {name: given[name] for name in names} for names in (COMMON, OF_LAYERS, ADAPTERS)
    )
    of_layers["stage_recompute_layers"] = by_stage
    whole = {name: given[name] for name in ("price", "tokens", "carbon", "failures")}
    if is_module(model):
        return fit_module(
            str(model),
            cluster_of(cluster),
            inputs=inputs,
            **common,
            unknown={**of_layers, **adapters, **whole},
            fixed=fixed,
        )
    refuse_inputs(inputs)
    job, prices = job_of(tokens, None, None, carbon, failures), parse_prices(price)
    if price is not None and not job.is_asked:
        raise InputError("--price: of a whole run, which needs --tokens 300B")
    question = build_question(
        model_of(model),
        cluster_of(cluster),
        micro_batch_size=fixed.get("micro_batch_size", 1),
        adapter=adapting(**adapters),
        **common,
        **of_layers,
    )
    question, plan, assumptions = _default_plan(
        question, fixed, batch_given=global_batch_size is not None
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
    assumptions += about_offload(scenario, plan, assessment.host)
    run, said = run_of(scenario, plan, assessment, job, prices)
    assumptions += said
    return FitAnswer(
        scenario=scenario,
        plan=plan,
        assessment=assessment,
        assumptions=(*question.assumptions, *assumptions),
        job=run,
    )


def _serve(model: ModelSpec, cluster: Cluster, given: Mapping[str, Any]) -> ServingAnswer:
    """Answer for serving; ``given``: all arguments of ``fit``, of which training has some alone."""
    refuse_training_options(given)
    parts = {name: given[name] for name in PLAN_FIELDS if given.get(name) is not None}
    asked = {name: given[name] for name in (*SHARED, *SERVING_ONLY)}
    return fit_serving(model, cluster, check_fixed(parts, "plan"), **asked)


def _least_recompute(scenario: Scenario, plan: Plan) -> tuple[Plan, Assessment, str]:
    """Return the plan with the least recomputation that fits, or else with the most."""
    for recompute in SEARCHED_RECOMPUTE:
        candidate = replace(plan, recompute=recompute)
        assessment = assess(scenario, candidate)
        if assessment.fits:
            return candidate, assessment, "the least that fits"
    return candidate, assessment, "nothing fits, so the one that saves most"


def _default_plan(
    question: Question, fixed: Mapping[str, Any], *, batch_given: bool
) -> tuple[Question, Plan, list[str]]:
    """Fill in a plan; the batch follows from it where nobody gave one."""
    num_gpus = question.scenario.cluster.num_gpus
    assumptions: list[str] = []

    def value(name: str, default: Any, why: str) -> Any:
        if name in fixed:
            return fixed[name]
        assumptions.append(f"{name} {default} (default: {why})")
        return default

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
            int(question.scenario.software.largest_zero_stage) if data * context > 1 else 0,
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


def _with_batch(question: Question, batch: int) -> Question:
    scenario = question.scenario
    if batch == scenario.workload.global_batch_size:
        return question
    workload = replace(scenario.workload, global_batch_size=batch)
    kept = [a for a in question.assumptions if not a.startswith("global_batch_size")]
    note = f"global_batch_size {batch} (default: the smallest that keeps every rank busy)"
    return Question(replace(scenario, workload=workload), (*kept, note))


__all__ = ["Scenario", "fit", "plan"]
