"""Activation offload: saved activations of a layer in host memory.

The tensors that a decoder layer saves for its backward pass are copied to the host in a separate
stream, storage by storage, and copied back when the backward pass first reads them. Parameters,
tensors that layers share (rotary tables, masks) and small tensors stay. At most two layers'
activations are on the device: the running layer's, and the previous layer's while its copies are in
flight.

On a CPU, host memory is the device's. Saved tensors are copied all the same, which frees the
original and tests both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# masks that layers share, by their storage (fake tensors have no address)
SHARED_MASKS: Final[WeakValueDictionary[int, Tensor]] = WeakValueDictionary()

SMALLEST_STORAGE: Final = 1024  # bytes of the smallest storage worth a copy


def host_is_device(device: torch.device) -> bool:
    """Return whether a device computes in host memory."""
    return str(device.type) == "cpu"


class _OffloadedStorage:
    """One storage that a layer saved: on the device, in flight, or on the host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device = storage.device
        self.on_device: Tensor | None = _bytes_of(storage)
        self.on_host: Tensor | None = None
        self.copied: torch.cuda.Event | None = None  # completion of the copy to the host

    def copy_to_host(self) -> Tensor:
        """Start the copy to the host; return the device bytes, which must live until it is done."""
        assert self.on_device is not None
        source = self.on_device
        self.on_host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self.on_host.copy_(source, non_blocking=True)
        self.on_device = None
        return source

    def storage(self) -> torch.UntypedStorage:
        """Return the bytes on the device."""
        if self.on_device is None:
            assert self.on_host is not None
            if host_is_device(self.device):
                return self.on_host.untyped_storage()
            if self.copied is not None:
                torch.cuda.current_stream().wait_event(self.copied)
            self.on_device = self.on_host.to(self.device, non_blocking=True)
        return self.on_device.untyped_storage()


class _SavedTensor(NamedTuple):
    """A tensor that autograd saved: a view of a storage."""

    source: _OffloadedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        found = torch.empty(0, dtype=self.dtype, device=self.source.device)
        with torch.no_grad():
            return found.set_(self.source.storage(), self.offset, self.size, self.stride)


class _CopiesInFlight:
    """Storages whose copies to the host are in flight; they are freed after the next layer."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None
        self.storages: list[Tensor] = []

    def release(self) -> None:
        """Free the copied storages; the memory is reused only after the copies."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.done, self.storages = None, []

    def start(self, storages: Iterable[_OffloadedStorage], device: torch.device) -> None:
        """Copy the storages of one layer to the host."""
        if device.type != "cuda":
            for one in storages:
                one.copy_to_host()
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self.storages = [one.copy_to_host() for one in storages]
            done.record()
        for one in storages:
            one.copied = done
        self.done = done


_copies = _CopiesInFlight()


def run_offloaded(
    run: Callable[[], Tensor], device: torch.device, staying: Iterable[Tensor | None]
) -> Tensor:
    """Run a layer; its saved tensors go to the host, except the storages of ``staying``."""
    stay = {t.untyped_storage()._cdata for t in staying if t is not None}
    found: dict[int, _OffloadedStorage] = {}  # keeps them alive, so that addresses are unique

    def pack(tensor: Tensor) -> Tensor | _SavedTensor:
        if tensor.device != device or type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in stay or address in SHARED_MASKS or storage.nbytes() < SMALLEST_STORAGE:
            return tensor
        source = found.get(address) or found.setdefault(address, _OffloadedStorage(storage))
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return _SavedTensor(source, tensor.dtype, *place)

    def unpack(saved: Tensor | _SavedTensor) -> Tensor:
        return saved.tensor() if isinstance(saved, _SavedTensor) else saved

    with saved_tensors_hooks(pack, unpack):
        output = run()
    _copies.release()
    _copies.start(found.values(), device)
    found.clear()
    return output


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    with torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))
