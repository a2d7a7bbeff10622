"""Counters of a step's collectives (bytes) and floating-point operations.

Both counters intercept operators below autograd, without hooks on modules, so that several forward
passes, micro-batches and pipeline schedules may run inside one ``with`` block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

OTHER: Final = "other"  # the axis of an unnamed group

# Operator of c10d or _c10d_functional -> kind, and the argument whose bytes count (RESULT: the
# operator's result). Receives and barriers are not listed: a message counts once, at the sender.
RESULT: Final = -1
COLLECTIVES: Final[dict[str, tuple[str, int]]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", RESULT),
    "all_gather_into_tensor_out": ("all_gather", RESULT),
    "all_gather_into_tensor_coalesced": ("all_gather", RESULT),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "isend": ("send", 0),
}
NAMESPACES: Final = ("c10d", "_c10d_functional")


def _is_wrapped(types: Any) -> bool:
    """Return whether an operator works on wrapped tensors: its local operators follow."""
    return any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in an operator's arguments or result: nested tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def tensor_bytes(values: Any) -> int:
    """Return the bytes of all tensors in a nested value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(values))


class OperatorMode(TorchDispatchMode):  # type: ignore[misc]
    """Runs every operator by ``run``; torch calls it directly, without a wrapper for torch.compile.

    An operator on wrapped tensors is left to torch: its local operators follow.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        return NotImplemented if _is_wrapped(types) else self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        return func(*args, **kwargs)


class CommunicationCounter(OperatorMode):
    """Counts collectives and bytes by (axis, kind).

    ``groups`` names the process groups, for example ``{"data": group, "tensor": group}``. A group
    is recognised by its own name first, then by its set of ranks (where two axes span the same
    ranks, the first in ``groups`` wins); an unknown one counts as "other". Groups of one rank are
    omitted.

    Bytes are those of the whole tensor: the result of an all_gather, the input of a reduce_scatter
    or an all_to_all, the tensor of an all_reduce, a broadcast or a send.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self._axis_of_name: dict[str, str] = {}
        self._axis_of_ranks: dict[frozenset[int], str] = {}
        for axis, group in groups.items():
            self._axis_of_name.setdefault(group.group_name, axis)
            ranks = frozenset(dist.get_process_group_ranks(group))
            self._axis_of_ranks.setdefault(ranks, axis)
        self._size: dict[str, int] = {}
        self.count: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def records(self) -> list[dict[str, Any]]:
        """Return ``{axis, kind, count, bytes}`` of every axis and kind, sorted."""
        return [
            {"axis": axis, "kind": kind, "count": self.count[axis, kind], "bytes": total}
            for (axis, kind), total in sorted(self.bytes.items())
        ]

    def total_bytes(self) -> int:
        """Return the bytes of all axes and kinds."""
        return sum(self.bytes.values())

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and count it if it is a collective."""
        result = func(*args, **kwargs)
        name = func._opname
        if func.namespace in NAMESPACES and name in COLLECTIVES:
            kind, position = COLLECTIVES[name]
            axis = self._axis(_process_group(func, args))
            if axis is not None:
                self.count[axis, kind] += 1
                self.bytes[axis, kind] += tensor_bytes(
                    result if position == RESULT else args[position]
                )
        return result

    def _axis(self, group: dist.ProcessGroup) -> str | None:
        name = group.group_name
        if name not in self._size:
            self._size[name] = group.size()
            ranks = frozenset(dist.get_process_group_ranks(group))
            self._axis_of_name.setdefault(name, self._axis_of_ranks.get(ranks, OTHER))
        return None if self._size[name] == 1 else self._axis_of_name[name]


def _process_group(func: Any, args: Any) -> dist.ProcessGroup:
    """Return the process group of a collective: a c10d object, or a name."""
    names = [argument.name for argument in func._schema.arguments]
    position = names.index("process_group" if "process_group" in names else "group_name")
    group = args[position]
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _attention_forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOP of the scores and their product with the values.

    Keys may have fewer heads than queries.
    """
    scores = 2 * query[..., 0].numel() * key.shape[-2]
    return int(scores * (query.shape[-1] + value.shape[-1]))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOP of recomputed scores and of the gradients of scores, values, queries and keys."""
    scores = 2 * query[..., 0].numel() * key.shape[-2]
    return int(scores * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _batched_matmul(first: Any, second: Any, *_: Any, **__: Any) -> int:
    """FLOP of a batched matmul.

    None for outer products, which some versions use for rotary angles.
    """
    depth = first.shape[-1]
    return 0 if depth == 1 else int(2 * first.numel() * second.shape[-1])


def _convolution_backward(
    gradient: Any, inputs: Any, weight: Any, *arguments: Any, **__: Any
) -> int:
    """FLOP of the gradients of input and weight, each as many as the forward pass."""
    transposed, needed = arguments[4], arguments[7]
    positions = inputs.numel() if transposed else gradient.numel()
    forward = 2 * positions * (weight.numel() // weight.shape[0])
    return int(forward * (needed[0] + needed[1]))


_ATEN = torch.ops.aten
_ATTENTION: Final = tuple(
    f"_scaled_dot_product_{kernel}"
    for kernel in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
)
# Torch's formula of a convolution's backward pass treats all groups as one, and its registry lacks
# addmm_, the CPU's flash attention, and before 2.12 keys with fewer heads than queries. Attention
# is counted as torch counts the CUDA kernel: all S x S scores (a causal mask halves nothing), and
# the backward pass computes the scores again (5 matmuls, eager attention 4).
FLOP_FORMULAS: Final[dict[Any, Any]] = {
    **flop_registry,
    **{getattr(_ATEN, name): _attention_forward for name in _ATTENTION},
    **{getattr(_ATEN, f"{name}_backward"): _attention_backward for name in _ATTENTION},
    _ATEN.bmm: _batched_matmul,
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    _ATEN.convolution_backward: _convolution_backward,
}


class FlopCounter(OperatorMode):
    """Counts the floating-point operations of matmuls and attention on this rank, by operator.

    The formulas are torch's own; unlike ``FlopCounterMode`` it does not track modules, so that any
    schedule may run inside. The shadow operators with which DTensor computes global shapes (on fake
    tensors) are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()
        self._fake_mode: Any = None

    @property
    def total(self) -> int:
        """Operations of all operators."""
        return sum(self.by_operator.values())

    def __enter__(self) -> FlopCounter:
        self._fake_mode = active_fake_mode()
        super().__enter__()
        return self

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and add its operations."""
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in FLOP_FORMULAS and active_fake_mode() is self._fake_mode:
            operations = FLOP_FORMULAS[packet](*args, **kwargs, out_val=result)
            self.by_operator[packet._qualified_op_name.removeprefix("aten::")] += operations
        return result
