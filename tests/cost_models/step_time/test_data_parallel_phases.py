"""Embedding and first layer wait, and are waited for: by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.communication.volumes import pass_traffic
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.step_time.data_parallel_phases import DataPhases, data_phases
from hardware_profiles.software.trainer import software_profile
from tests.samples import make_scenario


def _phases(plan: Plan, profile: str = "shardplan", figures: Any = None) -> DataPhases:
    """Phases where gathering and reducing an element take as long, 12 s of a step in all."""
    scenario = make_scenario("llama-3-8b", "2x8xH100-SXM", seq_len=4096, global_batch_size=64)
    workload = replace(scenario.workload, gradient_precision="bf16")
    table = PlanTable.from_plans([plan])
    (rank,) = even_split_contents(scenario.model, 1, 1)
    traffic = pass_traffic(RankView(replace(scenario, workload=workload), table, rank))
    found = data_phases(
        traffic,
        {"data": np.array([12.0])},
        table,
        rank_parameters(scenario.model, rank, table),
        software_profile(profile).changed(figures or {}),
    )
    return DataPhases(*(float(np.ravel(part)[0]) for part in found))


# embedding and one of 32 layers of Llama-3-8B
SHARE = (128256 * 4096 + 218_112_000) / 8_030_261_248


def test_zero_3_gathers_twice_and_reduces_once_a_microbatch() -> None:
    plan = Plan(data_parallel=16, zero_stage=3, num_microbatches=4)
    forward, first, last = _phases(plan)
    # head and embedding are gathered once a micro-batch: less than two thirds of all
    assert forward == pytest.approx(4.0, rel=0.03)
    assert first == pytest.approx(SHARE * forward)
    assert last == pytest.approx(SHARE * (12.0 - 2.0 * forward) / 4)


def test_replicas_reduce_once() -> None:
    forward, first, last = _phases(Plan(data_parallel=16, num_microbatches=4))
    assert forward == first == 0.0
    assert last == pytest.approx(SHARE * 12.0)


@pytest.mark.parametrize("behind", [True, False])
def test_new_weights_of_zero_1_wait_where_they_come_behind_the_forward_pass(behind: bool) -> None:
    plan = Plan(data_parallel=16, zero_stage=1, num_microbatches=4)
    forward, first, last = _phases(plan, "nemo", {"overlap.weight_gathers": behind})
    assert forward == pytest.approx(6.0 * behind)
    assert first == pytest.approx(SHARE * 6.0 * behind)
    assert last == pytest.approx(SHARE * 6.0)


def test_gradients_that_stay_whole_are_reduced_at_the_end() -> None:
    plan = Plan(data_parallel=16, zero_stage=3, num_microbatches=4)
    _, _, each = _phases(plan)
    _, _, once = _phases(plan, figures={"gradients.accumulated_unsharded": True})
    assert once == pytest.approx(4 * each)
