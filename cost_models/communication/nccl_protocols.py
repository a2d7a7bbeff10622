"""Seconds of one collective by every algorithm and protocol of NCCL, and NCCL's choice.

Symbols   n ranks   N nodes (domains of the inner link) that they are in   B bytes of the tensor
          W bytes/s of a ring (one way, per rank; ``group_link`` of ``cluster.links.groups``)
          h, H seconds of a message inside a node and between nodes   s share of W of a protocol
Units     seconds; every number may be a column, everything broadcasts.

LL sends a flag with every four bytes and needs no barrier: a few microseconds, a quarter of the
bandwidth. LL128 sends one with 120 of 128 bytes. Simple has a barrier for every chunk and the full
bandwidth. NVLS reduces in the NVLink switch (SHARP in the network). Leaves out: other traffic on
the same links, and ranks that arrive late.

Source: NVIDIA/nccl, src/graph/tuning.cc (``hardware_profiles/software/nccl.toml``), the model by
which NCCL chooses. Leaves out: its correction of trees by size, its limits per channel, CollNet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.arrays import Count, Real
from hardware_profiles.software.nccl import ALGORITHMS, PROTOCOLS, NcclTuning, nccl_tuning

CHOICES: Final = tuple((a, p) for a in ALGORITHMS for p in PROTOCOLS)


class NcclGroup(Struct, frozen=True):
    """The ranks of a collective and their links."""

    ranks: Count
    nodes: Count  # domains of the inner link
    bandwidth: Real  # bytes/s of a ring, one way, per rank
    link: str = "nvlink"  # inside a node
    architecture: str = "Ampere"

    @property
    def ranks_per_node(self) -> Real:
        """Ranks in each node."""
        return np.multiply(1.0, self.ranks) / self.nodes


def nccl_seconds(
    kind: str,
    size: Real,
    group: NcclGroup,
    algorithm: str,
    protocol: str,
) -> Real:
    """Seconds of a collective; infinite if NCCL has no such algorithm and protocol.

        ring   base + hops + B f / (s W)     f = 2 (n-1)/n for an all-reduce, (n-1)/n otherwise
               hops = 2 (n - N) h + 2 N H for an all-reduce, (n - N) h + (N - 1) H otherwise; in one
               node 2 (n - 1) h or (n - 1) h
        tree   base + 2 ((n/N - 1) h + log2 N H) + 2 B / (s W)          all-reduce only
        nvls   h + B / (s W)                             all-reduce, in one node of Hopper or later

    >>> one_node = NcclGroup(8, 1, 229e9)
    >>> round(1e6 * float(nccl_seconds("all_reduce", 16384.0, one_node, "ring", "ll")), 1)
    15.5
    """
    tuning = nccl_tuning()
    hops = tuning.hop[group.link].get(algorithm, {})
    reduces = kind == "all_reduce"
    shape = np.broadcast(size, group.ranks, group.nodes, group.bandwidth).shape
    if protocol not in hops or (algorithm != "ring" and not reduces):
        return np.full(shape, np.inf)
    ranks, nodes = np.multiply(1.0, group.ranks), np.multiply(1.0, group.nodes)
    inside, between = hops[protocol], tuning.hop["network"].get(algorithm, {}).get(protocol, 0.0)
    rate = _rate(group, algorithm, protocol, tuning)
    base, several = tuning.base[algorithm][protocol], nodes > 1
    if algorithm == "ring":
        passes = 2.0 if reduces else 1.0
        over = np.where(several, 2.0 * nodes if reduces else nodes - 1.0, 0.0)
        floor = tuning.network_overhead * (3.0 if protocol == "simple" else 1.0)
        step = np.where(several, np.maximum(inside, floor), inside)
        latency = base + (passes * (ranks - 1.0) - over) * step + over * between
        seconds = latency + passes * (ranks - 1.0) / ranks * size / rate
    elif algorithm == "tree":
        levels = np.floor(np.log2(np.maximum(1.0, nodes)))
        latency = base + 2.0 * ((group.ranks_per_node - 1.0) * inside + levels * between)
        seconds = latency + 2.0 * size / rate
    else:
        offered = group.architecture in tuning.nvls_architectures and group.link == "nvlink"
        one = inside + np.multiply(1.0, size) / rate
        seconds = np.where(several | (not offered), np.inf, one)
    alone: Real = np.where(ranks > 1, seconds, 0.0)
    return alone


def _rate(group: NcclGroup, algorithm: str, protocol: str, tuning: NcclTuning) -> Real:
    """Bytes/s of a protocol, a share of the ring's."""
    share: Real = np.asarray(tuning.share[algorithm][protocol])
    one_node = np.less_equal(group.nodes, 1)
    if protocol == "ll128" and algorithm == "ring":
        share = np.where(np.less(group.ranks_per_node, 2), tuning.ll128_alone_in_node, share)
    if protocol == "ll128" and algorithm == "tree":
        share = np.where(one_node, tuning.tree_ll128_one_node, share)
    rate = share * group.bandwidth
    if protocol == "ll":
        table = tuning.ll_bandwidth_one_node
        few = np.where(
            np.less_equal(group.nodes, 2),
            tuning.ll_bandwidth_two_nodes,
            tuning.ll_bandwidth_more_nodes,
        )
        limit = np.where(one_node, table.get(group.architecture, table["other"]), few)
        rate = np.minimum(rate, limit)
    return rate


def seconds_by_choice(kind: str, size: Real, group: NcclGroup) -> Mapping[tuple[str, str], Real]:
    """Return the seconds of every algorithm and protocol."""
    return {choice: nccl_seconds(kind, size, group, *choice) for choice in CHOICES}


def fastest_choice(kind: str, size: Real, group: NcclGroup) -> tuple[Real, Real]:
    """Return the least seconds, and the index in CHOICES of the fastest choice.

    >>> group = NcclGroup(8, 1, 229e9)
    >>> seconds, index = fastest_choice("all_reduce", np.array([4096.0, 1e6, 1e9]), group)
    >>> [CHOICES[i] for i in index]
    [('ring', 'll'), ('tree', 'll128'), ('ring', 'simple')]
    """
    every = np.stack(list(seconds_by_choice(kind, size, group).values()))
    return np.min(every, axis=0), np.argmin(every, axis=0)


def direct_all_reduce(
    size: Real, ranks: Count, bandwidth: Real, start: float, share: float
) -> Real:
    """All-reduce by one kernel that reads its peers' memory: start + 2 (n-1)/n B / (share W).

    Few thread blocks read, so they reach a ``share`` of the links' bandwidth; one barrier replaces
    all messages. Serving engines use it for small tensors inside an NVLink domain.

    Source: serving profiles, ``direct_all_reduce_*``.

    >>> round(1e6 * float(direct_all_reduce(2.0**20, 8, 450e9, 5e-6, 1 / 6)), 1)
    29.5
    """
    seconds = start + 2.0 * (np.multiply(1.0, ranks) - 1.0) / ranks * size / (share * bandwidth)
    return np.where(np.greater(ranks, 1), seconds, 0.0)
