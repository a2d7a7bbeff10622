"""Counters against numbers worked out by hand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from executor.counters.collectives_and_flops import FLOP_FORMULAS, CommunicationCounter, FlopCounter
from executor.counters.live_tensors import MemoryTracker
from executor.processes.fork import run_forked
from hardware_profiles.errors import RunError

FP32 = 4


# --- communication -----------------------------------------------------------------------------


def _every_collective(rank):
    """Run each kind once or twice on a 2 x 2 grid and return what was counted."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    alone = [dist.new_group([r]) for r in range(4)][rank]
    unnamed = dist.new_group([0, 1, 2])
    groups = {"data": data, "tensor": tensor, "world": dist.group.WORLD}
    x = torch.ones(8)
    with CommunicationCounter(groups) as counter:
        dist.all_reduce(x)
        dist.all_reduce(x, group=data)
        dist.all_reduce(x.to(torch.bfloat16), group=data)
        dist.all_reduce(x, group=alone)  # moves nothing
        dist.all_gather_into_tensor(torch.empty(16), x, group=data)
        dist.all_gather([torch.empty(8), torch.empty(8)], x, group=tensor)
        dist.reduce_scatter_tensor(torch.empty(4), x, group=data)
        dist.all_to_all_single(torch.empty(8), x, group=tensor)
        dist.broadcast(x, src=0)
        dist.barrier()
        peer = rank ^ 1
        sends = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(8), peer)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        if rank < 3:
            dist.all_reduce(x, group=unnamed)
        leaf = torch.ones(8, requires_grad=True)
        gathered = functional.all_gather_tensor_autograd(leaf * 1, 0, tensor)
        gathered.square().sum().backward()  # torch 2.11 takes no expanded gradient
        functional.all_reduce(x, "sum", tensor).sum()
    return counter.records()


@pytest.mark.filterwarnings(
    "ignore:.*(all_gather_into_tensor|all_gather_tensor_autograd|reduce_scatter_tensor)"
    ".*is deprecated:FutureWarning"
)
@pytest.mark.distributed
def test_every_collective_counts_its_whole_tensor_under_its_axis():
    counted = run_forked(_every_collective, 4)
    expected = {
        ("data", "all_gather"): (1, 16 * FP32),
        ("data", "all_reduce"): (2, 8 * FP32 + 8 * 2),
        ("data", "reduce_scatter"): (1, 8 * FP32),
        ("tensor", "all_gather"): (2, 2 * 16 * FP32),
        ("tensor", "all_reduce"): (1, 8 * FP32),
        ("tensor", "all_to_all"): (1, 8 * FP32),
        ("tensor", "reduce_scatter"): (1, 16 * FP32),  # backward of the all_gather
        ("world", "all_reduce"): (1, 8 * FP32),
        ("world", "broadcast"): (1, 8 * FP32),
        ("world", "send"): (1, 8 * FP32),
    }
    for rank, records in enumerate(counted):
        other = {("other", "all_reduce"): (1, 8 * FP32)} if rank < 3 else {}
        found = {(r["axis"], r["kind"]): (r["count"], r["bytes"]) for r in records}
        assert found == expected | other, rank
        assert records == sorted(records, key=lambda r: (r["axis"], r["kind"]))


def _sharded_training(rank):
    """Count one step of FSDP over two ranks with two micro-batches (weights freed in between)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    counter = CommunicationCounter({"data": mesh.get_group()})
    with counter:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
    return counter.records()


@pytest.mark.distributed
def test_sharded_training_moves_every_weight_as_its_formula_says():
    whole = (8 * 8 + 8 * 8 + 8) * FP32
    expected = [
        {"axis": "data", "kind": "all_gather", "count": 8, "bytes": 4 * whole},
        {"axis": "data", "kind": "reduce_scatter", "count": 4, "bytes": 2 * whole},
    ]
    assert run_forked(_sharded_training, 2) == [expected, expected]


def _tensor_parallel(rank):
    """Count a column- and a row-parallel Linear; DTensor's shadow operators must not show."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
    )
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = torch.ones(4, 8, requires_grad=True)
    parameters = list(model.parameters())
    with (
        CommunicationCounter({"tensor": mesh.get_group()}) as counter,
        FlopCounter() as flops,
        MemoryTracker(parameters) as memory,
    ):
        model(x).sum().backward()
    del x
    return [counter.records(), flops.total, memory.result().to_dict()]


@pytest.mark.distributed
def test_tensor_parallel_counts_local_work_only():
    for records, flops, memory in run_forked(_tensor_parallel, 2):
        # one all-reduce of the output forward, one of the input's gradient backward
        assert records == [
            {"axis": "tensor", "kind": "all_reduce", "count": 2, "bytes": 2 * 4 * 8 * FP32}
        ]
        assert flops == 3 * 2 * (4 * 8 * 8 + 4 * 8 * 8)  # half of the 16 columns on each rank
        assert memory["parts"]["weights"] == 2 * 8 * 8 * FP32


# --- operations --------------------------------------------------------------------------------


def _attention_flops(causal):
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(2))
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(query, key, value, is_causal=causal).sum().backward()
    return counter


def _eager_attention_flops():
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        ((query @ key.transpose(-1, -2)).softmax(-1) @ value).sum().backward()
    return counter


def test_flash_attention_counts_the_matmuls_of_eager_attention_plus_the_scores_again():
    scores = 2 * 2 * 4 * 16 * 16 * 8
    assert _eager_attention_flops().by_operator == {"bmm": (2 + 4) * scores}
    for causal in (True, False):
        counted = _attention_flops(causal).by_operator
        assert counted == {
            "_scaled_dot_product_flash_attention_for_cpu": 2 * scores,
            "_scaled_dot_product_flash_attention_for_cpu_backward": 5 * scores,
        }


def test_keys_with_fewer_heads_and_narrower_values_cost_what_they_cost_in_eager_attention():
    """Torch 2.11's own formula refuses such keys."""
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    key, value = (torch.randn(2, 2, 16, 8, requires_grad=True) for _ in range(2))
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum().backward()
    scores = 2 * 2 * 4 * 16 * 16 * 8
    assert counter.total == (2 + 5) * scores
    narrow = value[..., :6]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    one = scores // 8
    assert FLOP_FORMULAS[flash](query, key, narrow) == one * (8 + 6)
    assert FLOP_FORMULAS[backward](query, query, key, narrow) == one * (3 * 8 + 2 * 6)


def test_an_outer_product_is_no_matmul():
    with FlopCounter() as counter:
        torch.ones(3, 4, 1) @ torch.ones(3, 1, 5)
        torch.ones(3, 4, 2) @ torch.ones(3, 2, 5)
    assert counter.total == 2 * 3 * 4 * 2 * 5


def test_several_forward_passes_and_recomputation_count_what_runs():
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8, requires_grad=True)
    one = 2 * 4 * 8 * 8
    with FlopCounter() as counter:
        for _ in range(3):
            layer(x).sum().backward()
    assert counter.total == 3 * 3 * one
    with FlopCounter() as counter:
        checkpoint(lambda v: layer(layer(v)).sin(), x, use_reentrant=False).sum().backward()
    assert counter.total == (2 + 2 + 4) * one


# --- forked processes --------------------------------------------------------------------------


def _fail_on_rank_one(rank):
    if rank == 1:
        raise ValueError("no")
    dist.barrier()


@pytest.mark.distributed
def test_a_failing_rank_is_named():
    with pytest.raises(RunError, match="rank 1: ValueError: no") as caught:
        run_forked(_fail_on_rank_one, 2, timeout=20)
    assert "_fail_on_rank_one" in caught.value.__notes__[0]


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_convolutions_cost_twice_as_much_backward(kind: Any, groups: int):
    layer = kind(8, 8, 3, padding=1, groups=groups)
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    with FlopCounter() as counter:
        y = layer(x)
        forward = counter.total
        y.sum().backward()
    assert forward == 2 * 2 * 25 * 9 * 8 * 8 // groups
    assert counter.total == 3 * forward
