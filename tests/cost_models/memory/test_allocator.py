"""Free blocks in the allocator's segments: of which plans, and of which tensors."""

from __future__ import annotations

import numpy as np

from cost_models.memory.allocator import FREE_SHARES, free_bytes, free_shares
from cost_models.plan.plan import Plan, PlanTable
from hardware_profiles.software.trainer import software_profile

ALONE, REPLICAS = Plan(), Plan(data_parallel=8)
SHARDED = Plan(data_parallel=8, zero_stage=3)


def test_streams_of_their_own_exist_where_a_plan_shards() -> None:
    table = PlanTable.from_plans([ALONE, REPLICAS, SHARDED])
    found = free_shares(software_profile("torch-trainer+fsdp2"), table)
    one, several = FREE_SHARES[False, False, False], FREE_SHARES[False, True, False]
    assert found.needed.tolist() == [one.needed, one.needed, several.needed]  # type: ignore[union-attr]
    assert found.cached.tolist() == [one.cached, one.cached, several.cached]  # type: ignore[union-attr]


def test_a_buffer_of_all_gradients_leaves_no_free_blocks() -> None:
    table = PlanTable.from_plans([SHARDED])
    whole, fresh = (
        software_profile("megatron").changed({"gradients.whole_buffer": value})
        for value in (True, False)
    )
    assert free_bytes(whole, table, 1e9, 0.0) == np.zeros(1)
    assert free_bytes(fresh, table, 1e9, 0.0) > 0.0
