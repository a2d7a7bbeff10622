"""Laws by which plans are left out before they are priced."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.legality.rules import legality_codes
from cost_models.partition.schedules import LOOPED_CODES
from cost_models.pricing.table import price_table, table_least_states
from planner.search.sources.short_pieces import family_bounds
from tests.cost_models.pricing.test_table import SETTINGS, plans_of_all_kinds

CLOSE = 1e-9


SLOW = ("mixtral", "many layers", "qlora", "8-bit states")


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_bounds_hold_for_every_number_of_stages(name: str) -> None:
    """Also for plans that recompute, offload or send less, at other numbers of virtual stages."""
    scenario = SETTINGS[name]()
    two = plans_of_all_kinds(scenario, most=500)
    looped = np.isin(two.pipeline_schedule, LOOPED_CODES) & (two.virtual_stages == 2)
    most = np.maximum(2, scenario.model.num_layers // two.pipeline_parallel)
    numbers = np.random.default_rng(0).integers(2, most + 1)
    other = replace(two, virtual_stages=np.where(looped, numbers, two.virtual_stages))
    legal = np.flatnonzero(legality_codes(scenario, other) == 0)
    two, other = two.rows(legal), other.rows(legal)
    priced = price_table(scenario, other)
    states, (bound, every) = table_least_states(scenario, two), family_bounds(scenario, two)
    assert (every == looped[legal]).all()
    assert (states <= priced.peak * (1.0 + CLOSE)).all()
    assert (bound <= priced.step * (1.0 + CLOSE)).all()
    assert np.median(bound[every] / priced.step[every]) > 0.7
    assert np.median(states[states > 0] / priced.peak[states > 0]) > 0.3
