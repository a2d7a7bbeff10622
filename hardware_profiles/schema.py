"""What a machine is: accelerators, link tiers, clusters. SI units: bytes, seconds, FLOP/s, bytes/s.

A *tier* is a level of the interconnect seen from one accelerator: ``domain_size`` accelerators reach
each other through it, each at ``bandwidth`` bytes/s one way, ``latency`` seconds a message. Tiers are
ordered from the innermost (NVLink) to the outermost (network); the outermost spans the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["measured", "published", "datasheet", "assumed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with where it comes from."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU, or one CPU process of this machine (``device`` = "cpu")."""

    name: str
    device: Literal["gpu", "cpu", "tpu"]
    architecture: str
    memory_capacity: Figure  # bytes a program can have on an idle device
    memory_bandwidth: Figure  # bytes/s
    peak_flops: Mapping[
        str, Figure
    ]  # FLOP/s, dense, by precision: fp64 fp32 tf32 bf16 fp16 fp8 fp4
    achievable_flops: Mapping[str, Figure]  # FLOP/s of the best large matmul, where it was measured
    link: str  # name of the link inside a node, e.g. "NVLink3"
    link_bandwidth: Figure  # bytes/s one way per accelerator, inside a node
    host_bandwidth: Figure | None = None  # bytes/s one way to the host (PCIe)
    power: Figure | None = None  # watts
    kernel_launch: Figure | None = (
        None  # host seconds per kernel or operator, where it was measured
    )
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the interconnect; see the head of this file."""

    name: str
    domain_size: int
    bandwidth: Figure
    latency: Figure


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal accelerators."""

    name: str  # what the user typed, e.g. "16x8xH100-SXM"
    accelerator: Accelerator
    num_nodes: int
    gpus_per_node: int
    tiers: tuple[Tier, ...]  # innermost first; the last one spans num_gpus
    notes: tuple[str, ...] = field(default=())  # assumptions taken, in words

    @property
    def num_gpus(self) -> int:
        """Accelerators of all nodes."""
        return self.num_nodes * self.gpus_per_node
