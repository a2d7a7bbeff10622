"""Storage lifetimes in a module's forward and backward pass on fake tensors, by operator.

Records tensor storages (as ``executor.counters.live_tensors`` does for a real step), the block of
the module that is running, and the FLOP and bytes of every operator. Parameters and buffers are not
counted. Gradients of parameters are marked, because their lifetime depends on the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode

from executor.compat import in_backward
from executor.counters.collectives_and_flops import FLOP_FORMULAS, tensor_bytes
from executor.trace.module_blocks import tensors

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OUTSIDE: Final = ""  # outside all blocks


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: its block, FLOP, and bytes read and written (none for views)."""

    name: str
    phase: str
    block: str
    flops: int
    bytes: int


@dataclass(slots=True)
class TracedStorage:
    """A storage, live from the end of operator ``created`` to the end of ``freed``."""

    bytes: int
    created: int
    number: int  # index in order of creation
    floating: bool  # whether its dtype can have a gradient
    is_input: bool = False  # an argument of the module
    freed: int | None = None
    gradient_of: str | None = None  # the parameter's block, if it is a gradient


class Timeline(TorchDispatchMode):  # type: ignore[misc]
    """Records one forward and one backward pass while it is active."""

    def __init__(self, module: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.storages: list[TracedStorage] = []
        # of the forward pass: (operator, storage or parameter that it reads or writes)
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.uses: list[tuple[int, nn.Parameter]] = []
        self._parts = parts
        self._module = module
        self._block = OUTSIDE
        self._done = False
        self._live: dict[int, tuple[Any, TracedStorage | None]] = {}  # None: a parameter or buffer
        self._hooks: list[Any] = []
        self.parameters = list(module.parameters())
        self._parameters: dict[int, nn.Parameter] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = (weakref.ref(storage), None)
            if isinstance(tensor, nn.Parameter):
                self._parameters[storage._cdata] = tensor

    def add_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Count tensors that exist before the first operator."""
        for tensor in inputs:
            entry = self._see(tensor, 0)
            if entry is not None:
                entry.is_input = True

    def __enter__(self) -> Timeline:
        for name, part in self._parts.items():
            before = part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            after = part.register_forward_hook(partial(self._leave, name))
            self._hooks += [before, after]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._done = True
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # device queries of fake tensors
            return result
        before = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        fresh = [t for t in tensors(result) if t.untyped_storage()._cdata not in before]
        works = bool(fresh) or func._schema.is_mutable
        moved = tensor_bytes((args, kwargs, fresh)) if works else 0
        packet = func._overloadpacket
        flops = 0
        if packet in FLOP_FORMULAS:
            flops = int(FLOP_FORMULAS[packet](*args, **kwargs, out_val=result))
        phase = BACKWARD if in_backward() else FORWARD
        if phase == FORWARD:
            self._note(before, {t.untyped_storage()._cdata for t in tensors(result)}, works)
        self.operators.append(Operator(str(packet), phase, self._block, flops, moved))
        for tensor in tensors(result):
            self._see(tensor, len(self.operators) - 1)
        return result

    def _note(self, read: set[int], made: set[int], works: bool) -> None:
        """Record the storages that an operator reads, and those that it modifies."""
        tick = len(self.operators)
        for key in read:
            entry = self._live.get(key, (None, None))[1]
            if entry is not None:
                self.reads.append((tick, entry.number))
                if works and key in made:
                    self.writes.append((tick, entry.number))
            elif key in self._parameters:
                self.uses.append((tick, self._parameters[key]))

    def name_gradients(self, block_of: Mapping[nn.Parameter, str]) -> None:
        """Mark the storages that are gradients, after the backward pass."""
        for parameter, block in block_of.items():
            if parameter.grad is not None:
                key = parameter.grad.untyped_storage()._cdata
                entry = self._live.get(key, (None, None))[1]
                if entry is not None:
                    entry.gradient_of = block

    def _see(self, tensor: Tensor, created: int) -> TracedStorage | None:
        """Start tracking a storage and return its entry; None if it is tracked already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None and known[0]() is storage:
            return None
        entry = TracedStorage(
            storage.nbytes(), created, len(self.storages), tensor.is_floating_point()
        )
        self.storages.append(entry)
        self._live[key] = (weakref.ref(storage, partial(self._freed, key, entry)), entry)
        return entry

    def _freed(self, key: int, entry: TracedStorage, _: Any) -> None:
        if not self._done:
            entry.freed = len(self.operators) - 1
        if self._live.get(key, (None, None))[1] is entry:
            del self._live[key]

    def _enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        self._block = name
        needing = [t for t in tensors((args, kwargs)) if t.requires_grad]
        if needing and torch.is_grad_enabled():
            register_multi_grad_hook(needing, partial(self._end_backward, name))

    def _leave(self, name: str, part: nn.Module, args: Any, output: Any) -> None:
        self._block = OUTSIDE
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, name))

    def _begin_backward(self, name: str, _: Tensor) -> None:
        self._block = name

    def _end_backward(self, name: str, _: Any) -> None:
        if self._block == name:
            self._block = OUTSIDE
