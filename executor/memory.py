"""Follows the memory of a real step: which tensors live when, and what they are at the peak.

The tracker writes down when every tensor storage is born, resized and freed. What a storage *is*
follows afterwards from its whole life: a tensor of the forward pass that outlives the start of a
backward pass is a saved activation, one of the backward pass that outlives it is a gradient, and
so on. Nothing hooks into modules, FSDP or pipeline schedules.

What it cannot see: temporary memory inside one kernel, allocator slack, the libraries' own buffers.
On a GPU the allocator's own counters are reported next to it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.measure import NAMESPACES, is_wrapped

FORWARD, BACKWARD, OPTIMIZER = range(3)
PHASES: Final = ("forward", "backward", "optimizer")
# weights, gradients, optimizer: kept between steps. activations: saved by the forward pass for the
# backward pass. buffers: gathered weights (storages that are freed and refilled), and what a
# collective reads or writes within one phase. temporary: anything else that is made and freed
# within one phase (recomputed activations too). other: what existed before and has no name.
CATEGORIES: Final = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "temporary",
    "other",
)


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Bytes of live tensors on one rank at the worst moment of a step."""

    peak_bytes: int
    phase: str  # in which the peak falls
    parts: dict[str, int]  # category -> bytes at the peak; they add up to peak_bytes
    phase_peaks: dict[str, int]  # phase -> its own peak
    end_bytes: int  # still alive when the step was over
    allocated_bytes: int | None = None  # torch.cuda.max_memory_allocated; None on a CPU
    reserved_bytes: int | None = None  # torch.cuda.max_memory_reserved; None on a CPU

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(slots=True)
class Life:
    """One storage at one size; alive from the end of operator ``born`` to that of ``died``."""

    bytes: int
    born: int
    phase: int
    category: str | None  # None: told by its life
    died: int | None = None
    communicated: bool = False
    storage: Any = None  # weak reference


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of a tensor's local data; fake and sparse tensors have none."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.elem
    real = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
    if real and tensor.layout is torch.strided:
        yield tensor.untyped_storage()


class MemoryTracker(TorchDispatchMode):  # type: ignore[misc]
    """Follows the bytes of live tensors while it is entered; ``result()`` tells the peak.

    ``parameters`` and ``optimizers`` name what exists before: their tensors count from the start.
    Any other tensor counts from the operator that made it; one that is first seen as an input is
    taken to have existed from the start. Only storages on ``device`` count. Enter it around whole
    steps: phases are told from autograd and from the optimizers' steps.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor] = (),
        optimizers: Iterable[Optimizer] = (),
        *,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self._device = torch.device(device).type
        self._live: dict[int, Life] = {}
        self._lives: list[Life] = []
        self._phases: list[int] = [FORWARD]  # one per tick: an operator or a growing storage
        self._in_optimizer = False
        self._done = False
        self._hooks: list[Any] = []
        self._resize = torch.UntypedStorage.resize_
        self.tag("weights", parameters)
        for optimizer in optimizers:
            self._tag_optimizer(optimizer)

    def tag(self, category: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Name the category of tensors; those not seen so far count from the start."""
        for tensor in tensors:
            for storage in () if tensor is None else storages(tensor):
                if (life := self._find(storage)) is None:
                    life = self._add(storage, 0, category)
                if life is not None:
                    life.category = category

    def result(self) -> MemoryPeak:
        """Return the peak so far."""
        peak = peak_of(self._lives, self._phases)
        if self._device != "cuda":
            return peak
        return MemoryPeak(
            **{
                **asdict(peak),
                "allocated_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
            }
        )

    def __enter__(self) -> MemoryTracker:
        if self._device == "cuda":
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and write down the storages that it made."""
        if is_wrapped(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._phases.append(self._phase())
        communicates = func.namespace in NAMESPACES
        self._see(result, len(self._phases) - 1, None, communicates)
        self._see((args, kwargs), 0, "other", communicates)
        return result

    def _see(self, values: Any, born: int, category: str | None, communicates: bool) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                for storage in storages(leaf):
                    life = self._find(storage) or self._add(storage, born, category)
                    if life is not None:
                        life.communicated |= communicates

    def _find(self, storage: torch.UntypedStorage) -> Life | None:
        life = self._live.get(storage._cdata)
        return life if life is not None and life.storage() is storage else None

    def _add(self, storage: torch.UntypedStorage, born: int, category: str | None) -> Life | None:
        if storage.device.type != self._device:
            return None
        key = storage._cdata
        life = Life(storage.nbytes(), born, self._phases[born], category)
        life.storage = weakref.ref(storage, partial(self._freed, key, life))
        self._live[key] = life
        self._lives.append(life)
        return life

    def _freed(self, key: int, life: Life, _: Any) -> None:
        if not self._done:
            life.died = len(self._phases) - 1
        if self._live.get(key) is life:
            del self._live[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        life = self._find(storage)
        if life is not None and life.bytes == storage.nbytes():
            return
        category = "buffers" if life is None or life.category is None else life.category
        if life is not None:
            life.died = len(self._phases) - 1
            life.storage = None
        self._phases.append(self._phase())
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


def peak_of(lives: Iterable[Life], phases: list[int]) -> MemoryPeak:
    """Return the peak over lives of storages; ``phases`` names the phase of every tick."""
    lives = list(lives)
    phase = _settle(phases)
    change = np.zeros(len(phase) + 1, dtype=np.int64)
    for life in lives:
        change[life.born] += life.bytes
        if life.died is not None:
            change[life.died + 1] -= life.bytes
    total = np.cumsum(change)[:-1]
    at = int(total.argmax())
    parts: Counter[str] = Counter()
    for life in lives:
        if life.bytes and life.born <= at and (life.died is None or at <= life.died):
            parts[_category(life, phase)] += life.bytes
    return MemoryPeak(
        peak_bytes=int(total[at]),
        phase=PHASES[phase[at]],
        parts={name: parts[name] for name in CATEGORIES if parts[name]},
        phase_peaks={
            name: int(total[phase == index].max())
            for index, name in enumerate(PHASES)
            if (phase == index).any()
        },
        end_bytes=sum(life.bytes for life in lives if life.died is None),
    )


def _settle(phases: list[int]) -> np.ndarray:
    """Count what lies between a backward pass and an optimizer (gradient norm) to the optimizer."""
    phase = np.array(phases)
    if BACKWARD not in phases or OPTIMIZER not in phases:
        return phase
    following = OPTIMIZER
    for tick in range(len(phase) - 1, phases.index(BACKWARD), -1):
        if phase[tick] == FORWARD and following == OPTIMIZER:
            phase[tick] = OPTIMIZER
        following = phase[tick]
    return phase


def _category(life: Life, phase: np.ndarray) -> str:
    """Return what a storage was, from its name or from the phases that it lived through."""
    if life.category is not None:
        return life.category
    later = phase[life.born + 1 : None if life.died is None else life.died + 1]
    if life.phase == FORWARD and (later == BACKWARD).any():
        return "activations"
    if life.phase == BACKWARD and (later != BACKWARD).any():
        return "gradients"
    return "buffers" if life.communicated else "temporary"
