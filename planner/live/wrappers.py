"""Wrappers of a live module: DDP, FSDP, DeepSpeed, torch.compile, Lightning and PEFT."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

# attribute of a wrapper's class that holds the wrapped module
INSIDE: Final = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
# variables with the ranks of a machine: of torchrun, DeepSpeed's launcher (launcher/launch.py of
# 0.19.8), Open MPI, and srun with --ntasks-per-node
RANKS_HERE: Final = (
    *("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "SLURM_NTASKS_PER_NODE",
)
FSDP1: Final = "FullyShardedDataParallel"
FSDP1_STAGES: Final = {
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "_HYBRID_SHARD_ZERO2": 2,
    "NO_SHARD": 0,
}


@dataclass(frozen=True, slots=True)
class LiveSharding:
    """Ranks of this run, and how a module is laid out over them."""

    ranks: int = 1
    ranks_here: int = 1  # on this machine
    tensor_parallel: int = 1
    dp_replicate: int = 1
    zero_stage: int | None = None  # None: no wrapper was found
    engine: str | None = None  # ddp, fsdp1, fsdp2 or deepspeed-zeroN
    compute: torch.dtype | None = None  # to which FSDP casts gathered weights


def class_names(value: Any) -> list[str]:
    """Return the names of a value's class and of its bases."""
    return [kind.__name__ for kind in type(value).__mro__]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers; of a LightningModule its only large child."""
    while True:
        name = next((one for one in class_names(model) if one in INSIDE), None)
        if name is not None:
            model = getattr(model, INSIDE[name])
        elif "LightningModule" in class_names(model) and (child := _main_child(model)) is not None:
            model = child
        else:
            return model


def _main_child(model: nn.Module) -> nn.Module | None:
    """Return the child with all parameters of a module, if it is a model with a config."""
    own = sum(1 for _ in model.parameters())
    for child in model.children():
        inside = unwrapped(child)
        if hasattr(inside, "config") and sum(1 for _ in child.parameters()) == own:
            return inside
    return None


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile compiled a module or one of its parts."""
    if "OptimizedModule" in class_names(model):
        return True
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in model.modules())


def sharding_of(model: nn.Module) -> LiveSharding:
    """Return the ranks of this process group and the engine that wraps a module."""
    ranks, here = ranks_of_run()
    sharded = next((p for p in model.parameters() if hasattr(p, "device_mesh")), None)
    if sharded is not None:
        return _of_mesh(model, sharded, ranks, here)
    wrapped = next((m for m in model.modules() if type(m).__name__ == FSDP1), None)
    if wrapped is not None:
        name = getattr(wrapped.sharding_strategy, "name", "FULL_SHARD")
        stage = FSDP1_STAGES.get(name, 3)
        copies = max(1, ranks // max(1, wrapped.process_group.size())) if "HYBRID" in name else 1
        compute = getattr(getattr(wrapped, "mixed_precision", None), "param_dtype", None)
        engine = "fsdp1" if stage else "fsdp1-no-shard"
        return LiveSharding(ranks, here, 1, copies, stage, engine, compute)
    if "DeepSpeedEngine" in class_names(model):
        deepspeed: Any = model
        stage = int(deepspeed.zero_optimization_stage())
        return LiveSharding(ranks, here, 1, 1, stage, f"deepspeed-zero{stage}" if stage else None)
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        return LiveSharding(ranks, here, 1, 1, 3, "deepspeed-zero3")
    if "DistributedDataParallel" in class_names(model):
        return LiveSharding(ranks, here, 1, 1, 0, "ddp")
    return LiveSharding(ranks, here)


def _of_mesh(model: nn.Module, parameter: Any, ranks: int, here: int) -> LiveSharding:
    """Return the sharding that the mesh of a DTensor and the state of FSDP2 show."""
    mesh = parameter.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    tensor = next((n for name, n in sizes.items() if "tp" in name or "tensor" in name), 1)
    units = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    if not units:
        return LiveSharding(ranks, here, tensor)
    groups = [one for unit in units if (one := getattr(unit, "_fsdp_param_group", None))]
    inner = groups[1:] or groups  # the root keeps its weights after the forward pass by default
    kept = bool(inner) and all(one.post_forward_mesh_info is None for one in inner)
    copies = next((n for name, n in sizes.items() if "replicate" in name), 1)
    policy = groups[0].mp_policy if groups else None
    compute = getattr(policy, "param_dtype", None)
    return LiveSharding(ranks, here, tensor, copies, 2 if kept else 3, "fsdp2", compute)


def ranks_of_run() -> tuple[int, int]:
    """Return the number of ranks, and of those on this machine, as launchers state them."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = int(distributed.get_world_size())
    else:
        ranks = _count("WORLD_SIZE")
    here = next((_count(name) for name in RANKS_HERE if name in os.environ), 1)
    return ranks, min(ranks, here)


def _count(name: str) -> int:
    text = os.environ.get(name, "1")
    return int(text) if text.isdecimal() and int(text) else 1
