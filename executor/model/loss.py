"""Cross-entropy over a vocabulary that may be sharded over the tensor-parallel ranks.

No rank ever holds whole logits: the ranks exchange three numbers per token (Megatron's
vocab-parallel loss: Shoeybi et al., arXiv:1909.08053, sec. 3). Only the logits in their own
precision and one number per token are saved for the backward pass; fp32 copies exist for a few
tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from executor.data.batch import IGNORED
from executor.parallel.tensor_parallel import TensorAxis

PIECE_BYTES = 2**26  # of fp32 logits: longer than an H200 takes to be given the next operator


def summed_cross_entropy(axis: TensorAxis, logits: Tensor, labels: Tensor, start: int) -> Tensor:
    """Return the summed loss of tokens; logits (tokens, V) are the columns from ``start`` on.

    forward   all_reduce (max) of one number per token, all_reduce of two   (fp32; fp64 for fp64)
    backward  none
    """
    loss: Tensor = _CrossEntropy.apply(axis, logits, labels, start)
    return loss


class _CrossEntropy(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, logits: Tensor, labels: Tensor, start: int) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        counts = labels != IGNORED
        column = (labels - start).unsqueeze(-1)
        is_local = (column >= 0) & (column < logits.size(-1)) & counts.unsqueeze(-1)
        column = column.masked_fill(~is_local, 0)
        pieces = logits.split(_tokens_of_a_piece(logits.size(-1), exact))
        log_sum = own = torch.cat([_log_sum(piece.to(exact)) for piece in pieces])
        target = logits.gather(-1, column).to(exact).masked_fill(~is_local, 0.0)
        if axis.size > 1:
            peak = own.clone()
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=axis.group)
            both = torch.cat([(own - peak).exp_(), target], -1)
            dist.all_reduce(both, group=axis.group)
            log_sum, target = peak + both[:, :1].log(), both[:, 1:]
        share = (own - log_sum).exp_()  # share of the probability in this rank's columns
        ctx.save_for_backward(logits, share, column, is_local, counts)
        return (log_sum - target).squeeze(-1).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits, share, column, is_local, counts = ctx.saved_tensors
        scale = gradient * counts.unsqueeze(-1)
        found = torch.empty_like(logits)
        whole = (found, logits, share * scale, column, -scale * is_local)
        tokens = _tokens_of_a_piece(logits.size(-1), share.dtype)
        for piece in zip(*(tensor.split(tokens) for tensor in whole), strict=True):
            _write_gradient(*piece)
        return None, found, None, None


def _log_sum(logits: Tensor) -> Tensor:
    """Return log sum exp of each row, in separate operators that a memory trace sees one by one."""
    peak = logits.amax(-1, keepdim=True)
    return (logits - peak).exp_().sum(-1, keepdim=True).log_().add_(peak)


def _write_gradient(
    found: Tensor, logits: Tensor, factor: Tensor, column: Tensor, at_target: Tensor
) -> None:
    """Write factor * softmax(logits) plus ``at_target`` at one column of each token."""
    if found.dtype == factor.dtype:
        exact = torch.softmax(logits, -1, out=found)
    else:
        exact = torch.softmax(logits, -1, dtype=factor.dtype)
    exact.mul_(factor).scatter_add_(-1, column, at_target)
    if exact is not found:
        found.copy_(exact)


def _tokens_of_a_piece(columns: int, exact: torch.dtype) -> int:
    """Return the number of tokens whose tensor of this many columns fills ``PIECE_BYTES``."""
    number_bytes: int = exact.itemsize
    return max(1, PIECE_BYTES // (columns * number_bytes))
