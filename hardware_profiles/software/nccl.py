"""NCCL's own constants: what an algorithm and a protocol of it take, as data with a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from hardware_profiles.cluster.schema import Tier
from hardware_profiles.fields import Fields, read_toml

PATH: Final = Path(__file__).parent / "nccl.toml"
ALGORITHMS: Final = ("ring", "tree", "nvls")
PROTOCOLS: Final = ("ll", "ll128", "simple")
LINKS: Final = ("nvlink", "pcie", "network")
Table = Mapping[str, Mapping[str, float]]  # algorithm, protocol


@dataclass(frozen=True, slots=True)
class NcclTuning:
    """Seconds, and shares of a ring's bandwidth; what is not in a table does not exist."""

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


def _table(source: Fields) -> Table:
    source.refuse_unknown(ALGORITHMS)
    found = {}
    for algorithm in source.values:
        row = source.sub(algorithm)
        row.refuse_unknown(PROTOCOLS)
        found[algorithm] = {protocol: row.number(protocol) for protocol in row.values}
    return found


@cache
def nccl_tuning() -> NcclTuning:
    """Load the constants.

    >>> nccl_tuning().hop["nvlink"]["ring"]["simple"]
    3.4e-06
    """
    source = Fields(read_toml(PATH, "NCCL's constants"), str(PATH))
    source.refuse_unknown(("source", "base", "hop", "share", "limits"))
    hops, limits = source.sub("hop"), source.sub("limits")
    hops.refuse_unknown(LINKS)
    one_node = limits.sub("ll_bandwidth_one_node")
    numbers = (
        "ll_bandwidth_two_nodes",
        "ll_bandwidth_more_nodes",
        "ll128_alone_in_node",
        "tree_ll128_one_node",
        "network_overhead",
    )
    limits.refuse_unknown((*numbers, "ll_bandwidth_one_node", "nvls_architectures"))
    return NcclTuning(
        source=source.text("source"),
        base=_table(source.sub("base")),
        hop={link: _table(hops.sub(link)) for link in LINKS},
        share=_table(source.sub("share")),
        ll_bandwidth_one_node={name: one_node.number(name) for name in one_node.values},
        nvls_architectures=tuple(limits.items("nvls_architectures")),
        **{name: limits.number(name) for name in numbers},
    )


def link_class(tier: Tier) -> str | None:
    """Return under which name NCCL knows a link inside a node; None: it is none of its links."""
    for prefix, name in (("NVLink", "nvlink"), ("PCIe", "pcie")):
        if tier.name.startswith(prefix):
            return name
    return None
