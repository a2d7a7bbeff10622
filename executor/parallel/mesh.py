"""The grid of ranks (pipeline, replicate, shard, context, tensor), the last axis fastest.

See ``cost_models.plan.plan``. A rank's number is its position in the grid: where a plan assigns
ranks to accelerators (``rank_order``), processes join in that order (``connect``), and nothing else
depends on it. Ranks that differ along replicate and shard read different samples; those that differ
along context hold different tokens of the same samples.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_models.plan.plan import Plan
from hardware_profiles.errors import InputError

RENDEZVOUS_TIMEOUT: Final = datetime.timedelta(minutes=10)  # limit for all ranks to join
# of a collective: torch would end the process after 10 (nccl) or 30 minutes, before the watchdog
# has named the missing rank
UNLIMITED: Final = datetime.timedelta(days=365)
AXES: Final = ("pipeline", "replicate", "shard", "context", "tensor")
# the process groups of a rank and their axes, by the name under which their traffic is counted
GROUP_AXES: Final[dict[str, tuple[str, ...]]] = {
    "pipeline": ("pipeline",),
    "data": ("shard", "context"),
    "tensor": ("tensor",),
    "replicate": ("replicate",),
    "context": ("context",),
}


def local_device() -> torch.device:
    """Return the GPU that torchrun assigned to this process, or the CPU; forked ranks use gloo."""
    forked = dist.is_initialized() and dist.get_backend() == "gloo"
    if torch.cuda.is_available() and not forked:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def connect(device: torch.device, rank_order: Sequence[int] | None = None) -> None:
    """Join the default process group (nccl on GPUs, gloo otherwise) if not joined yet.

    ``rank_order``: the process, as torchrun numbers them, of each rank of the grid. Forked
    processes are numbered as ranks already: on one machine's CPU all places are alike.

    ``device_id`` is not passed: torch would then send all messages of a group through one
    communicator, one after another, where a waiting receive blocks a send (pytorch/pytorch#154132).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        place: dict[str, Any] = {}
        if rank_order is not None:
            place = {"rank": grid_rank(rank_order), "world_size": int(os.environ["WORLD_SIZE"])}
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            place = {**_store_of_this_attempt(), **place}
        dist.init_process_group(backend, **place)


def grid_rank(rank_order: Sequence[int]) -> int:
    """Return the grid rank of this process, which torchrun numbered differently."""
    process, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if len(rank_order) != count:
        raise InputError(f"rank_order has {len(rank_order)} ranks, but {count} were started")
    return list(rank_order).index(process)


def _store_of_this_attempt() -> dict[str, Any]:
    """Return rank, number of ranks, and torchrun's store with a prefix of its own per attempt.

    Otherwise restarted ranks find the addresses of the ended ones in it (torch 2.11 to 2.13; cf.
    pytorch/pytorch#135712).
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    return {
        "store": dist.PrefixStore(f"attempt {attempt}", store),
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }


def disconnect() -> None:
    """Wait for all ranks, and leave the process group.

    A gloo group is left to the end of the process, which ``os._exit`` makes: destroyed on a busy
    machine, it now and then aborted the process ("terminate called without an active exception",
    torch 2.13, ZeRO-2 and 3), probably where gloo's own thread drops the last work.
    """
    if dist.is_initialized():
        dist.barrier()
        if dist.get_backend() != "gloo":
            dist.destroy_process_group()


def gather_json(
    value: Any, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Return the values of all ranks of a group, on every rank; they travel as JSON text."""
    data = bytearray(json.dumps(value).encode())
    text = torch.frombuffer(data, dtype=torch.uint8).to(device)
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(n) for n in lengths)
    padded = torch.nn.functional.pad(text, (0, longest - len(text)))
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [
        json.loads(part[: int(n)].cpu().numpy().tobytes())
        for part, n in zip(texts, lengths, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ProcessGrid:
    """The position of this process among all ranks, and its process groups.

    A group is named after its traffic: "data" are the ranks that share a model's shards (axes shard
    and context: all of them read the same weights for different tokens), "replicate" the ranks with
    the same shard of other copies. Where experts have their own data axis, "expert" are the ranks
    that share the experts of a layer, "expert_data" those that share the shards of the same
    experts.
    """

    plan: Plan
    device: torch.device
    place: dict[str, int]  # rank of this process along each axis
    by_axis: dict[str, dist.ProcessGroup]

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> ProcessGrid:
        """Build the process groups of every axis; all ranks call this together."""
        if dist.get_world_size() != plan.world_size:
            raise InputError(
                f"the plan needs {plan.world_size} ranks (data_parallel {plan.data_parallel} x "
                f"context_parallel {plan.context_parallel} x tensor_parallel "
                f"{plan.tensor_parallel} x pipeline_parallel {plan.pipeline_parallel}), but "
                f"{dist.get_world_size()} were started"
            )
        position = np.argwhere(_ranks(plan) == dist.get_rank())[0].tolist()
        world = dist.distributed_c10d._get_default_group()
        groups: dict[str, dist.ProcessGroup] = {}
        for name, axes in GROUP_AXES.items():
            (own,) = [line for line in rank_groups(plan, *axes) if dist.get_rank() in line]
            spans_all = len(own) == plan.world_size and world not in groups.values()
            groups[name] = world if spans_all else create_group(own)
        if plan.experts_apart:
            for name, found in expert_rank_groups(plan).items():
                (own,) = [line for line in found if dist.get_rank() in line]
                groups[name] = create_group(own)
        place = dict(zip(AXES, position, strict=True))
        return cls(plan, device, place, groups)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of one axis."""
        return self.by_axis[axis]

    def size(self, axis: str) -> int:
        """Return the number of ranks in this process's group of one axis."""
        return int(self.by_axis[axis].size())

    def rank(self, axis: str) -> int:
        """Return this process's rank in its group of one axis."""
        return int(self.by_axis[axis].rank())

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Return all groups by axis, for the counter of collectives."""
        return {**self.by_axis, "world": dist.distributed_c10d._get_default_group()}

    @property
    def samples_rank(self) -> int:
        """Index of this process's share of a batch (of data_parallel shares)."""
        return self.place["replicate"] * self.plan.dp_shard + self.place["shard"]

    def sharding_mesh(self, axis: str = "data") -> DeviceMesh:
        """Return the mesh for FSDP2: (axis), or (replicate, axis) with several copies."""
        kind = self.device.type
        if self.plan.dp_replicate == 1:
            return DeviceMesh.from_group(self.group(axis), kind, mesh_dim_names=(axis,))
        copies = np.array(dist.get_process_group_ranks(self.group("replicate")))
        shards = np.array(dist.get_process_group_ranks(self.group(axis)))
        ranks = copies[:, None] + shards - dist.get_rank()  # every copy has the same layout
        names = ("replicate", axis)
        return DeviceMesh.from_group(
            [self.group(name) for name in names], kind, ranks.tolist(), mesh_dim_names=names
        )

    def pipeline_peer(self, pipeline_rank: int) -> int:
        """Return the global rank of another pipeline rank with the same other coordinates."""
        rank: int = dist.get_global_rank(self.group("pipeline"), pipeline_rank)
        return rank

    def pipeline_lines(self) -> list[list[int]]:
        """Return the global ranks of every pipeline."""
        return rank_groups(self.plan, "pipeline")


def rank_groups(plan: Plan, *axes: str) -> list[list[int]]:
    """Return the groups of global ranks that differ along the given axes only, in their order."""
    kept = [AXES.index(axis) for axis in AXES if axis not in axes]
    varied = [AXES.index(axis) for axis in AXES if axis in axes]
    ranks = _ranks(plan).transpose(kept + varied)
    size = math.prod(ranks.shape[len(kept) :])
    found: list[list[int]] = ranks.reshape(-1, size).tolist()
    return found


def data_axis(plan: Plan, *, of_experts: bool) -> str:
    """Return the axis whose ranks hold the same weights, or shards of them."""
    return "expert_data" if plan.experts_apart and of_experts else "data"


def expert_rank_groups(plan: Plan) -> dict[str, list[list[int]]]:
    """Return the groups of ranks that share a layer's experts, and those with the same ones.

    Neighbours share a layer's experts: expert ranks are the fastest axis of the data (and, where
    these hold experts whole, tensor) ranks of a copy of the model.
    """
    axes = ["shard", "context", *([] if plan.expert_tensor_parallel else ["tensor"])]
    size = plan.expert_parallel
    found: dict[str, list[list[int]]] = {"expert": [], "expert_data": []}
    for line in rank_groups(plan, *axes):
        found["expert"] += [line[i : i + size] for i in range(0, len(line), size)]
        found["expert_data"] += [line[i::size] for i in range(size)]
    return found


def create_group(ranks: list[int]) -> dist.ProcessGroup:
    """Create the group of some ranks; only they call it, all in the same order."""
    return dist.new_group(ranks, use_local_synchronization=True, timeout=UNLIMITED)


def _ranks(plan: Plan) -> np.ndarray[Any, Any]:
    shape = (
        plan.pipeline_parallel,
        plan.dp_replicate,
        plan.dp_shard,
        plan.context_parallel,
        plan.tensor_parallel,
    )
    return np.arange(plan.world_size).reshape(shape)
