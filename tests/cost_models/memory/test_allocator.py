"""Free blocks in the allocator's segments: of which plans, and of which tensors."""

import numpy as np
import pytest

from cost_models.memory.allocator import (
    FIRST_STREAM_ALONE,
    FREE_SHARES,
    free_bytes,
    free_shares,
)
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import reserved_free_bytes
from cost_models.pricing.prediction import predict
from hardware_profiles.software.trainer import software_profile
from tests.samples import make_scenario

ALONE, REPLICAS = Plan(), Plan(data_parallel=8)
SHARDED = Plan(data_parallel=8, zero_stage=3)


def test_streams_of_their_own_exist_where_a_plan_shards() -> None:
    table = PlanTable.from_plans([ALONE, REPLICAS, SHARDED])
    found = free_shares(software_profile("torch-trainer+fsdp2"), table)
    one, several = FREE_SHARES[False, False, False], FREE_SHARES[False, True, False]
    assert found.needed.tolist() == [one.needed, one.needed, several.needed]  # type: ignore[union-attr]
    assert found.cached.tolist() == [one.cached, one.cached, several.cached]  # type: ignore[union-attr]


def test_layers_that_run_again_leave_more_free_blocks_on_one_stream() -> None:
    table = PlanTable.from_plans([ALONE, Plan(recompute="full"), Plan(recompute="selective")])
    for name, once, again in (
        ("torch-trainer", *FIRST_STREAM_ALONE),
        ("torch-trainer+expandable-segments", 0.083, 0.083),
        ("torch-trainer+ragged-batches", 0.577, 0.577),
    ):
        assert free_shares(software_profile(name), table).cached.tolist() == [once, again, once]  # type: ignore[union-attr]


def test_sharding_without_side_streams_is_one_stream() -> None:
    table = PlanTable.from_plans([Plan(data_parallel=8, zero_stage=1, recompute="full")])
    assert free_shares(software_profile("megatron"), table).cached.tolist() == [  # type: ignore[union-attr]
        FIRST_STREAM_ALONE[1]
    ]


def test_a_buffer_of_all_gradients_leaves_no_free_blocks() -> None:
    table = PlanTable.from_plans([SHARDED])
    whole, fresh = (
        software_profile("megatron").changed({"gradients.whole_buffer": value})
        for value in (True, False)
    )
    assert free_bytes(whole, table, 1e9, 0.0) == np.zeros(1)
    assert free_bytes(fresh, table, 1e9, 0.0) > 0.0


def test_reduced_gradients_keep_blocks_of_their_own_on_one_gpu() -> None:
    """The first stream cannot use them while no gradient is live."""
    masters = make_scenario("llama", "1xA100-80GB", global_batch_size=1)
    gradients = 4.0 * masters.model.num_parameters
    found = reserved_free_bytes(masters, Plan(), 0)
    assert found is not None
    assert 0.5 * gradients < float(found[0]) < 2.0 * gradients  # type: ignore[index]
    one_precision = make_scenario("llama", "1xA100-80GB", global_batch_size=1, precision="fp32")
    assert reserved_free_bytes(one_precision, Plan(), 0) is None  # not wrapped: one stream
    shown = predict(masters, Plan(), default_layer_ranges(masters, Plan())).memory
    assert shown.peak_reserved_bytes == pytest.approx(shown.peak_allocated_bytes + float(found[0]))  # type: ignore[index]


def test_streams_are_counted_apart_where_expandable_segments_shard() -> None:
    plan = Plan(data_parallel=8, zero_stage=3)
    for words, counted in (("expandable-segments", True), ("default-segments", False)):
        software = f"torch-trainer+fsdp2+{words}"
        scenario = make_scenario("llama", "8xA100-80GB", global_batch_size=8, software=software)
        assert (reserved_free_bytes(scenario, plan, 0) is not None) == counted
        assert reserved_free_bytes(scenario, Plan(micro_batch_size=8), 0) is None


def test_freed_16_bit_logits_stay_reserved_beside_their_fp32_copies() -> None:
    """No fp32 copy fits into their block; a compiled loss writes a gradient of their size."""
    plan, found = Plan(data_parallel=8, zero_stage=3), {}
    for loss in ("torch-loss", "compiled-loss"):
        software = f"torch-trainer+fsdp2+expandable-segments+{loss}"
        scenario = make_scenario("llama", "8xA100-80GB", global_batch_size=8, software=software)
        found[loss] = float(reserved_free_bytes(scenario, plan, 0)[0])  # type: ignore[index]
    tokens, vocabulary = scenario.workload.seq_len, scenario.model.vocab_size
    narrow = 2.0 * tokens * vocabulary
    assert 0.8 * narrow < found["torch-loss"] - found["compiled-loss"] < narrow
