"""Traffic that a large L2 cache saves between kernels."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.compute.cached import FOUND_BACKWARD, FOUND_FORWARD, traffic_share
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.cluster.parse import parse_cluster
from planner.request.model import resolve_model
from planner.request.scenario import build_scenario

MIB = 2**20


@pytest.mark.parametrize("found", [FOUND_FORWARD, FOUND_BACKWARD])
def test_small_tensors_are_found_and_large_ones_are_not(found):
    cache = 72.0 * MIB
    share = traffic_share(cache, MIB * np.array([1.0, 18.0, 36.0, 54.0, 1000.0]), found)
    np.testing.assert_allclose(share, [1 - found, 1 - found, 1 - found / 2, 1.0, 1.0])


def test_without_a_cache_all_bytes_go_through_memory():
    assert traffic_share(0.0, 1.0, FOUND_FORWARD) == 1.0


@pytest.mark.parametrize(
    ("name", "mebibytes"), [("RTX-4090", 72), ("L40", 96), ("RTX-5090", 96), ("GB10", 24)]
)
def test_cards_with_gddr_memory_have_a_cache(name, mebibytes):
    assert find_accelerator(name).l2_cache.value == mebibytes * MIB


@pytest.mark.parametrize("name", ["A100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "MI300X"])
def test_hbm_cards_have_none_that_saves_time(name):
    """An H200 copies 16 MiB, which its L2 holds, no faster than 1 GiB."""
    assert find_accelerator(name).l2_cache is None


def test_only_small_micro_batches_gain():
    sizes = {"seq_len": 512, "global_batch_size": 64}
    scenario = build_scenario(resolve_model("gpt2"), parse_cluster("1xRTX-4090"), **sizes).scenario
    accelerator = scenario.cluster.accelerator
    bare = replace(
        scenario, cluster=replace(scenario.cluster, accelerator=replace(accelerator, l2_cache=None))
    )
    plans = [Plan(micro_batch_size=b, num_microbatches=64 // b) for b in (1, 8, 64)]
    table = PlanTable.from_plans(plans)
    gain = price(scenario, table).time.compute / price(bare, table).time.compute
    assert gain[0] < 0.9
    assert np.all(np.diff(np.ravel(gain)) >= 0.0)
    assert gain[2] == pytest.approx(1.0, abs=0.01)
