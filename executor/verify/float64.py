"""Computation in float64 also where modules cast to float32 internally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WITH_DTYPE: Final = (Tensor.to, Tensor.type, Tensor.softmax, torch.softmax, F.softmax)


class KeepFloat64(TorchFunctionMode):  # type: ignore[misc]
    """Skips casts of float64 tensors to float32.

    It applies to one thread only: on a GPU it does not reach the backward pass and its
    recomputation.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, with float64 instead of float32."""
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            if func in _WITH_DTYPE:
                args = tuple(_wide(value) for value in args)
                kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
