"""Cross-entropy over a vocabulary that may be cut over the tensor-parallel ranks.

No rank ever sees whole logits: the ranks exchange three numbers a token (Megatron's vocab-parallel
loss: Shoeybi et al., arXiv:1909.08053, sec. 3). Only the logits in their own precision and one
log-sum-exp a token are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from executor.data.batch import IGNORED
from executor.tensor_parallel import TensorAxis


def summed_cross_entropy(axis: TensorAxis, logits: Tensor, labels: Tensor, start: int) -> Tensor:
    """Return the summed loss of tokens; logits (tokens, V) are the columns from ``start`` on.

    forward   all_reduce (max) of one number a token, all_reduce of two   (fp32; fp64 for fp64)
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
        here = (column >= 0) & (column < logits.size(-1)) & counts.unsqueeze(-1)
        column = column.masked_fill(~here, 0)
        peak = logits.amax(-1, keepdim=True).to(exact)
        if axis.size > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=axis.group)
        total = torch.sub(logits, peak).exp_().sum(-1, keepdim=True)
        target = logits.gather(-1, column).to(exact).masked_fill(~here, 0.0)
        both = torch.cat([total, target], -1)
        if axis.size > 1:
            dist.all_reduce(both, group=axis.group)
        log_sum = peak + both[:, :1].log()
        ctx.save_for_backward(logits, log_sum, column, here, counts)
        return (log_sum - both[:, 1:]).squeeze(-1).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits, log_sum, column, here, counts = ctx.saved_tensors
        probabilities = torch.sub(logits, log_sum).exp_()
        probabilities.scatter_add_(-1, column, -here.to(probabilities.dtype))
        probabilities.mul_(gradient * counts.unsqueeze(-1))
        return None, probabilities.to(logits.dtype), None, None
