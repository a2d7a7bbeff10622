"""Modules whose results are freed and computed again in the backward pass.

``checkpointed`` frees the tensors inside of a module; its results stay as inputs of later matmuls.
Here the results are freed too (Megatron Core's "output-discarding checkpointing"): the module runs
under ``torch.utils.checkpoint`` with its results among its saved tensors, and operators inside
``Discarded.readers`` save a reference in place of a result. The first reference that the backward
pass reads computes the module again, once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from executor.ops.recompute import checkpointed


class _View(NamedTuple):
    """A view of one of the results."""

    result: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Remember(Function):  # type: ignore[misc]
    """Return the results of a module, which are saved as inner tensors of its checkpoint."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*results)
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class Discarded:
    """The results of ``function``; ``random``: the random state is restored too (dropout)."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], *arguments: Any, random: bool
    ) -> None:
        def remembered(*arguments: Any) -> Any:
            return _Remember.apply(*function(*arguments))

        results: Any = checkpointed(remembered, *arguments, random=random)
        self.results: tuple[Tensor, ...] = results
        self._node = results[0].grad_fn
        self._references = 0  # saved and not read yet
        self._again: tuple[Tensor, ...] | None = None

    @contextmanager
    def readers(self) -> Iterator[tuple[Tensor, ...]]:
        """Run operators that read the results; afterwards no operator may.

        Results that need no gradient (of a frozen module that reads the embedding) are kept.
        """
        if self._node is None:
            yield self.results
            return
        storages = {
            result.untyped_storage()._cdata: number for number, result in enumerate(self.results)
        }
        types = [result.dtype for result in self.results]

        def save(tensor: Tensor) -> Any:
            number = storages.get(tensor.untyped_storage()._cdata)
            if number is None or tensor.dtype != types[number]:
                return tensor
            self._references += 1
            shape = tuple(tensor.size()), tensor.stride(), tensor.storage_offset()
            return _View(number, *shape)

        def read(saved: Any) -> Tensor:
            return self._view(saved) if isinstance(saved, _View) else saved

        try:
            with saved_tensors_hooks(save, read):
                yield self.results
        finally:
            storages.clear()
            self.results = ()

    def _view(self, view: _View) -> Tensor:
        if self._again is None:
            self._again = self._node.saved_tensors
        tensor = self._again[view.result].as_strided(view.size, view.stride, view.offset)
        self._references -= 1
        if not self._references:
            self._again = None
        return tensor
