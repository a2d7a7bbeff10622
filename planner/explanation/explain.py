"""``explain``: largest terms of a plan, comparisons with other plans, sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cost_models.legality.rules import require_legal
from cost_models.plan.plan import split_layers
from cost_models.plan_file import PlanFile, read_plan_file
from cost_models.pricing.prediction import scenario_of
from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError
from hardware_profiles.progress import stages
from planner.advice.ways_out import ways_out
from planner.answer.plan_answer import PlanAnswer
from planner.assessment.assess import assess
from planner.explanation.answer import Explanation
from planner.explanation.choices import priced_choices
from planner.explanation.glossary import describe
from planner.explanation.sensitivity import batch_sizes, other_batches, sensitivities
from planner.explanation.why_not import parse_other_plan
from planner.explanation.why_not import why_not as against
from planner.refinement.best_partition import best_staged
from planner.request.limits import with_limits
from planner.search.distinct import DISTINCT, TOP
from planner.search.gc_pause import fewer_collections
from planner.search.priced_candidates import PricedCandidates
from planner.search.search import search
from planner.search.sources.partial_recompute import PRICING

OtherPlan = str | Mapping[str, Any]
# seconds, relative: prices, best plan, its stages, partial recomputation, other machines, batches,
# ways out
SIZES: Final = (6.0, 1.0, 3.0, 1.0, 2.0, 3.0, 1.0)


@names_arguments("planner.explain")
@fewer_collections()
def explain(
    plan: str | Path | PlanFile | PlanAnswer,
    *,
    why_not: OtherPlan | Sequence[OtherPlan] = (),
    sensitivity: bool = True,
) -> Explanation:
    """Explain a plan.json, or the best plan of an answer.

    ``why_not``: other plans to compare with, each as some of its fields (``"tp=16,pp=4"`` or a
    mapping), completed to the best plan. ``sensitivity``: search again with every figure of the
    machine scaled, and with other batches.
    """
    file = _with_one_number(_file(plan))
    scenario = scenario_of(file)
    where = plan if isinstance(plan, (str, Path)) else ""
    require_legal(scenario, file.plan, where)
    # numbers of recomputed layers belong to the stages of this plan, not to those of others
    even_scenario = replace(scenario, stage_recompute_layers=None)
    free = with_limits(even_scenario, file.trainer, f"{where}: trainer".lstrip(": "))
    even = file.layer_ranges == split_layers(scenario.model.num_layers, file.plan.num_stages)
    assessment = assess(scenario, file.plan, None if even else file.layer_ranges)
    others = (why_not,) if isinstance(why_not, (str, Mapping)) else tuple(why_not)
    for one in others:
        parse_other_plan(one)  # report errors before the searches
    sizes = [scenario.workload.global_batch_size]
    if sensitivity:
        sizes += batch_sizes(free)
    with stages(*SIZES, *(2.0 for _ in others), joint=True) as begin:
        begin("pricing plans")
        own, *other = PricedCandidates.of_batches(free, sizes)
        begin("searching the best plan")
        found = search(free, top=TOP, distinct=DISTINCT, priced=own, with_near=True)
        best = found.plans[0] if found.plans else None
        begin("choosing pipeline stages")
        staged = best_staged(free, found.plans, found.near, recomputed=found.recomputed)
        choices = None
        if sensitivity and best is not None:
            begin(PRICING)
            alike = len(scenario.model.kinds) == 1  # otherwise the bounds settle few questions
            choices = priced_choices(free, best, priced=own, bounded=alike)
        varied = None if choices is None else choices.table.plan(choices.chosen)
        begin("pricing plans on other machines")
        by_figure = () if choices is None else sensitivities(choices)
        begin("searching with other batches")
        batches = () if varied is None else other_batches(free, varied, priced=other)
        begin("searching for ways out")
        ways = () if assessment.fits else ways_out(scenario, file.plan)
        answers = []
        for one in others:
            begin("searching another plan")
            answers.append(against(free, file.plan, assessment, one, file.trainer))
    best_assessment = None if best is None else assess(free, best)
    if staged is not None:
        best_assessment = assess(staged.scenario(free), staged.plan)
    return Explanation(
        scenario=scenario,
        plan=file.plan,
        layer_ranges=file.layer_ranges,
        assessment=assessment,
        description=describe(scenario, file.plan),
        best=best if staged is None else staged.plan,
        best_staged=staged,
        best_assessment=best_assessment,
        varied=varied,
        sensitivity=by_figure,
        batches=batches,
        why_not=tuple(answers),
        ways_out=ways,
    )


def _with_one_number(file: PlanFile) -> PlanFile:
    """Return the same plan as the search has it, where all stages recompute equally many layers."""
    numbers = set(file.stage_recompute_layers or ())
    if len(numbers) != 1:
        return file
    plan = replace(file.plan, recompute_layers=numbers.pop())
    return replace(file, plan=plan, stage_recompute_layers=None)


def _file(plan: str | Path | PlanFile | PlanAnswer) -> PlanFile:
    if isinstance(plan, PlanFile):
        return plan
    if isinstance(plan, PlanAnswer):
        return plan.plan_file()
    if isinstance(plan, (str, Path)):
        return read_plan_file(Path(plan))
    raise InputError(f"plan = {plan!r} (must be a plan.json or the answer of planner.plan)")
