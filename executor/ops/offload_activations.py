"""Activation offload: saved activations of a layer in host memory.

The tensors that a decoder layer saves for its backward pass are copied to the host in a separate
stream, storage by storage, and copied back when the backward pass first reads them. Parameters,
tensors that layers share (rotary tables, masks) and small tensors stay. In a forward
pass at most two layers' activations are on the device: the running layer's, and the previous
layer's while its copies are in flight. A backward pass begins with the last layer's, which are not
copied back.

On a CPU, host memory is the device's. Saved tensors are copied all the same, which frees the
original and tests both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

# masks that layers share, by their storage (fake tensors have no address)
SHARED_MASKS: Final[WeakValueDictionary[int, Tensor]] = WeakValueDictionary()

# tensors whose storage is all that they are; not DTensors and other wrappers
PLAIN: Final = (Tensor, torch.nn.Parameter, FakeTensor)
SMALLEST_STORAGE: Final = 1024  # bytes of the smallest storage worth a copy
HOST = "cpu"  # a rehearsal's fake tensors have a second device, the CPU


def host_is_device(device: torch.device) -> bool:
    """Return whether a device computes in host memory."""
    return str(device.type) == HOST


def host_copy(tensor: Tensor) -> Tensor:
    """Start to copy a tensor into host memory, pinned where the tensor is on a GPU."""
    copy = torch.empty_like(tensor, device=HOST, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


class _OffloadedStorage:
    """One storage that a layer saved: on the device, in flight, or on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.on_device: Tensor | None = _whole_storage(tensor)
        self.on_host: Tensor | None = None
        self.copied: torch.cuda.Event | None = None  # completion of the copy to the host

    def copy_to_host(self) -> None:
        """Start the copy to the host; the device bytes must live until it is done."""
        assert self.on_device is not None
        self.on_host = host_copy(self.on_device)

    def whole(self) -> Tensor:
        """Return the bytes on the device, for a backward pass."""
        if self.on_device is not None:  # of the last layer, which is not copied back
            _copies.finish()
            return self.on_device
        assert self.on_host is not None
        _copies.release()
        if host_is_device(self.device):
            return self.on_host
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
        self.on_device = self.on_host.to(self.device, non_blocking=True)
        return self.on_device


class _SavedTensor(NamedTuple):
    """A tensor that autograd saved: a view of a storage."""

    source: _OffloadedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        with torch.no_grad():
            elements = self.source.whole().view(self.dtype)
            return elements.as_strided(self.size, self.stride, self.offset)


class _CopiesInFlight:
    """Storages of one layer whose copies to the host are in flight.

    They are freed after the next layer, or when a backward pass reads what another layer saved.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None
        self.storages: list[_OffloadedStorage] = []

    def finish(self) -> None:
        """Let the storages live as long as autograd needs them; their memory waits for copies."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.done, self.storages = None, []

    def release(self) -> None:
        """Free the copied storages; the memory is reused only after the copies."""
        for one in self.storages:
            one.on_device = None
        self.finish()

    def start(self, storages: Iterable[_OffloadedStorage], device: torch.device) -> None:
        """Copy the storages of one layer to the host."""
        self.storages = list(storages)
        if device.type != "cuda":
            for one in self.storages:
                one.copy_to_host()
            if host_is_device(device):
                self.release()
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            for one in self.storages:
                one.copy_to_host()
                one.copied = done
            done.record()
        self.done = done


_copies = _CopiesInFlight()


def run_offloaded(
    run: Callable[[], Tensor], device: torch.device, staying: Iterable[Tensor | None]
) -> Tensor:
    """Run a layer; its saved tensors go to the host, except the storages of ``staying``."""
    stay = {t.untyped_storage()._cdata for t in staying if t is not None}
    found: dict[int, _OffloadedStorage] = {}  # keeps them alive, so that addresses are unique

    def pack(tensor: Tensor) -> Tensor | _SavedTensor:
        if tensor.device != device or type(tensor) not in PLAIN:
            return tensor
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in stay or address in SHARED_MASKS or storage.nbytes() < SMALLEST_STORAGE:
            return tensor
        source = found.get(address) or found.setdefault(address, _OffloadedStorage(tensor))
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


def _whole_storage(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
