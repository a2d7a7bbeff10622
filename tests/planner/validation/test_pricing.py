"""Rows are priced as ``fit`` prices: pipelines simulated, not their lower bound."""

from __future__ import annotations

from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from planner.validation.case import case_of
from planner.validation.pricing import predict_cases
from planner.validation.runs_file import PUBLISHED, read_runs


def test_pipelines_are_simulated() -> None:
    row = next(row for row in read_runs(PUBLISHED) if row.row_id == "llama3-paper-0003")
    case = case_of(row)  # 16 stages of a rank, in turn: the bound is not reached
    bound = float(price(case.scenario, PlanTable.from_plans([case.plan])).step[0])
    found, refused = predict_cases([case])
    assert not refused
    assert bound * 1.001 < found[row.name].step < bound * 1.01
