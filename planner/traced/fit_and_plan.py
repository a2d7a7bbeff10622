"""``fit`` and ``plan`` of a module of unknown layers, ``module:package.path:factory``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from msgspec import Struct

from cost_models.plan.plan import Plan
from cost_models.plan.workload import Optimizer, Precision, Workload
from cost_models.units import format_bytes
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, NoLegalPlanError
from hardware_profiles.software.trainer import software_profile
from planner.assessment.verdict import VERDICTS, budget_bytes
from planner.request.command import describe_plan
from planner.request.executor_process import trace
from planner.request.pins import pinned_or_default
from planner.request.scenario import DEFAULT_SOFTWARE, MAX_BATCH, default_precision
from planner.search.first_plan import is_complete
from planner.traced.answers import TracedFitAnswer, TracedPlanAnswer, cut_words, header
from planner.traced.scenario import (
    TracedAssessment,
    TracedCounts,
    TracedScenario,
    assess_traced,
    candidates,
    refuse_structure,
    why_illegal,
)
from planner.traced.stages import Cut, best_cut
from planner.traced.ways_out import ways_out

PRECISIONS: Final = ("bf16", "fp32", "fp64")  # that executor.trace.module_trainer trains in
OPTIMIZERS: Final = ("adamw", "sgd")


class ModuleQuestion(Struct, frozen=True, kw_only=True):
    """What is asked about a module; ``unknown``: options that have no meaning for one."""

    model: str
    cluster: Cluster
    inputs: Sequence[str] | None
    global_batch_size: int | None
    precision: str | None
    optimizer: str | None
    unknown: Mapping[str, Any]
    fixed: Mapping[str, Any]

    def check(self) -> None:
        """Raise an InputError for options and parts of a plan that a module cannot have."""
        for name, value in self.unknown.items():
            if value is not None and not (name == "software" and value == DEFAULT_SOFTWARE):
                raise InputError(
                    f"{name} = {value}: has no meaning for {self.model} (leave it out)"
                )
        refuse_structure(self.fixed, self.model)


def fit_module(question: ModuleQuestion) -> TracedFitAnswer:
    """Assess a plan of a module."""
    question.check()
    cluster, fixed = question.cluster, question.fixed
    assumptions: list[str] = []  # about the plan
    given: list[str] = []  # about the question
    value = partial(pinned_or_default, fixed, assumptions)
    ranks, batch = cluster.num_gpus, question.global_batch_size
    data = value("data_parallel", ranks, "all accelerators")
    micro = value("micro_batch_size", 1, "one row")
    times = fixed.get("num_microbatches")
    if times is None:
        times = 1 if batch is None else max(1, batch // (micro * data))
    if batch is None:
        batch = micro * times * data
        given.append(f"global_batch_size {batch} (default: one micro-batch for each rank)")
    zero = value("zero_stage", 3 if ranks > 1 else 0, "shard all that the trainer can")
    scenario = _scenario(question, batch, given)
    plan = replace(
        Plan(**fixed),
        data_parallel=data,
        micro_batch_size=micro,
        num_microbatches=times,
        zero_stage=zero,
    )
    plans = [] if is_complete(fixed) else candidates(scenario, fixed)
    if not plans and (why := why_illegal(scenario, plan)) is not None:
        raise InputError(why)
    priced = assess_traced(scenario, plans or [plan])
    order = _ranked(priced)
    found = bool(order) and priced[order[0]].fits
    chosen = order[0] if found else _smallest(priced)
    assessment = priced[chosen]
    if plans:
        plan = plans[chosen]
        why = "the fastest that fits" if found else "the smallest"
        assumptions = [f"plan {describe_plan(plan)} (searched: {why} of {len(plans)})"]
    return TracedFitAnswer(
        scenario=scenario,
        plan=plan,
        assessment=assessment,
        assumptions=(*scenario.module.notes, *cluster.notes, *given, *assumptions),
    )


def plan_module(question: ModuleQuestion, *, top: int, rows: int | None = None) -> TracedPlanAnswer:
    """Search for the best plan of a module."""
    question.check()
    cluster, fixed, batch = question.cluster, question.fixed, question.global_batch_size
    assumptions: list[str] = []
    if batch is None:
        batch = cluster.num_gpus * fixed.get("micro_batch_size", 1)
        assumptions.append(f"global_batch_size {batch} (default: one micro-batch for each rank)")
    scenario = _scenario(question, batch, assumptions)
    notes = (*scenario.module.notes, *cluster.notes, *assumptions)
    plans = candidates(scenario, fixed)
    if not plans:
        raise InputError(_why_none(scenario, fixed))
    priced = assess_traced(scenario, plans)
    verdicts = [VERDICTS.index(one.verdict) for one in priced]
    search = TracedCounts(
        enumerated=len(plans),
        too_large=verdicts.count(2),
        tight=verdicts.count(1),
        fitting=verdicts.count(0),
    )
    order = _ranked(priced)[:top]
    cut = None if fixed else best_cut(scenario)
    if not order:
        smallest = _smallest(priced)
        raise _no_plan(scenario, plans[smallest], priced[smallest], search, notes, cut)
    return TracedPlanAnswer(
        scenario=scenario,
        plans=tuple(plans[i] for i in order),
        assessments=tuple(priced[i] for i in order),
        search=search,
        assumptions=notes,
        fixed=dict(fixed),
        cut=cut,
        rows=rows,
    )


def _smallest(priced: Sequence[TracedAssessment]) -> int:
    """Return the position of the plan with the smallest peak."""
    return min(range(len(priced)), key=lambda i: priced[i].memory.peak_bytes)


def _ranked(priced: Sequence[TracedAssessment]) -> list[int]:
    """Return positions of the plans that fit (else of tight ones), fastest first."""
    verdicts = [VERDICTS.index(one.verdict) for one in priced]
    best = min(verdicts)
    kept = [i for i, verdict in enumerate(verdicts) if verdict == best and verdict < 2]

    def key(i: int) -> tuple[float, float]:
        return priced[i].time.step_seconds, priced[i].memory.peak_bytes

    return sorted(kept, key=key)


def _scenario(question: ModuleQuestion, batch: int, assumptions: list[str]) -> TracedScenario:
    cluster, precision, optimizer = question.cluster, question.precision, question.optimizer
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
        raise InputError(
            f"global_batch_size = {batch!r} (must be a whole number from 1 to {MAX_BATCH:,})"
        )
    if precision is None:
        precision = default_precision(cluster.accelerator)
        precision = precision if precision in PRECISIONS else "fp32"
        assumptions.append(f"precision {precision} (default)")
    if optimizer is None:
        optimizer = "adamw"
        assumptions.append("optimizer adamw (default)")
    for name, value, known in (
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
    ):
        if value not in known:
            raise InputError(
                f"{name} = {value!r}: a module of unknown layers is trained with "
                f"{' or '.join(known)}"
            )
    if precision == "bf16":
        assumptions.append("operators run under torch.autocast; weights are fp32")
    device = "cpu" if cluster.accelerator.device == "cpu" else "cuda"
    module = trace(question.model, precision=precision, device=device, inputs=question.inputs)
    software = software_profile(DEFAULT_SOFTWARE)
    workload = Workload(
        1, batch, precision=cast(Precision, precision), optimizer=cast(Optimizer, optimizer)
    )
    return TracedScenario(module, cluster, software, workload)


def _why_none(scenario: TracedScenario, fixed: Mapping[str, Any]) -> str:
    """Return why no plan is legal."""
    ranks, batch = scenario.cluster.num_gpus, scenario.global_batch_size
    if batch % ranks:
        return f"global_batch_size = {batch}: {ranks} data ranks do not divide it"
    micro = fixed.get("micro_batch_size", 1)
    plan = replace(
        Plan(**fixed),
        data_parallel=fixed.get("data_parallel", ranks),
        micro_batch_size=micro,
        num_microbatches=fixed.get("num_microbatches", max(1, batch // (ranks * micro))),
    )
    return why_illegal(scenario, plan) or "no plan satisfies the pinned fields"


def _no_plan(
    scenario: TracedScenario,
    smallest: Plan,
    assessment: TracedAssessment,
    search: TracedCounts,
    assumptions: tuple[str, ...],
    cut: Cut | None,
) -> NoLegalPlanError:
    ways = ways_out(scenario, smallest)
    peak, budget = assessment.memory.peak_bytes, budget_bytes(scenario.cluster)
    lines = [
        f"no plan for {scenario.module.name} on {scenario.cluster.name}: {search.enumerated:,} "
        f"plans, 0 fit; the smallest ({describe_plan(smallest)}) needs "
        f"{format_bytes(peak)} of {format_bytes(budget)}",
        *(f"  way out: {way.change}: fit {way.options}" for way in ways),
        *([] if cut is None else [f"  {cut_words(cut, None)}"]),
    ]
    return NoLegalPlanError(
        "\n".join(lines),
        {
            **header(scenario),
            "plans": [],
            "search": search.to_dict(),
            "ways_out": [way.to_dict() for way in ways],
            "cut": None if cut is None else cut.to_dict(),
            "assumptions": list(assumptions),
        },
    )
