"""Operators that torch runs differently on a GPU than on a CPU, for traces on fake CPU tensors.

On a GPU, dropout keeps a mask of one byte per element, fused attention applies dropout inside its
kernel, and autocast computes more functions in fp32.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hardware_profiles.fields import names_in

# functions that torch.autocast("cuda") computes in fp32 and torch.autocast("cpu") does not (torch
# 2.13, docs/source/amp.md, "CUDA Ops that can autocast to float32")
IN_FP32: Final = frozenset(
    names_in("""
        cross_entropy exp group_norm kl_div l1_loss layer_norm log log_softmax mse_loss nll_loss
        norm pow prod reciprocal rsqrt smooth_l1_loss softmax softmin softplus sum cumsum
    """)
)


class CudaRules(TorchFunctionMode):  # type: ignore[misc]
    """Makes functions call the operators that they call on a GPU, while it is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call one function of torch."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.nn.functional.dropout:
            return _dropout(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            elif len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
        elif name in IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return result


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
