"""The grid of ranks (pipeline, data, tensor), the last axis fastest: see ``cost_models.plan``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_models.plan import Plan
from hardware_profiles.errors import InputError

AXES: Final = ("pipeline", "data", "tensor")


def local_device() -> torch.device:
    """Return the GPU that torchrun gave this process, or the CPU; forked ranks speak gloo."""
    forked = dist.is_initialized() and dist.get_backend() == "gloo"
    if torch.cuda.is_available() and not forked:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def connect(device: torch.device) -> None:
    """Join the default process group (nccl on GPUs, gloo else) unless that was done.

    Without ``device_id``: torch would then send all messages of a group through one communicator,
    one after another, where a receive that waits holds up a send (pytorch/pytorch#154132).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def leave() -> None:
    """Wait until all ranks have come here, and leave the process group.

    A group of gloo is left to the end of the process, which ``os._exit`` makes: taken apart on a
    busy machine, it now and then aborted the process ("terminate called without an active
    exception", torch 2.13, ZeRO-2 and 3), probably where gloo's own thread drops the last work.
    """
    if dist.is_initialized():
        dist.barrier()
        if dist.get_backend() != "gloo":
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the process stands among all ranks."""

    plan: Plan
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> Grid:
        """Build the process groups of every axis; all ranks call this together."""
        if dist.get_world_size() != plan.world_size:
            raise InputError(
                f"the plan needs {plan.world_size} ranks (data_parallel {plan.data_parallel} x "
                f"tensor_parallel {plan.tensor_parallel} x pipeline_parallel "
                f"{plan.pipeline_parallel}), but {dist.get_world_size()} were started"
            )
        shape = (plan.pipeline_parallel, plan.data_parallel, plan.tensor_parallel)
        return cls(plan, device, init_device_mesh(device.type, shape, mesh_dim_names=AXES))

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of one axis."""
        return self.mesh.get_group(axis)

    def rank(self, axis: str) -> int:
        """Return this process's rank along one axis."""
        rank: int = self.mesh.get_local_rank(axis)
        return rank

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups by axis, for the counter of collectives."""
        world = dist.distributed_c10d._get_default_group()
        return {**{axis: self.group(axis) for axis in AXES}, "world": world}

    def pipeline_peer(self, pipeline_rank: int) -> int:
        """Return the global rank of another pipeline rank with this data and tensor rank."""
        rank: int = dist.get_global_rank(self.group("pipeline"), pipeline_rank)
        return rank

    def pipeline_lines(self) -> list[list[int]]:
        """Return the global ranks of every pipeline: one list a data and tensor rank."""
        lines: list[list[int]] = self.mesh.mesh.flatten(1).t().tolist()
        return lines
