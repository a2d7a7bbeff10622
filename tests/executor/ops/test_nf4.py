"""A frozen base in 4 bits: packed as the paper says, trained as by one process, never whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory_truth.rows import rows_of
from benchmarks.memory_truth.small_models import small
from cost_models.model.lora import QUANTISED_BYTES
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.counters.live_tensors import MemoryTracker
from executor.model.parameter_layout import ParameterLayout, random_tensor
from executor.ops import nf4 as quantised
from executor.ops.nf4 import LEVELS, linear, pack
from executor.parallel.tensor_parallel import UNSHARDED
from executor.processes.fork import run_forked
from executor.verify import reference
from tests.executor.checkpoint.saving import begin, trained
from tests.executor.tiny import assert_equal, tiny, verified

SHAPES = {"blocks": (48, 128), "a block over two rows": (6, 96), "an unfinished block": (5, 13)}


@pytest.mark.parametrize("name", SHAPES)
def test_every_element_is_the_nearest_level_of_its_block(name: str) -> None:
    shape = SHAPES[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = pack(values).matrix(torch.float64).flatten()
    for block, of_block in zip(values.flatten().split(64), found.split(64), strict=True):
        choices = torch.tensor(LEVELS).double() * block.abs().max()
        nearest = (block[:, None].double() - choices).abs().min(1).values
        assert torch.allclose((block.double() - of_block).abs(), nearest, rtol=0, atol=1e-6)
    assert found.shape == (shape[0] * shape[1],)


def test_a_matrix_takes_four_bits_and_a_scale_for_64() -> None:
    found = pack(torch.randn(48, 128))
    held = found.codes.nbytes + found.scales.nbytes
    assert held == 48 * 128 * QUANTISED_BYTES


def test_bits_by_hand() -> None:
    values = torch.zeros(1, 64)
    values[0, :4] = torch.tensor([2.0, -2.0, 0.7, 0.0])
    found = pack(values)
    assert found.scales.tolist() == [2.0]
    assert found.codes[:3].tolist() == [15 * 16 + 0, 11 * 16 + 7, 7 * 16 + 7]  # 0.35: level 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_unpacked_values_pack_to_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1))
    values[:1] = 0.0  # a block may be nothing but zeros
    first = pack(values)
    again = pack(first.matrix(dtype))
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.scales, again.scales)


def test_large_matrices_are_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(33, 100)
    at_once = pack(values)
    expected = {d: at_once.matrix(d) for d in (torch.float32, torch.bfloat16)}
    monkeypatch.setattr(quantised, "DEQUANTISED_AT_ONCE", 128)
    in_parts = pack(values)
    assert torch.equal(in_parts.codes, at_once.codes)
    assert torch.equal(in_parts.scales, at_once.scales)
    for dtype, matrix in expected.items():
        assert torch.equal(in_parts.matrix(dtype), matrix)
        assert torch.equal(matrix, at_once.matrix(torch.float32).to(dtype))  # rounded once


def test_nothing_but_packed_bytes_is_kept() -> None:
    weight = pack(torch.randn(64, 128))
    linear(torch.ones(1, 128), weight)  # the table of levels stays
    x = torch.ones(2, 128, requires_grad=True)
    with MemoryTracker([weight.codes, weight.scales, x]) as tracker:
        y = linear(x, weight)
    table = 256 * 2 * 4
    kept = weight.codes.nbytes + weight.scales.nbytes + x.nbytes + y.nbytes + table
    assert tracker.result().end_bytes == kept
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0], weight.matrix(torch.float32).sum(0), atol=1e-4)


CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "one process": (Plan(num_microbatches=2), {"family": "qwen3"}),
    "sequence parallel, recomputed": (
        Plan(1, 2, sequence_parallel=True, recompute="full", num_microbatches=2),
        {},
    ),
    "stored (in, out), sharded": (
        Plan(2, zero_stage=3, num_microbatches=2),
        {"family": "gpt2", "tied": True},
    ),
    "tensor parallel, fused matrices": (Plan(1, 2), {"family": "phi3"}),
    "weight gradients later": (
        Plan(1, 2, 2, 1, "zero_bubble", num_microbatches=4),
        {"family": "gpt2", "adapter_targets": "attention"},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if "later" in n else ()) for n in CASES],
)
def test_a_base_in_four_bits_is_trained_as_by_one_process(name: str) -> None:
    plan, options = CASES[name]
    found = verified(tiny(plan, qlora=4, num_layers=2, **options))
    assert_equal(found)
    assert ".lora_" in found.worst_gradient


def _not_rounded() -> None:
    def exact(file: PlanFile, layout: ParameterLayout, seed: int) -> Tensor:
        return random_tensor(layout, seed, layout.ranges(UNSHARDED))

    reference._start = exact


def _in_whole_blocks() -> None:
    original = reference._start

    def whole(file: PlanFile, layout: ParameterLayout, seed: int) -> Tensor:
        return original(replace(file, plan=Plan()), layout, seed)

    reference._start = whole


def _first_matrix_twice() -> None:
    original, seen = quantised.PackedMatrix.matrix, {}

    def matrix(self: Any, dtype: torch.dtype) -> Tensor:
        found = original(self, dtype)
        return seen.setdefault((found.shape, dtype), found)

    quantised.PackedMatrix.matrix = matrix  # type: ignore[method-assign]


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("wrong", [_not_rounded, _in_whole_blocks, _first_matrix_twice])
def test_other_values_are_seen(wrong: Any) -> None:
    found = verified(tiny(Plan(1, 2), qlora=4, num_layers=2), wrong)
    assert found.gradient_difference > 1e-4
    assert not found.passed


def _wide(plan: Plan, precision: Any) -> PlanFile:
    adapters = {"adapter": "qlora", "adapter_rank": 8, "adapter_alpha": 16.0}
    return small("llama", precision, plan, layers=4, **adapters)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan",
    [
        Plan(num_microbatches=2),
        Plan(1, 2, sequence_parallel=True, recompute="full"),
        pytest.param(Plan(2, zero_stage=0, recompute="full"), marks=pytest.mark.slow),
    ],
    ids=["whole", "cut", "two data ranks"],
)
def test_memory_is_predicted(plan: Plan) -> None:
    (row,) = rows_of(_wide(plan, "fp32"))
    assert row["traced_parts"]["weights"] == row["parts"]["weights"]
    assert abs(row["error_percent"]) < 8.0


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_has_the_same_bytes(precision: str, tmp_path: Path) -> None:
    plan = Plan(1, 2, sequence_parallel=True, micro_batch_size=2)
    options: dict[str, Any] = {"num_layers": 2, "precision": precision, "optimizer": "adamw"}
    file = tiny(plan, qlora=4, **options)
    unbroken = trained(file, tmp_path / "whole", 3)
    trained(file, tmp_path / "parts", 2, every=2)
    fresh = run_forked(_codes, 2, file, str(tmp_path / "none"))
    assert run_forked(_codes, 2, file, str(tmp_path / "parts")) == fresh
    resumed = trained(file, tmp_path / "parts", 3)
    for before, after in zip(unbroken, resumed, strict=True):
        assert after["losses"] == before["losses"][2:]
        assert after["digest"] == before["digest"]


def _codes(rank: int, file: PlanFile, folder: str) -> dict[str, Any]:
    """Return the packed bytes that a rank begins with."""
    trainer, _ = begin(file, Path(folder))
    return {
        held.name: (held.packed.codes.tolist(), held.packed.scales.tolist())
        for held in trainer.buffers
        if held.packed is not None
    }
