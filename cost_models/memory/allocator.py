"""Memory that torch reserves and that nvidia-smi shows, from the bytes of live tensors.

The caching allocator keeps free blocks while memory is available; near the end of memory only
``memory.allocator_slack`` of them remains. The context is the driver's and the libraries' own
memory: CUDA's modules, cuBLAS and cuDNN workspaces.

Units: bytes.
"""

from __future__ import annotations

from cost_models.uncertainty import MemoryKind
from hardware_profiles.software.trainer import SoftwareProfile


def shown_bytes(
    kind: MemoryKind, allocated: float, software: SoftwareProfile, budget: float
) -> float:
    """Return a peak as torch or the device shows it: ``allocated`` itself, reserved, or in use.

        reserved  a (1 + cache), at most the device's memory, at least a (1 + slack)
        device    the same and the context

    Source: torch's caching allocator frees its cached blocks before it gives up
    (c10/cuda/CUDACachingAllocator.cpp); the shares are the profile's, each with its source.
    """
    if kind == "allocated":
        return allocated
    least = allocated * (1.0 + software.memory.allocator_slack)
    most = max(least, budget - software.memory.context_bytes)
    reserved = min(allocated * (1.0 + software.memory.allocator_cache), most)
    return reserved if kind == "reserved" else reserved + software.memory.context_bytes
