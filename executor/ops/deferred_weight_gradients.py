"""Weight gradients computed later than input gradients (Qi et al., arXiv:2401.10241, sec. 2).

The matmul functions of ``tensor_parallel`` call ``deferral_queue`` in their backward pass. Inside
``deferred`` they queue the matmul of a weight's gradient with its two operands and return only the
gradient of their input, which the previous stage waits for. Everything else (norms, biases, the
output projection, whose operands are the largest tensors of all) is differentiated at once. No
operation is done twice: recomputed inputs stay until their matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class DeferredGradient(NamedTuple):
    """Gradients of some weights, still to be computed."""

    weights: tuple[Tensor, ...]  # parameters, or views of them
    compute: Callable[[], list[Tensor]]


DeferredGradients = list[DeferredGradient]
_open: list[
    DeferredGradients
] = []  # no context variable: autograd may run backward in another thread


@contextmanager
def deferred() -> Iterator[DeferredGradients]:
    """Collect the weight gradients of the backward pass that runs inside."""
    queue: DeferredGradients = []
    _open.append(queue)
    try:
        yield queue
    finally:
        _open.pop()


def deferral_queue() -> DeferredGradients | None:
    """Return the queue for deferred weight gradients, or None where they are computed at once."""
    return _open[-1] if _open else None


def parameter_of(weight: Tensor) -> Tensor:
    """Return the parameter behind a weight, which may be a view of it."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    if node is None:  # saved-tensor hooks return another tensor with the parameter's accumulator
        node = get_gradient_edge(weight).node
    return node.variable


def group_by_parameter(due: DeferredGradients) -> dict[int, DeferredGradients]:
    """Group deferred gradients by their parameter (its ``id``), in the same order."""
    found: dict[int, DeferredGradients] = {}
    for entry in due:
        found.setdefault(id(parameter_of(entry.weights[0])), []).append(entry)
    return found


def compute_deferred(due: DeferredGradients) -> None:
    """Compute deferred gradients, accumulate them in the parameters, and free operands in turn."""
    while due:
        weights, compute_gradients = due.pop(0)
        with torch.no_grad():
            gradients = compute_gradients()
        torch.autograd.backward(weights, gradients)
