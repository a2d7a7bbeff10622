"""``fit(..., inference=True)``: whether a model and its cache fit, and the largest load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import has_cache
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner.answer.answers import AssessedAnswer
from planner.assessment.documents import cluster_document, model_document
from planner.serving.command import vllm_options
from planner.serving.request import build_serving
from planner.serving.scenario import (
    PLAN_FIELDS,
    ServingAssessment,
    ServingScenario,
    assess_serving,
    usual_layouts,
    why_not,
    with_workload,
)
from planner.serving.text import CONFIDENCE, serving_text
from planner.serving.times import ServingTimePrediction, predict_serving_time
from planner.serving.ways_out import ServingWayOut, serving_reach, serving_ways
from planner.text.answer import SCHEMA_VERSION

# whose start-up logs tests/cost_models/serving/test_published_serving.py compares with
COMPARED_FAMILIES = ("llama", "qwen2", "gpt_oss")


@dataclass(frozen=True, slots=True, repr=False)
class ServingAnswer(AssessedAnswer):
    """Answer of ``fit --inference``: verdict on one layout, its parts, and ways out."""

    scenario: ServingScenario
    plan: Plan
    assessment: ServingAssessment
    time: ServingTimePrediction | None  # None: no rate is known
    assumptions: tuple[str, ...]
    ways_out: tuple[ServingWayOut, ...]
    reach: Mapping[str, Any]

    @property
    def confidence(self) -> str:
        """Published, if logs of such a model were compared with predictions, else datasheet."""
        on_gpu = self.scenario.cluster.accelerator.device == "gpu"
        alike = self.scenario.model.family in COMPARED_FAMILIES
        return "published" if on_gpu and alike else "datasheet"

    def notebook_parts(self) -> Iterator[str]:
        """Yield verdict, times, parts of the memory, and fixes."""
        from planner.answer import notebook
        from planner.serving.command import describe_serving
        from planner.serving.text import fixes_of, model_lines, time_lines
        from planner.text.html_page import element

        yield notebook.verdict(self.assessment)
        yield notebook.about(
            model_lines(self.scenario), self.scenario.cluster, describe_serving(self.plan)
        )
        if self.time is not None:
            yield element("pre", "\n".join(time_lines(self.scenario, self.time, verbose=False)))
        yield notebook.memory_bars(self.assessment.memory.parts)
        yield notebook.fixes_table(fixes_of(self.ways_out))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        scenario, memory = self.scenario, self.assessment.to_dict()
        memory.pop("verdict")
        pinned = scenario.layer_ranges
        return {
            "schema_version": SCHEMA_VERSION,
            "model": model_document(scenario.model),
            "cluster": cluster_document(scenario.cluster),
            "workload": scenario.workload.to_dict(),
            "engine": {"name": scenario.engine.name, "options": vllm_options(scenario, self.plan)},
            **({} if pinned is None else {"layer_ranges": [list(pair) for pair in pinned]}),
            "verdict": self.verdict,
            "plan": {name: getattr(self.plan, name) for name in PLAN_FIELDS},
            "memory": memory,
            "time": None if self.time is None else self.time.to_dict(),
            "assumptions": list(self.assumptions),
            "confidence": self.confidence,
            "ways_out": [way.to_dict() for way in self.ways_out],
            "reach": dict(self.reach),
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions and sources."""
        return serving_text(
            self.scenario,
            self.plan,
            self.assessment,
            self.time,
            assumptions=self.assumptions,
            ways_out=self.ways_out,
            reach=self.reach,
            confidence=CONFIDENCE[self.confidence],
            verbose=verbose,
        )


def fit_serving(
    model: ModelSpec,
    cluster: Cluster,
    fixed: Mapping[str, Any],
    *,
    concurrency: int | None = None,
    **asked: Any,
) -> ServingAnswer:
    """Return whether a cluster serves a number of sequences of a given length, with the margin.

    ``fixed``: the given fields of the plan. By default a replica has the fewest accelerators with
    which everything fits; the others hold more replicas. ``asked``: options of ``build_serving``.
    """
    one_each = 1 if concurrency is None else concurrency
    scenario, assumptions = build_serving(model, cluster, concurrency=one_each, **asked)
    assessment, why = _layout(scenario, fixed)
    plan = assessment.plan
    named = PLAN_FIELDS if plan.expert_parallel > 1 else PLAN_FIELDS[:3]
    taken = [f"{name} {getattr(plan, name)}" for name in named if name not in fixed]
    if taken:
        assumptions.append(f"{', '.join(taken)} (default: {why})")
    if concurrency is None:  # as many as there are replicas: each still has one
        scenario = with_workload(scenario, concurrency=plan.data_parallel)
        assumptions.append(
            f"concurrency {plan.data_parallel} (default: one sequence for each replica)"
        )
    fits = assessment.fits
    try:
        time: ServingTimePrediction | None = predict_serving_time(scenario, plan)
    except InputError as error:
        time = None
        assumptions.append(f"time is not predicted: {error}")
    return ServingAnswer(
        scenario=scenario,
        plan=plan,
        assessment=assessment,
        time=time,
        assumptions=tuple(assumptions),
        ways_out=() if fits else serving_ways(scenario, plan),
        reach=serving_reach(scenario, plan) if fits and has_cache(model) else {},
    )


def _layout(scenario: ServingScenario, fixed: Mapping[str, Any]) -> tuple[ServingAssessment, str]:
    """Return the first layout that fits, else the smallest, with the reason for the choice."""
    best: ServingAssessment | None = None
    for plan in usual_layouts(scenario, fixed):
        assessment = assess_serving(scenario, plan)
        if assessment.fits:
            return assessment, "the smallest replica that fits, and as many as there is place for"
        if best is None or assessment.memory.peak_bytes < best.memory.peak_bytes:
            best = assessment
    if best is None:
        raise InputError(_why_no_layout(scenario, fixed))
    return best, "nothing fits, so the one that needs least"


def _why_no_layout(scenario: ServingScenario, fixed: Mapping[str, Any]) -> str:
    """Return why the requested plan, or the simplest one, is illegal."""
    pinned = 1 if scenario.layer_ranges is None else len(scenario.layer_ranges)
    tp, pp = fixed.get("tensor_parallel", 1), fixed.get("pipeline_parallel", pinned)
    data = fixed.get("data_parallel", max(1, scenario.cluster.num_gpus // (tp * pp)))
    plan = Plan(
        data_parallel=data,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        expert_parallel=fixed.get("expert_parallel", 1),
    )
    why = why_not(scenario, plan)
    if why is None:  # pragma: no cover - layouts() would have found it
        raise AssertionError(plan)
    return why
