"""Saved activations in host memory, out of a GPU's way.

What a decoder layer saves for its backward pass leaves in a stream of its own, storage by storage,
and comes back when the backward pass first asks for it. Parameters, what layers share (rotary
tables, masks) and small tensors stay. Two layers' worth at most is on the device: the layer that
runs, and the one before whose copies may still be under way.

On a CPU host memory is the device's. What is saved is copied all the same, which frees the original
and proves the way there and back.
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

SMALLEST: Final = 1024  # bytes of a storage that is worth a copy


def host_is_device(device: torch.device) -> bool:
    """Return whether a device computes in host memory."""
    return str(device.type) == "cpu"


class _Kept:
    """One storage that a layer saved: on the device, on its way, or on the host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device = storage.device
        self.on_device: Tensor | None = _bytes_of(storage)
        self.on_host: Tensor | None = None
        self.left: torch.cuda.Event | None = None  # when the copy down is done

    def leave(self) -> Tensor:
        """Start the copy down; return the bytes on the device, which must live until it is done."""
        assert self.on_device is not None
        going = self.on_device
        self.on_host = torch.empty_like(going, device="cpu", pin_memory=going.is_cuda)
        self.on_host.copy_(going, non_blocking=True)
        self.on_device = None
        return going

    def storage(self) -> torch.UntypedStorage:
        """Return the bytes where the device computes."""
        if self.on_device is None:
            assert self.on_host is not None
            if host_is_device(self.device):
                return self.on_host.untyped_storage()
            if self.left is not None:
                torch.cuda.current_stream().wait_event(self.left)
            self.on_device = self.on_host.to(self.device, non_blocking=True)
        return self.on_device.untyped_storage()


class _Saved(NamedTuple):
    """A tensor that autograd saved: its place in a storage."""

    kept: _Kept
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        found = torch.empty(0, dtype=self.dtype, device=self.kept.device)
        with torch.no_grad():
            return found.set_(self.kept.storage(), self.offset, self.size, self.stride)


class _Leaving:
    """Storages whose copies down are under way: they wait for the end of the next layer."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None
        self.storages: list[Tensor] = []

    def let_go(self) -> None:
        """Free what has left: whatever takes its memory comes behind the copies."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.done, self.storages = None, []

    def start(self, kept: Iterable[_Kept], device: torch.device) -> None:
        """Copy the storages of one layer down."""
        if device.type != "cuda":
            for one in kept:
                one.leave()
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self.storages = [one.leave() for one in kept]
            done.record()
        for one in kept:
            one.left = done
        self.done = done


_leaving = _Leaving()


def offloaded(
    run: Callable[[], Tensor], device: torch.device, staying: Iterable[Tensor | None]
) -> Tensor:
    """Run a layer; what it saves goes to the host, but for the storages of ``staying``."""
    stay = {t.untyped_storage()._cdata for t in staying if t is not None}
    found: dict[int, _Kept] = {}  # keeps all of them alive, so an address is one storage

    def pack(tensor: Tensor) -> Tensor | _Saved:
        if tensor.device != device or type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in stay or address in SHARED_MASKS or storage.nbytes() < SMALLEST:
            return tensor
        kept = found.get(address) or found.setdefault(address, _Kept(storage))
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return _Saved(kept, tensor.dtype, *place)

    def unpack(saved: Tensor | _Saved) -> Tensor:
        return saved.tensor() if isinstance(saved, _Saved) else saved

    with saved_tensors_hooks(pack, unpack):
        output = run()
    _leaving.let_go()
    _leaving.start(found.values(), device)
    found.clear()
    return output


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    with torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))
