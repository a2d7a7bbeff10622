"""Seconds of collectives and messages between the ranks of a serving replica in one pass.

Symbols   T rows (tokens) of a pass   h hidden_size   V vocab_size   c bytes of the computation
          t tensor_parallel   k experts of a token
Units     bytes, seconds; everything broadcasts.

Leaves out: messages that wait for other traffic on the same links.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.communication.nccl_protocols import NcclGroup, direct_all_reduce, fastest_choice
from cost_models.communication.ring_and_tree import COLLECTIVE_START
from cost_models.communication.seconds import achieved, traffic_seconds
from cost_models.communication.traffic import Traffic
from hardware_profiles.cluster.links.groups import group_link, mean_hop_latency, point_to_point_link
from hardware_profiles.cluster.links.nvlink_domains import domains_spanned, exchange_bandwidth
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.nccl import link_class
from hardware_profiles.software.serving_engine import ServingEngine


def exchange_seconds(size: Real, ranks: Count, bandwidth: Real, latency: Real) -> Real:
    """All-to-all with all messages in flight at once: (n - 1)/n B / W + alpha + start.

    Source: the low-latency kernels of DeepEP (deepseek-ai/DeepEP: README.md), whose table for 16 to
    256 H800 it reproduces within 15 %.

    >>> round(1e6 * float(exchange_seconds(14.68e6, 128, 49.7e9, 14e-6)))
    345
    """
    steps = np.multiply(1.0, ranks) - 1.0
    seconds = steps / ranks * size / bandwidth + latency + COLLECTIVE_START
    return np.where(np.greater(ranks, 1) & np.greater(size, 0.0), seconds, 0.0)


@dataclass(frozen=True, slots=True)
class ReplicaLinks:
    """The links between the ranks of replicas."""

    cluster: Cluster
    engine: ServingEngine

    @property
    def reached(self) -> Cluster:
        """The cluster with the bandwidths that large collectives reach."""
        if self.cluster.accelerator.device == "cpu":
            return self.cluster
        return achieved(
            self.cluster,
            self.engine.communication.bus_efficiency,
            self.engine.communication.network_efficiency,
        )

    def collective(self, kind: str, size: Real, ranks: Count, stride: Count = 1) -> Real:
        """Seconds of one collective over ``ranks`` with a ``stride`` between them.

        Over NVLink, PCIe and a network behind them: the fastest of NCCL's algorithms and protocols
        (``nccl_protocols``), and inside an NVLink domain one kernel for small all-reduces. An
        all-to-all sends everything at once. On other links a ring or a tree (``ring_and_tree``).
        """
        steps = np.multiply(np.asarray(stride), np.ones_like(np.asarray(ranks)))
        bandwidth, latency = group_link(self.reached, ranks, steps)
        gloo = self.cluster.accelerator.device == "cpu"
        if kind == "all_to_all" and not gloo:
            carried = exchange_bandwidth(self.reached, ranks, steps)
            return exchange_seconds(size, ranks, carried, latency)
        link = link_class(self.cluster.tiers[0])
        if link is None or kind not in ("all_reduce", "all_gather", "reduce_scatter"):
            one = Traffic(np.ones_like(bandwidth), np.multiply(1.0, size))
            hop = mean_hop_latency(self.reached, ranks, steps)
            return traffic_seconds(kind, one, ranks, bandwidth, latency, hop=hop, gloo=gloo)
        spanned = domains_spanned(self.cluster, ranks, steps).astype(np.int64)
        architecture = self.cluster.accelerator.architecture
        group = NcclGroup(ranks, spanned, bandwidth, link, architecture)
        seconds, _ = fastest_choice(kind, size, group)
        if kind == "all_reduce" and link == "nvlink":
            engine = self.engine
            inner = self.cluster.tiers[0].bandwidth.value
            direct = direct_all_reduce(
                size,
                ranks,
                inner,
                engine.communication.direct_all_reduce_start,
                engine.communication.direct_all_reduce_share,
            )
            small = np.less_equal(size, engine.communication.direct_all_reduce_bytes) & (
                spanned <= 1
            )
            seconds = np.where(small, np.minimum(seconds, direct), seconds)
        return seconds

    def send(self, size: Real, distance: Count, stages: Count) -> Real:
        """Seconds of a message from one stage to the next; none without stages."""
        bandwidth, latency = point_to_point_link(self.reached, distance, group_size=stages)
        one = np.multiply(1.0, size) / bandwidth + latency
        return np.where(np.greater(stages, 1), one, 0.0)
