"""Memory and time of a traced module: by hand, and a table of plans as plan by plan."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import astuple

from cost_models.memory.parts import MemoryParts
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.step_time.parts import TimeParts
from cost_models.traced.memory import OPTIMIZER_STEP, BlockSizes, traced_memory
from cost_models.traced.module import OUTSIDE, TracedModule, stretches, traced_module
from cost_models.traced.time import _traffic, traced_time
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from tests.traced_sample import document, large, sample

SOFTWARE = software_profile("shardplan")
CLUSTER = parse_cluster("1xA100-80GB")


def memory(module: TracedModule, plan: Plan, *, on_gpu: bool = False) -> tuple[MemoryParts, int]:
    parts, moment = traced_memory(
        module,
        Workload(1, plan.global_batch_size, precision="fp32"),
        SOFTWARE,
        PlanTable.from_plans([plan]),
        CLUSTER if on_gpu else None,
    )
    values = {name: float(getattr(parts, name)[0]) for name in MemoryParts.__struct_fields__}
    return MemoryParts(**values), int(moment[0])


def peak(plan: Plan) -> float:
    return float(memory(sample(), plan)[0].peak)


def test_parameters_and_blocks():
    module = sample()
    assert module.num_parameters == 32 + 32 + 24 + 8
    assert module.num_trainable_parameters == 32 + 32 + 24
    assert module.block_names == ("b.0", "b.1")
    assert float(module.outside.elements(4)) == 2 * 4 + 2 * 1 * 4  # ceil(6/4) rows; a row each
    assert float(module.tensors.largest(4)) == 2 * 4
    with pytest.raises(InputError, match="schema_version = 9"):
        traced_module({**document(), "schema_version": 9})


def test_one_process_by_hand():
    """w P and buffers, states, and the fullest stretch: the backward pass of the last block."""
    weights, states = 4 * 96 + 16, 8 * 88
    parts, moment = memory(sample(), Plan(micro_batch_size=10))
    assert (parts.weights, parts.optimizer) == (weights, states)
    assert parts.activations == 128 + 10 * (90 + 100)
    assert parts.gradients == parts.buffers == parts.runtime == parts.logits == 0
    assert moment == 4
    # of several micro-batches the earlier ones have left all gradients; new ones are freed at once
    parts, _ = memory(sample(), Plan(micro_batch_size=10, num_microbatches=2))
    assert parts.gradients == 4 * 88
    assert parts.activations == 32 + 10 * (90 + 100)
    # with few rows the update is the peak: all gradients and three copies of the largest tensor
    parts, moment = memory(sample(), Plan(micro_batch_size=1))
    assert moment == OPTIMIZER_STEP
    assert float(parts.peak) == weights + states + 4 * 88 + 3 * 4 * 32


def test_recompute_trades_saved_bytes():
    saved = peak(Plan(micro_batch_size=20)) - peak(Plan(micro_batch_size=20, recompute="full"))
    assert saved == 20 * 2 * 40


def test_zero_by_hand():
    """Four ranks, one micro-batch; the peak is the backward pass of the last block."""
    rows = 100
    live = 128 + rows * 190
    shard = {1: 4 * 96 + 16, 4: 4 * (8 + 8 + 16) + 16}  # a vector's one row is on every rank
    for zero, ranks in ((1, 4), (2, 4)):
        parts, moment = memory(sample(), Plan(4, zero_stage=zero, micro_batch_size=rows))
        assert moment == 4
        assert parts.weights == shard[ranks] + 4 * 96  # and all gathered
        assert parts.optimizer == 8 * (8 + 8 + 8)
        assert parts.activations == live
        assert (parts.gradients, parts.buffers) == (0, 0)
    parts, _ = memory(sample(), Plan(4, zero_stage=3, micro_batch_size=rows))
    assert parts.weights == shard[4] + 4 * 32 + 4 * 32  # what lies outside, and the block at work
    assert parts.buffers == 4 * 32  # the block that comes next
    parts, _ = memory(sample(), Plan(4, micro_batch_size=rows))
    assert parts.weights == 2 * shard[1] - 16  # replicate(): FSDP2 over one shard
    parts, _ = memory(sample(), Plan(4, zero_stage=2, micro_batch_size=rows, num_microbatches=3))
    assert parts.gradients == 4 * (8 + 8 + 8)  # shards of earlier micro-batches
    assert parts.activations == live
    assert parts.buffers == 4 * 4 * 8  # the last reduction of an earlier one is still there
    parts, _ = memory(sample(), Plan(4, zero_stage=1, micro_batch_size=rows, num_microbatches=3))
    assert parts.gradients == 4 * 88
    assert parts.activations == live - 96


def test_more_sharding_never_needs_more_and_more_rows_never_less():
    module = sample()
    for rows, count in itertools.product((1, 7, 300), (1, 2, 4)):
        options = {"micro_batch_size": rows, "num_microbatches": count}
        peaks = [memory(module, Plan(4, zero_stage=z, **options))[0].peak for z in range(4)]
        assert peaks == sorted(peaks, reverse=True), (rows, count)
    sizes = [peak(Plan(2, zero_stage=3, micro_batch_size=rows)) for rows in range(1, 40)]
    assert sizes == sorted(sizes)


def plans() -> list[Plan]:
    return [
        Plan(
            data,
            zero_stage=zero,
            recompute=recompute,
            micro_batch_size=rows,
            num_microbatches=count,
            dp_replicate=copies,
        )
        for data, zero, recompute, rows, count, copies in itertools.product(
            (1, 4, 8), range(4), ("none", "full"), (1, 50), (1, 3), (1, 2)
        )
        if (zero == 0 or data > 1) and (copies == 1 or (zero and data > 1))
    ]


def test_a_table_is_priced_as_every_row_alone():
    module, table = sample(), PlanTable.from_plans(plans())
    workload = Workload(1, 1, precision="fp32")
    cluster = parse_cluster("8xA100-SXM-80GB")

    def priced(rows: PlanTable) -> list[np.ndarray]:
        parts, moment = traced_memory(module, workload, SOFTWARE, rows, CLUSTER)
        time = traced_time(module, workload, cluster, SOFTWARE, rows)
        columns = [*astuple(parts), moment]
        return [np.asarray(c) for c in (*columns, *astuple(time))]

    together = priced(table)
    for row in range(len(table)):
        alone = priced(table.rows(slice(row, row + 1)))
        for one, column in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], np.broadcast_to(column, len(table))[row])


def test_extreme_sizes_stay_finite():
    table = PlanTable.from_plans([Plan(1, micro_batch_size=10**6), Plan(8, zero_stage=3)])
    parts, _ = traced_memory(large(1e11), Workload(1, 8), SOFTWARE, table, CLUSTER)
    assert np.all(np.isfinite(parts.peak))
    assert np.all(np.asarray(parts.peak) > 0)


def test_stretches_of_a_pass():
    walk = stretches(sample().passes["none"])
    assert [s.gathered for s in walk] == [(), (0,), (0, 1), (0, 1), (0, 1), (0,), ()]
    assert [s.done for s in walk] == [(), (), (), (), (), (1,), (1, 0)]
    assert [s.coming for s in walk] == [None, None, None, None, 0, None, None]
    assert [s.reduces for s in walk] == [False, False, False, False, True, True, True]
    assert [None if s.gathers is None else s.gathers[1] for s in walk[1:3]] == [OUTSIDE, 0]


def test_time_by_hand():
    """Two matmuls forward, four backward, none hidden behind another; recomputation apart."""
    cluster = parse_cluster("1xA100-SXM-80GB")
    module = large(1e9)

    def time(plan: Plan) -> TimeParts:
        return traced_time(module, Workload(1, 1), cluster, SOFTWARE, PlanTable.from_plans([plan]))

    from cost_models.compute.rates import rates

    rate = rates(cluster.accelerator, "fp32", SOFTWARE).of_unknown_shapes
    rows = 100
    forward = max(100 * rows * 1e9 / rate.matmul, (128 + 40 * rows) * 1e9 / rate.memory)
    backward = max(100 * rows * 1e9 / rate.matmul, 40 * rows * 1e9 / rate.memory)
    plain = time(Plan(micro_batch_size=rows, num_microbatches=2))
    assert float(np.ravel(plain.compute)[0]) == pytest.approx(2 * (2 * forward + 4 * backward))
    assert float(np.ravel(plain.data_communication)[0]) == 0.0
    again = time(Plan(micro_batch_size=rows, num_microbatches=2, recompute="full"))
    assert float(np.ravel(again.recompute)[0]) == pytest.approx(2 * 2 * backward)
    assert float(np.ravel(again.compute)[0]) == pytest.approx(float(np.ravel(plain.compute)[0]))


def test_traffic_by_hand():
    """FSDP2 sends equal shards of whole rows: 32 + 32 elements of blocks, 64 outside, 32 frozen."""
    module, blocks, outside, trained = sample(), 4 * 64, 4 * 64, 4 * (64 + 32)

    def traffic(plan: Plan) -> dict[tuple[str, str], tuple[float, float]]:
        table = PlanTable.from_plans([plan])
        ranks = np.where(table.zero_stage == 0, 1, table.dp_shard)
        found = _traffic(module, BlockSizes.of(module, ranks), table)
        pairs = {key: (float(t.count[0]), float(t.size[0])) for key, t in found.items()}
        return {key: pair for key, pair in pairs.items() if any(pair)}

    gather, scatter, sums = (
        ("data", "all_gather"),
        ("data", "reduce_scatter"),
        ("replicate", "all_reduce"),
    )
    assert traffic(Plan(1, num_microbatches=3)) == {}
    assert traffic(Plan(4, num_microbatches=3)) == {("data", "all_reduce"): (3, 4 * 88)}
    once = {gather: (3, blocks + outside), scatter: (3, trained)}
    assert traffic(Plan(4, zero_stage=1, num_microbatches=3)) == once
    every = {gather: (3, blocks + outside), scatter: (9, 3 * trained)}
    assert traffic(Plan(4, zero_stage=2, num_microbatches=3)) == every
    # each block before its forward and before its backward pass
    again = {gather: (3 * 5, 3 * (2 * blocks + outside)), scatter: (9, 3 * trained)}
    assert traffic(Plan(4, zero_stage=3, num_microbatches=3)) == again
    copies = Plan(8, zero_stage=2, dp_replicate=2, num_microbatches=3)
    assert traffic(copies) == {**every, sums: (9, 3 * trained / 4)}
    assert traffic(replace(copies, zero_stage=1)) == {**once, sums: (3, trained / 4)}
