"""Machines: accelerators, link tiers, clusters.

SI units: bytes, seconds, FLOP/s, bytes/s, watts; prices in dollars an hour.

A *tier* is a level of the interconnect seen from one accelerator: ``domain_size`` accelerators
reach each other through it, each at ``bandwidth`` bytes/s one way, ``latency`` seconds a message.
Tiers are ordered from the innermost (NVLink) to the outermost (network); the outermost spans the
cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from hardware_profiles.fields import Line

Kind = Literal["measured", "published", "datasheet", "assumed"]
Device = Literal["gpu", "cpu", "tpu"]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)
MAX_GPUS: Final = 10**6  # accelerators of a cluster
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with where it comes from."""

    value: float
    kind: Kind
    source: Line


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device as a program sees it, or one CPU process of this machine (``device`` "cpu")."""

    name: Line
    device: Device
    architecture: Line
    memory_capacity: Figure  # bytes that the driver reports for an idle device
    memory_bandwidth: Figure  # bytes/s
    peak_flops: Mapping[str, Figure]  # FLOP/s, dense, by precision (PRECISIONS)
    achievable_flops: Mapping[str, Figure]  # FLOP/s of the best large matmul, where measured
    link: Line  # name of the link inside a node, e.g. "NVLink3"
    link_bandwidth: Figure  # bytes/s one way per accelerator, inside a node
    link_share: Figure | None = None  # of it, what large collectives reach, where measured
    # bytes/s of the memory of a node's host, where all transfers of its accelerators pass through
    # it: no peer-to-peer
    host_memory_bandwidth: Figure | None = None
    usable_memory: Figure | None = None  # bytes, of the capacity, that a process can get
    host_bandwidth: Figure | None = None  # bytes/s one way to the host (PCIe)
    power: Figure | None = None  # watts of the board
    power_limit: Figure | None = None  # watts that it is held to, where that is less
    price: Figure | None = None  # dollars an hour of one, on demand
    compute_units: Figure | None = None  # multiprocessors (NVIDIA), compute units (AMD)
    l2_cache: Figure | None = None  # bytes, where it saves time between kernels (GDDR memory)
    systolic_array: Figure | None = None  # rows, and columns, of a matrix unit that pads operands
    # host seconds per kernel or operator; published: of a CPU that trainers were not compared on
    kernel_launch: Figure | None = None
    # of a CPU process, measured
    score_seconds: Figure | None = None  # an attention score, forward, without its matmuls
    core_share: Figure | None = None  # of a core, at most one, while all processes work
    aliases: tuple[Line, ...] = ()

    @property
    def watts(self) -> Figure | None:
        """Watts that the board may draw: its limit, or what it is built for."""
        return self.power_limit or self.power

    @property
    def words(self) -> str:
        """The name in the CLUSTER argument, with the power limit: ``H100-SXM-80GB@500W``."""
        if self.power_limit is None:
            return self.name
        return f"{self.name}@{self.power_limit.value:g}W"


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the interconnect; see the head of this file.

    ``peer_bandwidth`` and ``peer_latency`` are given if a single peer has other links than all
    together: a full mesh (64 of 448 GB/s between two MI300X), or a measured point-to-point rate
    next to a measured ring.
    """

    name: Line
    domain_size: int
    bandwidth: Figure
    latency: Figure
    peer_bandwidth: Figure | None = None  # bytes/s one way to one peer
    peer_latency: Figure | None = None  # seconds a message to one peer


@dataclass(frozen=True, slots=True)
class Level:
    """One level of an irregular tree of links: switches, and the links to what lies below them.

    What lies below the first level are the accelerators, as torchrun numbers their processes: node
    after node; below every other level, the switches of the level before. The last level is one
    switch.
    """

    name: Line
    above: tuple[int, ...]  # for each of what lies below, the number of its switch
    bandwidth: tuple[Figure, ...]  # bytes/s one way of each link; one figure: all are alike
    latency: tuple[Figure, ...]  # seconds a message; one figure: all are alike
    # a link is as many lanes of such a bandwidth as accelerators lie below it; else all share it
    per_accelerator: bool = False

    @property
    def num_switches(self) -> int:
        """Switches of this level."""
        return max(self.above) + 1


@dataclass(frozen=True, slots=True)
class Node:
    """A kind of server or rack: how many accelerators it holds and what connects them."""

    name: Line
    accelerator: str  # name in the catalogue
    gpus_per_node: int
    network: str  # name of the network between nodes, e.g. "InfiniBand HDR"
    network_bandwidth: Figure  # bytes/s one way per accelerator, to other nodes
    domain_size: int  # accelerators within reach of the inner link; may span nodes (NVL72: 72)
    nodes: int = 1  # servers of this unit: 1, or those of a rack sold as one (NVL72: 18)
    link: str | None = None  # where it differs from the accelerator's own
    link_bandwidth: Figure | None = None  # bytes/s one way, where it differs
    peer_bandwidth: Figure | None = None  # see Tier
    torus_from: int = 1  # accelerators of a job from which on the ends of every axis are joined
    power: Figure | None = None  # watts of each accelerator here, where it shares them
    host_memory: Figure | None = None  # bytes of a whole server
    nvme: Figure | None = None  # bytes of its local NVMe drives together
    host_links: int = 0  # between all accelerators of a server and its host; 0: one each
    aliases: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal accelerators."""

    name: Line  # what the user typed, e.g. "16x8xH100-SXM"
    accelerator: Accelerator
    num_nodes: int
    gpus_per_node: int
    tiers: tuple[Tier, ...]  # innermost first; the last one spans num_gpus
    notes: tuple[Line, ...] = field(default=())  # assumptions taken, in words
    host_memory: Figure | None = None  # bytes of a node's host; None: unknown
    nvme: Figure | None = None  # bytes of a node's local NVMe drives; None: unknown
    host_links: int = 0  # that the accelerators of a node share to its host; 0: one each
    # an irregular tree of links, innermost level first; ``tiers`` are then equal domains that are
    # nowhere faster (``topology.tiers_of_levels``)
    levels: tuple[Level, ...] = ()
    # the accelerator on which each rank of a plan's grid works; None: their own numbers
    rank_order: tuple[int, ...] | None = None

    @property
    def num_gpus(self) -> int:
        """Accelerators of all nodes."""
        return self.num_nodes * self.gpus_per_node
