"""Intervals of software profiles that are composed of engines."""

from __future__ import annotations

import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.uncertainty import MEMORY, compared_kind, verdict_spread
from tests.samples import make_scenario


@pytest.mark.parametrize("engine", ["node-dispatch", "all-to-all-dispatch"])
def test_an_engine_that_changes_times_alone_keeps_the_interval_of_peaks(engine: str) -> None:
    """A wider one would refuse plans that fit, so that a faster dispatch made steps longer."""
    name = f"shardplan+{engine}"
    assert verdict_spread(name, 2048) == MEMORY
    plan = PlanTable.from_plans([Plan(data_parallel=8, expert_parallel=8, zero_stage=1)])
    peaks = {
        float(
            price(
                make_scenario("mixtral-8x7b", "8xH100-SXM", global_batch_size=8, software=software),
                plan,
            ).peak[0]
        )
        for software in ("shardplan", name)
    }
    assert len(peaks) == 1
    assert verdict_spread("shardplan+autocast", 8) != MEMORY
    assert compared_kind(name) == compared_kind("shardplan")
