"""NCCL's tuning constants: latency and bandwidth by algorithm and protocol, with their source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import asdict

from hardware_profiles.cluster.schema import Tier
from hardware_profiles.fields import Amount, convert, read_toml

PATH: Final = Path(__file__).parent / "nccl.toml"
Algorithm = Literal["ring", "tree", "nvls"]
Protocol = Literal["ll", "ll128", "simple"]
ALGORITHMS: Final[tuple[str, ...]] = get_args(Algorithm)
PROTOCOLS: Final[tuple[str, ...]] = get_args(Protocol)
LINKS: Final = ("nvlink", "pcie", "network")
Table = Mapping[str, Mapping[str, float]]  # algorithm, protocol
_Rows = dict[Algorithm, dict[Protocol, Amount]]


class NcclTuning(Struct, frozen=True):
    """Seconds, and shares of a ring's bandwidth; a missing combination does not exist."""

    source: str
    base: Table  # seconds of a collective, whatever its size and ranks
    hop: Mapping[str, Table]  # seconds of a message, by link
    share: Table  # of the ring's bandwidth
    ll_bandwidth_one_node: Mapping[str, float]  # bytes/s, by architecture
    ll_bandwidth_two_nodes: float
    ll_bandwidth_more_nodes: float
    ll128_alone_in_node: float  # share, where one rank of a node takes part
    tree_ll128_one_node: float  # share
    network_overhead: float  # seconds that every step of a ring over nodes takes at least
    nvls_architectures: tuple[str, ...]
    memory: NcclMemory


class NcclMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on a device."""

    channel: Amount  # of a channel without connections
    connection: Amount  # of a channel to one neighbour
    channels: Mapping[str, int]  # of a communicator, by the link inside a node
    exchange: Amount  # of an all-to-all, to each rank of the node


class _Limits(Struct, frozen=True, forbid_unknown_fields=True):
    ll_bandwidth_one_node: Mapping[str, Amount]
    ll_bandwidth_two_nodes: Amount
    ll_bandwidth_more_nodes: Amount
    ll128_alone_in_node: Amount
    tree_ll128_one_node: Amount
    network_overhead: Amount
    nvls_architectures: tuple[str, ...]


class _Hops(Struct, frozen=True, forbid_unknown_fields=True):
    nvlink: _Rows
    pcie: _Rows
    network: _Rows


class _NcclFile(Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    base: _Rows
    hop: _Hops
    share: _Rows
    limits: _Limits
    memory: NcclMemory


@cache
def nccl_tuning() -> NcclTuning:
    """Load the constants.

    >>> nccl_tuning().hop["nvlink"]["ring"]["simple"]
    3.4e-06
    """
    found: Any = convert(read_toml(PATH, "NCCL's constants"), _NcclFile, str(PATH))
    return NcclTuning(
        source=found.source,
        base=found.base,
        hop=asdict(found.hop),
        share=found.share,
        memory=found.memory,
        **asdict(found.limits),
    )


def link_class(tier: Tier) -> str | None:
    """Return NCCL's class of a link inside a node; None: none of NCCL's links."""
    for prefix, name in (("NVLink", "nvlink"), ("PCIe", "pcie")):
        if tier.name.startswith(prefix):
            return name
    return None
