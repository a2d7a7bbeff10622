"""Capped attention against scores written out, and what it keeps."""

import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from executor.attention.core import AttentionCore, visible
from executor.ops import soft_cap as capped
from executor.ops.recompute import checkpointed
from executor.parallel.tensor_parallel import TensorAxis


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * 0.3 / cap) * cap
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def _inputs(seq_len: int) -> list[torch.Tensor]:
    shapes = [(2, heads, seq_len, 8) for heads in (4, 2, 2)]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [False, True])
def test_the_same_output_and_gradients(
    window: int | None, documents: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capped, "QUERY_BLOCK", 7)  # several, the last one shorter
    inputs = _inputs(24)
    starts = torch.arange(24).div(9, rounding_mode="floor").mul(9).expand(2, 24)
    seen = visible(torch.arange(24), window, starts if documents else None)
    mask = seen[:, None] if documents else seen[None, None]
    wanted = torch.randn(2, 4, 24, 8, dtype=torch.float64)
    expected = _written_out(*inputs, mask, 0.7)
    found = capped.soft_capped_attention(*inputs, lambda rows: mask[:, :, rows], 0.3, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, wanted),
        torch.autograd.grad(expected, inputs, wanted),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_no_scores_are_kept():
    inputs = _inputs(64)
    mask = visible(torch.arange(64), None)[None, None]
    kept: list[tuple[int, ...]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(x.shape))
        return x

    with saved_tensors_hooks(note, lambda x: x):
        capped.soft_capped_attention(*inputs, lambda rows: mask[:, :, rows], 0.3, 0.7)
    heads = [(2, 4, 64, 8), (2, 2, 64, 8), (2, 2, 64, 8)]
    assert kept == [*heads, (2, 4, 64, 8), (2, 4, 64)]


def test_a_cap_keeps_its_result_only():
    x = torch.linspace(-9, 9, 7, dtype=torch.float64, requires_grad=True)
    y = capped.soft_capped(x.clone(), 2.0)
    torch.testing.assert_close(y, torch.tanh(x / 2) * 2)
    (mine,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (theirs,) = torch.autograd.grad((torch.tanh(x / 2) * 2).sum(), x)
    torch.testing.assert_close(mine, theirs)


def _core(**options: Any) -> AttentionCore:
    axis = TensorAxis(None, 1, 0, False)
    settings = {"window": None, "dropout": 0.0, "softmax_in_fp32": True, "recompute": False}
    return AttentionCore(axis, scaling=0.3, **{**settings, **options})


def test_a_layer_that_is_recomputed_keeps_no_queries():
    core = _core(kernel="flash", cap=0.7)
    x = torch.randn(2, 16, 4, 8, dtype=torch.float64, requires_grad=True)
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        query = 2.0 * x
        made.append(weakref.ref(query.untyped_storage()))
        return core(query, x, x)

    output = checkpointed(layer, x, random=False)
    assert made[0]() is None
    output.sum().backward()


def test_layers_share_the_mask_of_eager_attention():
    core = _core(kernel="eager", cap=None)
    x = torch.randn(1, 16, 4, 8, requires_grad=True)
    masks: list[int] = []

    def note(kept: torch.Tensor) -> torch.Tensor:
        if kept.dtype == torch.bool:
            masks.append(kept.untyped_storage().data_ptr())
        return kept

    with saved_tensors_hooks(note, lambda kept: kept):
        core(core(x, x, x).unflatten(-1, (4, 8)), x, x)
    assert len(masks) == 2
    assert len(set(masks)) == 1
