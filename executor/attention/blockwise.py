"""Blockwise attention: partial softmax over a block of keys, and the merge of partial results.

A block gives its output and the log-sum-exp of its scores; the outputs of several blocks are
averaged with weights exp(lse_block - lse). The gradient of a block needs only the final output and
lse (Dao, arXiv:2307.08691, sec. 3.1; Liu et al., Ring Attention, arXiv:2310.01889, sec. 3).

Shapes   B sequences, h query heads, k key heads, q queries, n keys, d, e sizes of a head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.compat import (
    cpu_attention,
    cpu_attention_backward,
    cuda_flash,
    cuda_flash_backward,
    cuda_masked,
    cuda_masked_backward,
)

QUERY_BLOCK: Final = 128  # scored at a time by the plain kernel
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


class Inputs(NamedTuple):
    """One block of queries (B, h, q, d), keys (B, k, n, d) and values (B, k, n, e)."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool  # as many queries as keys, each attends to keys up to its own position
    mask: Tensor | None  # added to the scores, finite: a query may attend to none of the keys


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attention kernel for one block of queries and keys."""

    fused: bool  # torch's fused kernels where supported: no full score matrix
    scaling: float
    cap: float | None = None  # soft cap of the scores (Gemma 2)

    def forward(self, block: Inputs) -> tuple[Tensor, Tensor]:
        """Return the output (B, h, q, e) and the log-sum-exp of the scores (B, h, q)."""
        kind = self._kind(block)
        if kind == "plain":
            return self._plain_forward(block)
        query, key, value, causal, mask = block
        width = value.size(-1)
        value = _widened(value, key)
        if kind == "cpu":
            output, lse = cpu_attention(
                query, key, value, 0.0, causal, attn_mask=mask, scale=self.scaling
            )
        elif kind == "flash":
            output, lse = cuda_flash(query, key, value, 0.0, causal, scale=self.scaling)[:2]
        else:
            key, value = _repeated(query, key), _repeated(query, value)
            output, lse = cuda_masked(
                query,
                key,
                value,
                _for_every_head(query, mask),
                True,
                0.0,
                causal,
                scale=self.scaling,
            )[:2]
        return output[..., :width], lse

    def backward(self, block: Inputs, gradient: Tensor, output: Tensor, lse: Tensor) -> Gradients:
        """Return the block's share of the gradients; output and lse are the final ones."""
        kind, lse = self._kind(block), lse.contiguous()
        if kind == "plain":
            return self._plain_backward(block, gradient, output, lse)
        query, key, value, causal, mask = block
        width = value.size(-1)
        gradient, value, output = (_widened(x, key) for x in (gradient, value, output))
        tensors = (gradient, query, key, value, output, lse)
        found = self._fused_backward(kind, tensors, causal, mask)
        return found[0], found[1], found[2][..., :width]

    def _fused_backward(
        self, kind: str, tensors: tuple[Tensor, ...], causal: bool, mask: Tensor | None
    ) -> Gradients:
        gradient, query, key, value, output, lse = tensors
        found: Gradients
        if kind == "cpu":
            found = cpu_attention_backward(
                *tensors, 0.0, causal, attn_mask=mask, scale=self.scaling
            )
            return found
        if kind == "flash":
            sizes = (query.size(2), key.size(2))
            seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # no dropout
            found = cuda_flash_backward(
                *tensors, None, None, *sizes, 0.0, causal, seed, seed[0], scale=self.scaling
            )
            return found
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        whole_key, whole_value = _repeated(query, key), _repeated(query, value)
        by_head = cuda_masked_backward(
            gradient,
            query,
            whole_key,
            whole_value,
            _for_every_head(query, mask),
            output,
            lse,
            seed,
            seed,
            0.0,
            (True, True, True, False),
            causal,
            scale=self.scaling,
        )
        return by_head[0], _summed(by_head[1], key), _summed(by_head[2], value)

    def _kind(self, block: Inputs) -> str:
        """Return the kernel that computes a block."""
        query, key = block.query, block.key
        if not self.fused or self.cap is not None:
            return "plain"
        if not query.is_cuda:
            return "cpu"
        aligned = query.size(-1) % 8 == 0 and query.size(-1) <= 256
        if aligned and block.mask is None and query.dtype in (torch.bfloat16, torch.float16):
            return "flash"
        # the kernel stores lse for 32 queries at a time and reads masks in vectors
        whole = query.size(2) % 32 == 0 and key.size(2) % 32 == 0
        return "masked" if aligned and whole and query.dtype != torch.float64 else "plain"

    def _plain_forward(self, block: Inputs) -> tuple[Tensor, Tensor]:
        value, found = _repeated(block.query, block.value), []
        for rows in _rows(block.query):
            scores = self._scores(block, rows)
            lse = scores.logsumexp(-1)
            weights = (scores - lse[..., None]).exp_().to(block.query.dtype)
            found.append((weights @ value, lse))
        outputs, sums = zip(*found, strict=True)
        return torch.cat(outputs, 2), torch.cat(sums, 2)

    def _plain_backward(
        self, block: Inputs, gradient: Tensor, output: Tensor, lse: Tensor
    ) -> Gradients:
        query, key, value = block.query, block.key, block.value
        of_query = torch.empty_like(query)
        whole_key, whole_value = _repeated(query, key), _repeated(query, value)
        of_key, of_value = torch.zeros_like(whole_key), torch.zeros_like(whole_value)
        for rows in _rows(query):
            scores = self._scores(block, rows)
            weights = (scores - lse[:, :, rows, None]).exp_()
            wanted = gradient[:, :, rows]
            of_weights = (wanted @ whole_value.transpose(2, 3)).to(weights.dtype)
            mean = (wanted * output[:, :, rows]).sum(-1, keepdim=True, dtype=weights.dtype)
            of_scores = weights * (of_weights - mean) * self.scaling
            if self.cap is not None:  # masked scores have weight zero
                of_scores *= (1.0 - (scores / self.cap).square()).clamp_(min=0.0)
            of_scores = of_scores.to(query.dtype)
            of_query[:, :, rows] = of_scores @ whole_key
            of_key += of_scores.transpose(2, 3) @ query[:, :, rows]
            of_value += weights.to(gradient.dtype).transpose(2, 3) @ wanted
        return of_query, _summed(of_key, key), _summed(of_value, value)

    def _scores(self, block: Inputs, rows: slice) -> Tensor:
        """Return the scores of some of the queries, in fp32 at least."""
        query, key, _, causal, mask = block
        exact = torch.promote_types(query.dtype, torch.float32)
        products = query[:, :, rows] @ _repeated(query, key).transpose(2, 3)
        scores = products.to(exact) * self.scaling
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        if mask is not None:
            scores = scores + mask[:, :, rows]
        if causal:
            shape = (scores.size(2), key.size(2))
            ones = torch.ones(shape, dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill_(ones.triu(1 + rows.start), float("-inf"))
        return scores


class RunningSoftmax:
    """Running output and log-sum-exp of queries over the key blocks added so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        exact = torch.promote_types(query.dtype, torch.float32)
        batch, heads, tokens = query.shape[:3]
        # in the layout of the hidden state, so that the output needs no copy
        shape = (batch, tokens, heads, value.size(-1))
        self.output = torch.zeros(shape, dtype=exact, device=query.device).transpose(1, 2)
        self.lse = torch.full(
            (batch, heads, tokens), float("-inf"), dtype=exact, device=query.device
        )

    def add(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        """Add a block of the queries ``rows``."""
        total, old = self.output[:, :, rows], self.lse[:, :, rows]
        new = torch.logaddexp(old, lse)
        total.mul_((old - new).exp_()[..., None])
        total.addcmul_(output.to(total.dtype), (lse - new).exp_()[..., None])
        old.copy_(new)

    def add_sinks(self, sinks: Tensor) -> None:
        """Include one sink score per head (h,) in every softmax."""
        new = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.output.mul_((self.lse - new).exp_()[..., None])
        self.lse = new


def sink_gradients(sinks: Tensor, lse: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the sinks (h,): minus their weight times the output's projection."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    taken = (gradient * output).sum(-1, dtype=lse.dtype)
    return -(weights * taken).sum((0, 2)).to(sinks.dtype)


def _rows(query: Tensor) -> list[slice]:
    return [slice(start, start + QUERY_BLOCK) for start in range(0, query.size(2), QUERY_BLOCK)]


def _repeated(query: Tensor, x: Tensor) -> Tensor:
    """Repeat key or value heads so that every query head has its own."""
    times = query.size(1) // x.size(1)
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _widened(x: Tensor, key: Tensor) -> Tensor:
    """Zero-pad heads to the width of the keys, as the kernels require.

    Latent values are narrower.
    """
    missing = key.size(-1) - x.size(-1)
    return F.pad(x, (0, missing)) if missing else x


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum the gradients of the copies of every key or value head."""
    if gradient.size(1) == x.size(1):
        return gradient
    return gradient.unflatten(1, (x.size(1), -1)).sum(2)


def _for_every_head(query: Tensor, mask: Tensor | None) -> Any:
    if mask is None:
        return None
    return mask.expand(query.size(0), query.size(1), *mask.shape[-2:])
