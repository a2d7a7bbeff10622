"""What mechanisms leave of learned runs, as a factor of the steps of plans."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.pricing.table import table_steps
from cost_models.step_time.unexplained import unexplained_factor
from tests.samples import learned, legal_table, make_scenario


def test_the_factor_fades_with_the_distance() -> None:
    scenario = learned(make_scenario(), 0.2)
    plan = Plan(data_parallel=8, micro_batch_size=2)
    plans = [plan, replace(plan, micro_batch_size=1), replace(plan, data_parallel=2)]
    found = np.log(unexplained_factor(scenario, PlanTable.from_plans(plans)))
    assert found == pytest.approx(0.2 * np.exp([0.0, -0.5, -1.0]))
    fp32 = learned(make_scenario(precision="fp32"), 0.2)
    found = np.log(unexplained_factor(fp32, PlanTable.from_plans(plans[:1])))
    assert found == pytest.approx(0.2 * np.exp(-0.5))


def test_other_accelerators_and_profiles_keep_their_steps() -> None:
    table = PlanTable.from_plans([Plan(data_parallel=8)])
    assert unexplained_factor(make_scenario(), table) == 1.0
    other = learned(make_scenario(), accelerator="H100-SXM-80GB")
    assert unexplained_factor(other, table) == 1.0


def test_every_pricer_multiplies_the_step() -> None:
    usual, table = legal_table(("llama", "8xA100-80GB", 256, 16, "shardplan", "flash"))
    table = table.rows(slice(None, None, 97))
    scenario = learned(usual)
    factor = np.broadcast_to(unexplained_factor(scenario, table), len(table))
    assert np.ptp(factor) > 0.1
    for of in (
        lambda s: price(s, table).step,
        lambda s: with_simulated_steps(s, table, price(s, table)).step,
        lambda s: table_steps(s, table),
    ):
        assert of(scenario) == pytest.approx(of(usual) * factor, rel=1e-9)
