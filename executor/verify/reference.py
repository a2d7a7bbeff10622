"""What ranks are compared with: the full Hugging Face module, computed in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cost_models.plan_file import PlanFile
from executor.compat import causal_lm
from executor.dtypes import master_dtype
from executor.model.parameter_layout import ParameterLayout, parameter_layouts, random_tensor
from executor.model.stage import add_adapter
from executor.ops.nf4 import pack
from executor.parallel.tensor_parallel import UNSHARDED, TensorAxis

_WITH_DTYPE: Final = (Tensor.to, Tensor.type, Tensor.softmax, torch.softmax, F.softmax)


def reference_model(file: PlanFile, seed: int) -> nn.Module:
    """Return the full Hugging Face module on the CPU with the same initial values."""
    model = causal_lm(
        file.model.config,
        device="cpu",
        dtype=master_dtype(file.workload),
        attention_kernel=file.workload.attention_kernel,
    )
    table = parameter_layouts(file.model, UNSHARDED)
    dtype = master_dtype(file.workload)
    for name, layout in table.items():
        if layout.is_adapter:
            path, small, _ = name.rsplit(".", 2)
            linear = model.get_submodule(path)
            add_adapter(linear, small, layout, file.workload, dtype=dtype)
            linear.forward = partial(_adapted_forward, linear)
    with torch.no_grad():
        for name, layout in table.items():
            model.get_parameter(name).requires_grad_(not layout.frozen)
            model.get_parameter(name).copy_(_start(file, layout, seed))
    return model


def _start(file: PlanFile, layout: ParameterLayout, seed: int) -> Tensor:
    """Return a whole tensor's initial values.

    For a 4-bit tensor, those unpacked from its slices.
    """
    if not layout.quantised:
        return random_tensor(layout, seed, layout.ranges(UNSHARDED))
    full = torch.empty(layout.shape, dtype=master_dtype(file.workload))
    for rank in range(file.plan.tensor_parallel):
        pieces = layout.ranges(TensorAxis(size=file.plan.tensor_parallel, rank=rank))
        values = random_tensor(layout, seed, pieces)
        slice_ = pack(values.t() if layout.transposed else values).matrix(full.dtype)
        slice_ = slice_.t() if layout.transposed else slice_
        dim = layout.shard_dim or 0
        places = torch.cat([torch.arange(start, stop) for start, stop in pieces[dim]])
        full.index_copy_(dim, places, slice_)
    return full


def _adapted_forward(linear: Any, x: Tensor) -> Tensor:
    """Compute an adapted matrix of the reference from its definition."""
    inner = F.linear(x, linear.lora_A.weight)
    return type(linear).forward(linear, x) + linear.lora_scale * F.linear(
        inner, linear.lora_B.weight
    )


class KeepFloat64(TorchFunctionMode):  # type: ignore[misc]
    """Skips casts of float64 tensors to float32, which some modules do internally.

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
