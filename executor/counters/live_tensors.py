"""Memory tracker of a real step: the lifetimes of tensors, and the categories at the peak.

The tracker records when every tensor storage is created, resized and freed; its category follows
from its lifetime (``executor.counters.memory_peak``). No hooks in modules, FSDP or schedules.

Not visible: temporary memory inside one kernel (but for softmax's backward pass), allocator slack,
the libraries' own buffers (of gloo's, the copy in which a reduce_scatter sums is visible and left
out). On a GPU the allocator's own counters are reported as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from executor.counters.allocations import Allocation, Event, largest_by_event
from executor.counters.allocator_replay import AllocatorEvent, events_of
from executor.counters.collectives_and_flops import NAMESPACES, OperatorMode, tensors_in
from executor.counters.memory_peak import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    MemoryPeak,
    StorageLifetime,
    peak_of,
)

# operators with which gloo extracts a rank's part after summing whole tensors in a copy: nccl has
# no such copy
_OF_GLOO: Final = ("aten::split", "aten::copy_")
# on CUDA gradient times output lie in a tensor of their own (aten/native/cuda/SoftMax.cu)
_SOFTMAX_BACKWARD: Final = "aten::_softmax_backward_data"
RESIZED: Final = "resized"  # in place of an operator: a storage that was freed grows again
# (a new tensor, the operator that created it, that operator's inputs) -> its category
Hint = Callable[[torch.Tensor, str, Sequence[Any]], str | None]


def storages(
    tensor: torch.Tensor, device: str | None = None, *, fake: bool = False
) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of a tensor's local data on a device (None: any); none for sparse tensors.

    ``fake``: of fake tensors only.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.elem
    kind = tensor.device.type
    there = kind != "meta" if device is None else kind == device
    if there and isinstance(tensor, FakeTensor) == fake and tensor.layout is torch.strided:
        yield tensor.untyped_storage()


class MemoryTracker(OperatorMode):
    """Tracks the bytes of live tensors inside the context; ``result()`` returns the peak.

    ``parameters`` and ``optimizers``: existing tensors, which count from the start. Any other
    tensor counts from the operator that created it; one first seen as an input is assumed to have
    existed from the start. Only storages on ``device`` count. Enter it around whole steps: phases
    follow from autograd and from the optimizers' steps.

    Inside a FakeTensorMode it tracks that mode's tensors, as if they had memory. ``hint`` gives the
    category of a new tensor, where its lifetime does not make it a weight or a gradient. Callers
    may set ``place`` to the current part of the model; ``muted`` operators are ignored.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor] = (),
        optimizers: Iterable[Optimizer] = (),
        *,
        device: str = "cpu",
        hint: Hint | None = None,
    ) -> None:
        super().__init__()
        self.place, self.muted = "", False
        self._skipped: tuple[str, ...] = ()  # following operators that do not count
        self._device = torch.device(device).type
        self._fake, self._hint = active_fake_mode() is not None, hint
        self._live: dict[int, StorageLifetime] = {}
        self._lives: list[StorageLifetime] = []
        self._phases: list[int] = [FORWARD]  # one per tick: an operator or a growing storage
        self._places, self._operators = [""], [""]  # one per tick, too
        self._in_optimizer = False
        self._done = False
        self._hooks: list[Any] = []
        self._resize = torch.UntypedStorage.resize_
        self.tag("weights", parameters)
        for optimizer in optimizers:
            self._tag_optimizer(optimizer)

    def tag(self, category: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Set the category of tensors; those not seen so far count from the start."""
        for tensor in tensors:
            if tensor is None:
                continue
            for storage in self._storages(tensor):
                life = self._find(storage) or self._add(storage, 0, category)
                life.category = category
                life.frozen = category == "weights" and not tensor.requires_grad

    def result(self) -> MemoryPeak:
        """Return the peak so far."""
        peak = peak_of(self._lives, self._phases, self._places)
        if self._device != "cuda" or self._fake:
            return peak
        return replace(
            peak,
            allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.max_memory_reserved(),
        )

    def events(self) -> list[AllocatorEvent]:
        """Return the requests and releases of storages so far, in order, with their streams."""
        return events_of(self._lives)

    def by_event(self, event: Event) -> dict[str, list[Allocation]]:
        """Return the allocations at the largest tick of every event so far."""
        lives, phases = self._lives, self._phases
        return largest_by_event(lives, phases, self._places, self._operators, event)

    def __enter__(self) -> MemoryTracker:
        if self._device == "cuda" and not self._fake:
            torch.cuda.reset_peak_memory_stats()
        self._hooks = [
            register_optimizer_step_pre_hook(partial(self._optimizer_step, True)),
            register_optimizer_step_post_hook(partial(self._optimizer_step, False)),
        ]
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            tracker._resize(storage, size)
            tracker._resized(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._done = True
        torch.UntypedStorage.resize_ = self._resize
        for hook in self._hooks:
            hook.remove()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and record the storages that it created."""
        name = func._schema.name
        inside = self._softmax_product(args) if name == _SOFTMAX_BACKWARD else None  # until the end
        result = func(*args, **kwargs)
        if self.muted or name in self._skipped:
            self._skipped = self._skipped[1:]
            return result
        self._skipped = _OF_GLOO if name == "c10d::_reduce_scatter_base_" else ()
        self._tick(name)
        collective = name if func.namespace in NAMESPACES else ""
        for life, leaf in self._see(result, len(self._phases) - 1, None, collective):
            life.hint = self._hint(leaf, name, args) if self._hint is not None else None
        self._see((args, kwargs), 0, "other", collective)
        del inside
        return result

    def _softmax_product(self, args: Sequence[Any]) -> torch.Tensor | None:
        """Make the tensor that CUDA's kernel makes inside, where that kernel is rehearsed."""
        if self.muted or (self._device == "cuda" and not self._fake):
            return None
        product = torch.empty_like(args[0])
        self._tick(_SOFTMAX_BACKWARD)
        self._see(product, len(self._phases) - 1, None, "")
        return product

    def _see(
        self, values: Any, created: int, category: str | None, collective: str
    ) -> list[tuple[StorageLifetime, torch.Tensor]]:
        """Record the storages of tensors; return those not seen before, with their tensors."""
        new = []
        for leaf in tensors_in(values):
            for storage in self._storages(leaf):
                life = self._find(storage)
                if life is None:
                    life = self._add(storage, created, category)
                    new.append((life, leaf))
                life.collective = life.collective or collective
        return new

    def _storages(self, tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
        return storages(tensor, self._device, fake=self._fake)

    def _tick(self, operator: str) -> None:
        self._phases.append(self._phase())
        self._places.append(self.place)
        self._operators.append(operator)

    def _find(self, storage: torch.UntypedStorage) -> StorageLifetime | None:
        life = self._live.get(storage._cdata)
        return life if life is not None and life.storage() is storage else None

    def _add(
        self, storage: torch.UntypedStorage, created: int, category: str | None
    ) -> StorageLifetime:
        key = storage._cdata
        life = StorageLifetime(storage.nbytes(), created, self._phases[created], category)
        life.stream = id(torch.cpu.current_stream())
        life.storage = weakref.ref(storage, partial(self._freed, key, life))
        self._live[key] = life
        self._lives.append(life)
        return life

    def _freed(self, key: int, life: StorageLifetime, _: Any) -> None:
        if not self._done:
            life.freed = len(self._phases) - 1
        if self._live.get(key) is life:
            del self._live[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        life = self._find(storage)
        if life is None and storage.device.type != ("meta" if self._fake else self._device):
            return
        if life is not None and life.bytes == storage.nbytes():
            return
        category = "buffers" if life is None or life.category is None else life.category
        if life is not None:
            life.freed = len(self._phases) - 1
            life.storage = None
        self._tick(RESIZED)
        self._add(storage, len(self._phases) - 1, category)

    def _phase(self) -> int:
        if self._in_optimizer:
            return OPTIMIZER
        return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD

    def _optimizer_step(self, begins: bool, optimizer: Optimizer, *_: Any) -> None:
        self._in_optimizer = begins
        self._tag_optimizer(optimizer)

    def _tag_optimizer(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.tag("weights", parameters)
        self.tag("gradients", (p.grad for p in parameters))
        states = tree_leaves([optimizer.state[p] for p in parameters if p in optimizer.state])
        self.tag("optimizer", (leaf for leaf in states if isinstance(leaf, torch.Tensor)))
