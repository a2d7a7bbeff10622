"""Weight gradients computed later than input gradients (Qi et al., arXiv:2401.10241, sec. 2).

The matmul functions of ``tensor_parallel`` ask for ``store`` while they run backward. Where one is
open they leave the matmul that gives a weight's gradient there, with its two operands, and give
only the gradient of their input, which the stage before waits for. Everything else (norms, biases,
the output projection, whose operands are the largest tensors of all) is differentiated at once.
No operation is done twice: recomputed inputs stay until their matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Due(NamedTuple):
    """Gradients of some weights, still to be computed."""

    weights: tuple[Tensor, ...]  # parameters, or views of them
    compute: Callable[[], list[Tensor]]


Store = list[Due]
_open: list[Store] = []  # autograd may run backward in a thread of its own: no context variable


@contextmanager
def deferred() -> Iterator[Store]:
    """Collect the weight gradients of the backward pass that runs inside."""
    store: Store = []
    _open.append(store)
    try:
        yield store
    finally:
        _open.pop()


def store() -> Store | None:
    """Return where weight gradients are to be left, or None where they are due at once."""
    return _open[-1] if _open else None


def leaf_of(weight: Tensor) -> Tensor:
    """Return the parameter that a weight is, or is a view of."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    if node is None:  # saved through hooks it is another tensor, with the parameter's accumulator
        node = get_gradient_edge(weight).node
    return node.variable


def by_parameter(due: Store) -> dict[int, Store]:
    """Sort what is due by the parameter whose gradient it is (its ``id``), in the same order."""
    found: dict[int, Store] = {}
    for entry in due:
        found.setdefault(id(leaf_of(entry.weights[0])), []).append(entry)
    return found


def compute(due: Store) -> None:
    """Compute gradients and add them to those of the parameters; operands are freed on the way."""
    while due:
        weights, compute_gradients = due.pop(0)
        with torch.no_grad():
            gradients = compute_gradients()
        torch.autograd.backward(weights, gradients)
