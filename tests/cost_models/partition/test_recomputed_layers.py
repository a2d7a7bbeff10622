"""Layers that are recomputed: each way to name them, counted by rank and priced."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.compute.flops import layer_flops_per_token
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.partition.recomputed_layers import RecomputedLayers, read_recompute_layers_by_stage
from cost_models.partition.stages import contents_of_rank, even_split_contents
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.pricing.estimate import price, rank_communication, rank_memories
from hardware_profiles.errors import InputError
from tests.samples import llama, make_scenario

FULL = Plan(1, 1, 2, recompute="full", num_microbatches=8)
SETTING = replace(
    make_scenario(cluster="2xA100-80GB", seq_len=256, global_batch_size=8), model=llama()
)
RANGES = split_layers(8, 2)


def of_rank(recomputed: RecomputedLayers, rank: int) -> tuple[int, int, int]:
    found = contents_of_rank(llama(), RANGES, [0, 1], rank, recomputed=recomputed)
    return sum(found.recomputed), sum(found.after_recomputed), found.recomputed_first_layers


def test_what_a_rank_recomputes() -> None:
    assert of_rank(RecomputedLayers(), 1) == (4, 0, 1)
    assert of_rank(RecomputedLayers(3), 1) == (3, 1, 1)
    assert of_rank(RecomputedLayers(1, every=2), 1) == (2, 1, 1)
    assert of_rank(RecomputedLayers(2, every=3), 0) == (3, 0, 0)  # the first stage has no input
    assert of_rank(RecomputedLayers(by_stage=(3, 1)), 0) == (3, 1, 0)
    assert of_rank(RecomputedLayers(by_stage=(3, 1)), 1) == (1, 3, 1)
    assert of_rank(RecomputedLayers(by_stage=(3, 0)), 1) == (0, 0, 0)


def test_the_same_layers_named_in_three_ways_cost_the_same() -> None:
    first = PlanTable.from_plans([replace(FULL, recompute_layers=3)])
    every = PlanTable.from_plans([replace(FULL, recompute_layers=3, recompute_every=4)])
    listed = replace(SETTING, stage_recompute_layers=(3, 3))
    one, two = price(SETTING, first), price(SETTING, every)
    three = price(listed, PlanTable.from_plans([FULL]))
    assert one.step == two.step == three.step
    assert one.peak == two.peak == three.peak


def test_a_table_of_patterns_is_priced_as_each_row_alone() -> None:
    plans = [
        replace(FULL, recompute_layers=n, recompute_every=k, zero_stage=0)
        for n, k in ((0, 0), (1, 0), (3, 0), (1, 2), (1, 4), (2, 4), (3, 4))
    ]
    together = price(SETTING, PlanTable.from_plans(plans))
    for row, plan in enumerate(plans):
        alone = price(SETTING, PlanTable.from_plans([plan]))
        assert together.step[row] == alone.step[0]
        assert together.peak[row] == alone.peak[0]
    # one of four: first 1 of every 4; and twice that
    assert together.step[4] == together.step[1]
    assert together.step[3] == together.step[5]
    assert together.peak[3] <= together.peak[5]


def test_each_stage_pays_for_its_own_layers() -> None:
    listed = replace(SETTING, stage_recompute_layers=(4, 0))
    none = rank_memories(SETTING, replace(FULL, recompute="none"), RANGES)
    full = rank_memories(SETTING, FULL, RANGES)
    found = rank_memories(listed, FULL, RANGES)
    assert found[0] == full[0]
    assert found[1] == none[1]


def test_tensor_parallel_traffic_of_a_stage_follows_its_number() -> None:
    plan, key = replace(FULL, tensor_parallel=2), ("tensor", "all_reduce")
    scenario = replace(SETTING, stage_recompute_layers=(1, 3))
    listed = rank_communication(scenario, plan, RANGES)
    for rank, count in enumerate((1, 3)):
        same = rank_communication(SETTING, replace(plan, recompute_layers=count), RANGES)
        assert listed[rank][key] == same[rank][key]


def test_flops_of_a_list_and_of_a_pattern() -> None:
    model, workload = SETTING.model, SETTING.workload
    tokens = workload.seq_len * workload.global_batch_size

    def flops(plan: Plan, by_stage: tuple[int, ...] | None = None) -> float:
        table = PlanTable.from_plans([plan])
        return float(np.ravel(hardware_flops_per_step(model, workload, table, RANGES, by_stage))[0])

    none, full = flops(replace(FULL, recompute="none")), flops(FULL)
    assert flops(FULL, (1, 2)) - none == pytest.approx(3 / 8 * (full - none), rel=1e-12)
    half = flops(replace(FULL, recompute_layers=1, recompute_every=2))
    assert half - none == pytest.approx(0.5 * (full - none), rel=1e-12)
    layer = float(layer_flops_per_token(model.kinds[0], workload.seq_len))
    assert full - none < 8 * layer * tokens  # the last matrix is not repeated


def test_the_pattern_is_part_of_what_is_remembered() -> None:
    model = llama()
    all_of_it = even_split_contents(model, 2, 1)
    half = even_split_contents(model, 2, 1, recomputed=RecomputedLayers(1, every=2))
    assert [sum(rank.recomputed) for rank in all_of_it] == [4, 4]
    assert [sum(rank.recomputed) for rank in half] == [2, 2]


@pytest.mark.parametrize("values", [[], [0, 0], [1, -1], [True, 1], [1.0], "1,2", None])
def test_what_are_no_numbers_of_stages(values: object) -> None:
    with pytest.raises(InputError, match="number of recomputed layers at the start of each stage"):
        read_recompute_layers_by_stage(values, "recompute_layers")
