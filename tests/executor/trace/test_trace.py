"""Traces on fake tensors beside real steps, by the allocations of every rank."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory_truth.traced_modules import INPUTS, predicted, traced, trained
from cost_models.plan.plan import Plan
from cost_models.traced.module import traced_module
from executor.counters.collectives_and_flops import FlopCounter
from executor.processes.fork import run_forked
from executor.trace.linear_fit import _envelope
from executor.trace.module_inputs import parse_input_shape
from executor.trace.trace import trace
from hardware_profiles.errors import InputError

HERE = f"module:{__name__}:"


# modules that are traced here; the trace imports this file under its name
class Tied(nn.Module):
    """Embedding and head share a matrix; a layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h).relu()
        return self.head(h)


def tied() -> nn.Module:
    return Tied()


tied.example_inputs = lambda rows: {"x": torch.zeros(rows, 5, dtype=torch.int64)}  # type: ignore[attr-defined]


class Reads(nn.Module):
    """Looks at values: fake tensors have none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() if x.max() > 0 else x.sum()


class Wider(Reads):
    """Takes inputs of another width."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, 1:]).sum()


class Square(Reads):
    """Every row looks at every other: bytes grow with the square of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h @ h.T).exp().exp().sum()


class Even(Reads):
    """Takes another way with three rows."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h.relu() if len(x) % 2 else h).sum()


class Dropped(Reads):
    """A dropout whose mask has to be kept."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5).square().sum()


class RecomputedLayers(nn.Module):
    """Blocks whose norm and dropout differ between a GPU and a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Drawn(Reads):
    """Its constructor reads a number off a tensor, as many do for rates of dropped paths."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.rate


def fails() -> nn.Module:
    raise ValueError("no weights\nhere")


TYPED = ["x=float32[B,4]"]


@pytest.mark.slow
def test_parameters_by_block_tied_and_frozen():
    found = trace(HERE + "tied")
    module = traced_module(json.loads(json.dumps(found)))
    real = Tied()
    assert module.num_parameters == sum(p.numel() for p in real.parameters())
    trained_ones = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert module.num_trainable_parameters == trained_ones
    assert module.tied_parameters == 1
    assert module.block_names == ("layers.0", "layers.1", "layers.2")
    assert float(module.outside.elements()) == 20 * 8
    assert any("returns no loss" in note for note in module.notes)
    last = module.passes["none"].segments[-1]
    assert last.block_gradients == 2 * 4 * (64 + 8)  # of the layers that are trained


@pytest.mark.slow
def test_flops_are_those_of_the_real_module():
    module = traced_module(traced("mlp", "fp32"))
    from benchmarks.memory_truth import traced_modules

    batch = {s.name: s.tensor(5) for s in map(parse_input_shape, INPUTS["mlp"])}
    with FlopCounter() as counter:
        loss = traced_modules.mlp()(**batch)
        forward = counter.total
        loss.backward()
    from cost_models.traced.time import pass_flops

    plain = module.passes["none"]
    assert pass_flops(plain.forward, 5) == forward
    assert pass_flops(plain.backward, 5) == counter.total - forward
    again = pass_flops(module.passes["full"].backward, 5) - pass_flops(plain.backward, 5)
    # the first matmul of each block once more: nobody needs the result of the second
    assert again == 6 * 2 * (5 * 16) * 256 * 1024


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "cannot be traced: ValueError: no weights"),
        ("Reads", "depend on the values of tensors"),
        ("Square", "not affine in the rows"),
        ("Even", "its operators differ between 2 and 3 rows"),
        ("Wider", "cannot be traced: RuntimeError: "),
    ],
)
def test_what_cannot_be_traced_is_one_line(name: str, message: str):
    with pytest.raises(InputError, match=message) as caught:
        trace(HERE + name, input_shapes=TYPED)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(HERE + name)


def test_half_precision_without_a_loss_scale_is_refused():
    with pytest.raises(InputError, match="precision = 'fp16'"):
        trace(HERE + "tied", precision="fp16")


@pytest.mark.slow
def test_a_module_that_cannot_be_built_of_fake_tensors_is_built():
    found = trace(HERE + "Drawn", input_shapes=TYPED)
    assert found["outside"]["parameters"] == 20


@pytest.mark.slow
def test_on_a_gpu_dropout_keeps_bytes_and_attention_none_of_its_scores():
    def peak(device: str) -> float:
        module = traced_module(trace(HERE + "Dropped", input_shapes=TYPED, device=device))
        # four values a row
        return max(float(s.kept.at(1000)) for s in module.passes["none"].segments)

    assert peak("cpu") - peak("cuda") == pytest.approx(4 * 1000 * 3, rel=0.01)


@pytest.mark.slow
def test_recomputed_blocks_follow_the_rules_of_a_gpu_too():
    module = traced_module(
        trace(HERE + "RecomputedLayers", input_shapes=TYPED, precision="bf16", device="cuda")
    )
    assert set(module.passes) == {"none", "full"}


def test_envelopes_are_the_largest_line_everywhere():
    random = np.random.default_rng(0)
    for _ in range(50):
        lines = random.integers(0, 100, (9, 2)).astype(float)
        kept = np.array(_envelope(lines))
        for rows in (1, 2, 3, 10, 1000):
            values = lines @ [1, rows]
            assert (kept @ [1, rows]).max() == values.max()
        assert len(kept) <= len(lines)


document = cache(traced)


def compared(name: str, precision: str, plan: Plan) -> float:
    """The predicted peak over that of the fullest rank."""
    ranks = run_forked(trained, plan.world_size, name, plan, precision, timeout=120.0)
    return predicted(document(name, precision), plan)[0] / max(r["peak_bytes"] for r in ranks)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_peak_of_one_process_is_traced():
    for plan in (Plan(micro_batch_size=64), Plan(micro_batch_size=32, num_microbatches=3)):
        assert compared("mlp", "fp32", plan) == pytest.approx(1.0, abs=0.01), plan


# of ZeRO-2 with several micro-batches gloo's reduction makes a copy that no trace sees
CASES = [
    ("resnet", "bf16", Plan(micro_batch_size=4, recompute="full")),
    ("resnet", "fp32", Plan(2, zero_stage=1, micro_batch_size=4)),
    ("resnet", "bf16", Plan(2, zero_stage=3, micro_batch_size=4, num_microbatches=3)),
    ("vit", "fp32", Plan(2, zero_stage=0, micro_batch_size=4)),
    ("vit", "bf16", Plan(2, zero_stage=2, micro_batch_size=4)),
    ("vit", "fp32", Plan(2, zero_stage=3, micro_batch_size=4, recompute="full")),
    ("lstm", "fp32", Plan(2, zero_stage=1, micro_batch_size=4, num_microbatches=3)),
    ("mlp", "fp32", Plan(2, zero_stage=3, micro_batch_size=4)),
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "precision", "plan"), CASES)
def test_peaks_of_real_steps_are_traced(name: str, precision: str, plan: Plan):
    assert compared(name, precision, plan) == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_a_known_model_from_the_command_line(tmp_path: Path):
    source = "ResNetForImageClassification(ResNetConfig(num_labels=1000))"
    names = "ResNetConfig, ResNetForImageClassification"
    lines = [f"from transformers import {names}", f"def build(): return {source}"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "executor", "trace-module", "module:mine:build"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    # torchvision's figure for resnet50 (IMAGENET1K weights)
    assert traced_module(json.loads(done.stdout)).num_parameters == 25_557_032
