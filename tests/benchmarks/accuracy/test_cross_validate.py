import numpy as np
import pandas as pd
import pytest

from benchmarks.accuracy.cross_validate import (
    CONSTANTS,
    OF_TRAINERS,
    Work,
    best_value,
    figures,
    in_its_place,
    written,
)
from cost_models.compute import rates
from cost_models.model.families import model_spec
from cost_models.plan.plan import Plan, PlanTable
from hardware_profiles.software.trainer import profile_names
from tests.samples import GPT3, make_scenario

MOST_CONSTANTS = 15  # of the core


def work(cluster: str = "8xH100-SXM", software: str = "shardplan", **plan: int) -> Work:
    model = model_spec(GPT3, name="gpt-3")
    scenario = make_scenario(model, cluster, seq_len=2048, software=software)
    table = PlanTable.from_plans([Plan(data_parallel=8, num_microbatches=2, **plan)])
    return Work(scenario, table, "mosaic-llm-foundry", np.array([1.0]))


def test_the_core_has_few_fitted_constants_and_each_says_what_it_is() -> None:
    assert len(CONSTANTS) <= MOST_CONSTANTS
    assert len({constant.name for constant in CONSTANTS}) == len(CONSTANTS)
    for constant in CONSTANTS:
        assert constant.value > 0
        assert constant.meaning
        assert constant.fitted_on
    assert set(OF_TRAINERS) | {parent for _, parent, _ in OF_TRAINERS.values()} <= set(
        profile_names()
    )


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_another_value_counts_for_a_while(constant) -> None:
    before = constant.value
    with written({constant.name: 2.0 * before}):
        assert constant.value == (before if constant.holder is None else 2.0 * before)
    assert constant.value == before


def test_constants_change_the_times_of_what_they_touch() -> None:
    hopper, ampere = work(), work("8xA100-80GB")
    changed = {"JOULES_A_FLOP Hopper": 10.0 * rates.JOULES_A_FLOP["Hopper"]}
    assert hopper.errors(changed)[0] > hopper.errors({})[0]
    assert ampere.errors(changed)[0] == ampere.errors({})[0]
    host = {"operator_seconds": 1.0}
    megatron = work("8xA100-80GB", "megatron")
    assert megatron.errors(host)[0] > 10.0 * megatron.errors({})[0]
    assert ampere.errors(host)[0] == ampere.errors({})[0]  # another profile's


def test_a_source_that_is_left_out_has_no_say() -> None:
    index = pd.MultiIndex.from_product([[1.0, 2.0], ["one", "two"]], names=["value", "source"])
    table = pd.DataFrame({"loss": [9.0, 1.0, 1.0, 2.0], "rows": 4}, index=index)
    assert best_value(table, "") == 2.0
    assert best_value(table, "one") == 1.0
    assert best_value(table.xs("one", level="source", drop_level=False), "one") is None


def test_a_profile_fitted_on_a_source_is_not_used_where_that_is_left_out() -> None:
    ours = work("8xA100-80GB", "composer")
    assert in_its_place(ours).scenario.software.name == "shardplan"
    assert in_its_place(work("8xA100-80GB", "megatron")).scenario.software.name == "megatron"


def test_figures_of_signed_errors() -> None:
    median, p90, bias = figures(np.array([0.9, 1.0, 1.2]))
    assert (median, p90, bias) == pytest.approx((0.1, 0.18, 1 / 30))
