"""Blocks of attention, put together, against attention to all keys at once."""

import pytest
import torch
from torch import Tensor

from executor.attention.blockwise import Inputs, Kernel, RunningSoftmax

SCALING = 0.3
FUSED, PLAIN = Kernel(True, SCALING), Kernel(False, SCALING)
CAPPED = Kernel(True, SCALING, cap=2.0)


def tensors(heads: int, tokens: int = 24, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, (2, heads, tokens, 8)."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, tokens, n, 8) for n in (4, heads, heads, 4)]
    return [torch.randn(s, generator=generator, dtype=dtype).transpose(1, 2) for s in shapes]


def whole(query: Tensor, key: Tensor, value: Tensor, cap: float | None = None) -> Tensor:
    """Attend causally to all keys."""
    times = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * SCALING
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


def in_blocks(kernel: Kernel, given: list[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Attend block by block, forward and backward; hidden blocks go through a mask."""
    query, key, value, gradient = given
    total = RunningSoftmax(query, value)
    starts = range(0, query.size(2), size)
    pairs = [(slice(q, q + size), slice(k, k + size)) for q in starts for k in starts]
    pairs.sort(key=lambda pair: abs(pair[0].start - pair[1].start))  # the own tokens first
    low = torch.finfo(query.dtype).min / 2

    def mask(rows: slice, keys: slice) -> Tensor | None:
        hides = keys.start > rows.start
        return torch.full((1, 1, size, size), low, dtype=query.dtype) if hides else None

    def inputs(rows: slice, keys: slice) -> Inputs:
        seen = key[:, :, keys], value[:, :, keys]
        return Inputs(query[:, :, rows], *seen, rows == keys, mask(rows, keys))

    for rows, keys in pairs:
        total.add(rows, *kernel.forward(inputs(rows, keys)))
    output = total.output.to(query.dtype)
    found = [torch.zeros_like(x) for x in (query, key, value)]
    for rows, keys in pairs:
        back = (x[:, :, rows] for x in (gradient, output, total.lse))
        parts = kernel.backward(inputs(rows, keys), *back)
        for sum_, place, part in zip(found, (rows, keys, keys), parts, strict=True):
            sum_[:, :, place] += part
    return output, found


def assert_equal_to_the_whole(kernel: Kernel, given: list[Tensor]) -> None:
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    expected = whole(*leaves, cap=kernel.cap)
    expected.backward(given[3])
    output, gradients = in_blocks(kernel, given, 6)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for found, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", [FUSED, PLAIN, CAPPED], ids=["fused", "plain", "capped"])
def test_blocks_equal_the_whole(kernel: Kernel, heads: int):
    assert_equal_to_the_whole(kernel, tensors(heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [FUSED, PLAIN], ids=["fused", "plain"])
def test_blocks_are_summed_in_fp32(kernel: Kernel, dtype: torch.dtype):
    given = tensors(2, dtype=dtype)
    exact = [x.double().requires_grad_() for x in given[:3]]
    expected = whole(*exact)
    expected.backward(given[3].double())
    output, gradients = in_blocks(kernel, given, 6)
    assert output.dtype == dtype
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 3e-3}[dtype]
    expected = expected.detach()
    assert float((output - expected).norm() / expected.norm()) < limit
    for found, leaf in zip(gradients, exact, strict=True):
        assert float((found - leaf.grad).norm() / leaf.grad.norm()) < limit


def test_the_plain_kernel_holds_the_scores_of_some_queries_only(monkeypatch: pytest.MonkeyPatch):
    given = tensors(2)
    once = in_blocks(PLAIN, given, 12)
    monkeypatch.setattr("executor.attention.blockwise.QUERY_BLOCK", 5)
    rows = in_blocks(PLAIN, given, 12)
    torch.testing.assert_close(once, rows, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kernel", [FUSED, PLAIN], ids=["fused", "plain"])
def test_values_may_be_narrower_than_keys(kernel: Kernel):
    query, key, value, gradient = tensors(2)
    assert_equal_to_the_whole(kernel, [query, key, value[..., :5], gradient[..., :5]])
