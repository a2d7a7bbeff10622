"""The memory tracker against bytes worked out by hand."""

import time

import pytest
import torch

from executor.counters.live_tensors import MemoryTracker
from executor.counters.memory_peak import BACKWARD, FORWARD, OPTIMIZER, StorageLifetime, peak_of
from executor.processes.fork import run_forked

FP32 = 4


def test_peak_and_its_parts_follow_from_lives():
    phases = [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, FORWARD, OPTIMIZER]
    lives = [
        StorageLifetime(100, 0, FORWARD, "weights"),
        StorageLifetime(10, 1, FORWARD, None, freed=3),  # saved for the backward pass
        StorageLifetime(5, 2, FORWARD, None, freed=2),  # freed at once
        StorageLifetime(40, 3, BACKWARD, None),  # a gradient: lives on
        StorageLifetime(7, 3, BACKWARD, None, freed=3),
        StorageLifetime(1, 5, FORWARD, None, freed=5),  # of the gradient norm
        StorageLifetime(2, 3, BACKWARD, None, freed=4, collective="c10d::allreduce_"),
        StorageLifetime(30, 6, OPTIMIZER, "optimizer"),
    ]
    peak = peak_of(lives, phases)
    assert peak.peak_bytes == 170
    assert peak.phase == "optimizer"
    assert peak.parts == {"weights": 100, "gradients": 40, "optimizer": 30}
    assert peak.phase_peaks == {"forward": 115, "backward": 159, "optimizer": 170}
    before = peak_of(lives[:-1], phases)
    assert (before.peak_bytes, before.phase) == (159, "backward")
    assert before.parts == {
        "weights": 100,
        "gradients": 40,
        "activations": 10,
        "buffers": 2,
        "temporary": 7,
    }


def test_softmax_has_the_product_of_cuda_beside_its_gradients():
    scores = torch.ones(4, 8, 256, requires_grad=True)
    with MemoryTracker([scores]) as tracker:
        scores.softmax(-1).backward(torch.ones_like(scores))
    # the output and three tensors beside it: its gradient, their product, the result
    assert tracker.result().peak_bytes == (1 + 1 + 3) * 4 * 8 * 256 * FP32


def test_a_linear_step_equals_the_bytes_by_hand():
    layer = torch.nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False, fused=False)
    weight, batch, out = 64 * 32 * FP32, 16 * 64 * FP32, 16 * 32 * FP32

    def step():
        x = torch.ones(16, 64)
        (layer(x) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with MemoryTracker(layer.parameters(), [optimizer]) as tracker:
        step()
    peak = tracker.result()
    counter_bytes = FP32  # AdamW's step number
    assert peak.parts["weights"] == weight
    assert peak.parts["optimizer"] == 2 * weight + counter_bytes
    assert sum(peak.parts.values()) == peak.peak_bytes
    assert peak.end_bytes == 3 * weight + counter_bytes
    # the worst moment of the forward pass: weights, states, input, output and its square
    loss = FP32
    assert peak.phase_peaks["forward"] == peak.end_bytes + batch + 2 * out + loss
    # AdamW without foreach: two temporaries of the weight's size beside the gradient; x is gone
    assert peak.phase == "optimizer"
    assert peak.parts["gradients"] == weight


def test_saved_activations_are_told_from_temporaries_over_micro_batches():
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
    weights = [layer.weight for layer in layers]
    with MemoryTracker(weights) as tracker:
        for _ in range(2):
            x = torch.ones(1024, 8)
            for layer in layers:
                x = layer(x)
            loss = x.sum()
            del x
            loss.backward()
            del loss
    peak = tracker.result()
    assert peak.parts["weights"] == 3 * 64 * FP32
    assert peak.phase == "backward"
    # inputs of the three layers; then one gradient after another replaces them
    loss_and_its_gradient = 2 * FP32
    assert peak.parts["activations"] == 3 * 1024 * 8 * FP32 + loss_and_its_gradient
    assert peak.end_bytes == 2 * 3 * 64 * FP32


def _sharded_memory(rank):
    """Follow one FSDP step whose gathered weights are storages that are freed and refilled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step():
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with MemoryTracker(model.parameters(), [optimizer]) as tracker:
        step()
        time.sleep(0.5)  # gloo's own thread may hold the last collective's tensors for a moment
    return tracker.result().to_dict()


@pytest.mark.slow
@pytest.mark.distributed
def test_gathered_weights_of_sharded_training_are_seen():
    matrix = 64 * 64 * FP32
    for memory in run_forked(_sharded_memory, 2):
        assert memory["parts"]["weights"] == 8 * matrix // 2
        assert memory["parts"]["buffers"] >= matrix
        assert memory["end_bytes"] == 8 * matrix // 2
        # weights and gradients are sharded, and only a few of the 8 layers are whole at once
        assert memory["peak_bytes"] < (4 + 4 + 6) * matrix
