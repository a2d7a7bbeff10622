"""Plans that are left out by a bound of their steps change no answer."""

from typing import Any

import numpy as np
import pytest

import planner
from cost_models.plan.plan import PlanTable
from cost_models.pricing.table import table_steps
from planner.answer.plan_answer import PlanAnswer
from planner.refinement import best_partition
from planner.refinement.best_partition import best_staged
from planner.request.constraints import parse_requirements
from planner.search import fast_plans, legal_plans
from planner.search.search import SearchResult, search
from planner.search.sources.short_pieces import family_bounds
from tests.planner.search.test_exact_search import with_share
from tests.samples import llama, make_scenario

FEW, ALL = 100, 10**9  # plans that are priced without bounds


def answer(scenario: Any, **options: Any) -> tuple[SearchResult, Any]:
    found = search(scenario, {}, top=5, distinct=4, with_near=True, **options)
    staged = best_staged(scenario, found.plans, found.near, min(found.seconds, default=0.0))
    return found, staged


@pytest.mark.sampled(2)
@pytest.mark.parametrize("require", ["", "tp<=2", "memory<=2GiB"])
@pytest.mark.parametrize("share", [1.0, 0.05, 0.01])
@pytest.mark.parametrize("model", ["llama", "mixtral", "wide"])
@pytest.mark.parametrize("software", ["shardplan", "megatron-core", "torchtitan"])
def test_the_answer_is_that_of_pricing_every_plan(
    model: str, share: float, require: str, software: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of: Any = llama(hidden_size=512, vocab_size=32_000) if model == "wide" else model
    scenario = make_scenario(
        of, "2x4xH100-SXM", seq_len=512, global_batch_size=32, software=software
    )
    scenario = with_share(scenario, share)
    asked = {"require": parse_requirements(require)} if require else {}
    monkeypatch.setattr(legal_plans, "FEW", ALL)
    whole, staged = answer(scenario, **asked)
    monkeypatch.setattr(legal_plans, "FEW", FEW)
    monkeypatch.setattr(fast_plans, "FIRST", FEW)
    monkeypatch.setattr(best_partition, "FEW", FEW)
    found, again = answer(scenario, **asked)
    assert whole.counts.slow == 0
    assert (found.counts.slow > 0) == whole.fits
    assert (found.plans, found.seconds, found.fits) == (whole.plans, whole.seconds, whole.fits)
    assert again == staged
    if not whole.plans:
        assert found.smallest == whole.smallest


def test_bounds_hold_for_bidirectional_pipelines_with_replicas() -> None:
    """Exchanges of gradients between replicas are shorter there than in a line of stages."""
    answer = planner.plan("llama-3.2-1b", "16xL40S")
    assert isinstance(answer, PlanAnswer)
    table = PlanTable.from_plans(list(answer.result.plans))
    assert {"zbv", "dualpipev"} & {plan.pipeline_schedule for plan in answer.result.plans}
    assert max(plan.dp_replicate for plan in answer.result.plans) > 1
    bound, _ = family_bounds(answer.scenario, table)
    assert np.all(bound <= table_steps(answer.scenario, table) * (1.0 + 1e-9))
    pinned = planner.plan(
        "llama-3.2-1b",
        "16xL40S",
        fix={"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_schedule": "zbv"},
    )
    assert isinstance(pinned, PlanAnswer)
    assert answer.result.seconds[0] <= pinned.result.seconds[0] * (1.0 + 1e-9)
