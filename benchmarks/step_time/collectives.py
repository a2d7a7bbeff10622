"""All-reduces by every algorithm, for docs/explanation/collectives.md.

Made by ``python -m benchmarks.step_time.collectives``.

Bandwidths are those that large collectives reach (``bus_efficiency``, ``network_efficiency`` in the
software profiles' [communication]), messages take NCCL's own figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.step_time.collective_algorithms import (
    direct_one_shot,
    direct_two_shot,
    hierarchical_all_reduce,
    in_network,
    parameter_server,
)
from cost_models.communication.nccl_protocols import CHOICES, NcclGroup, fastest_choice
from cost_models.communication.ring_and_tree import (
    COLLECTIVE_START,
    ring_all_reduce,
    tree_all_reduce,
)
from cost_models.communication.seconds import achieved
from cost_models.units import format_bytes, format_seconds
from hardware_profiles.cluster.links.groups import group_link, mean_hop_latency
from hardware_profiles.cluster.links.nvlink_domains import domains_spanned
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.nccl import nccl_tuning
from hardware_profiles.software.trainer import software_profile

CLUSTERS = ("8xA100-80GB", "8xH100-SXM-80GB", "16x8xA100-80GB")
SIZES = (2.0**14, 2.0**20, 1e9)
ORDER = (
    "parameter server",
    "ring",
    "tree",
    "direct, one shot",
    "direct, two shots",
    "in the switches (NVLS)",
    "hierarchical",
    "hierarchical, SHARP between nodes",
    "as training is priced",
)


def seconds(cluster_name: str, size: float) -> Mapping[str, float]:
    """Return the seconds of one all-reduce over all accelerators, by algorithm."""
    software = software_profile("shardplan")
    cluster = parse_cluster(cluster_name)
    ranks, each = cluster.num_gpus, cluster.gpus_per_node
    reached = achieved(
        cluster, software.communication.bus_efficiency, software.communication.network_efficiency
    )
    ring, latency = (float(x) for x in group_link(reached, ranks, 1))
    hop = float(mean_hop_latency(reached, ranks, 1))
    inner = reached.tiers[0]
    outer = reached.tiers[-1]
    link = outer.bandwidth.value if cluster.num_nodes > 1 else inner.bandwidth.value
    found = {
        "parameter server": float(parameter_server(size, ranks, link, latency)),
        "ring": float(ring_all_reduce(size, ranks, ring, hop)),
        "tree": float(tree_all_reduce(size, ranks, ring, latency)),
    }
    if cluster.num_nodes == 1:
        found["direct, one shot"] = float(direct_one_shot(size, ranks, link, latency))
        found["direct, two shots"] = float(direct_two_shot(size, ranks, link, latency))
    else:
        found["hierarchical"] = float(
            hierarchical_all_reduce(
                size,
                each,
                cluster.num_nodes,
                inner.bandwidth.value,
                outer.bandwidth.value,
                inner.latency.value,
                outer.latency.value,
            )
        )
        found["hierarchical, SHARP between nodes"] = float(
            hierarchical_all_reduce(
                size, each, 1, inner.bandwidth.value, 1.0, inner.latency.value, 0.0
            )
            + in_network(size / each, cluster.num_nodes, link, outer.latency.value)
        )
    if cluster.num_nodes == 1 and cluster.accelerator.architecture in (
        nccl_tuning().nvls_architectures
    ):
        found["in the switches (NVLS)"] = float(in_network(size, ranks, link, latency))
    trained = min(found["ring"], found["tree"]) + COLLECTIVE_START
    found["as training is priced"] = trained
    return found


def by_nccl(cluster_name: str, size: float) -> tuple[float, str]:
    """Return what NCCL's own model takes, and its choice."""
    software, cluster = software_profile("shardplan"), parse_cluster(cluster_name)
    reached = achieved(
        cluster, software.communication.bus_efficiency, software.communication.network_efficiency
    )
    ring, _ = group_link(reached, cluster.num_gpus, 1)
    nodes = domains_spanned(cluster, cluster.num_gpus, 1)
    architecture = cluster.accelerator.architecture
    group = NcclGroup(cluster.num_gpus, int(nodes), float(ring), "nvlink", architecture)
    least, index = fastest_choice("all_reduce", size, group)
    return float(least), " ".join(CHOICES[int(index)])


def table() -> list[str]:
    """Return the table of docs/explanation/collectives.md."""
    names = sorted(dict.fromkeys(n for c in CLUSTERS for n in seconds(c, 1e6)), key=ORDER.index)
    heads = [f"{c}, {format_bytes(s) if s < 1e9 else '1 GB'}" for c in CLUSTERS for s in SIZES]
    lines = ["| | " + " | ".join(heads) + " |", "| --- " * (1 + len(heads)) + "|"]
    for name in names:
        cells = [seconds(c, s).get(name) for c in CLUSTERS for s in SIZES]
        words = ["–" if cell is None else format_seconds(cell) for cell in cells]
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    chosen_words = [by_nccl(c, s) for c in CLUSTERS for s in SIZES]
    cells_ = [f"{format_seconds(least)} ({words})" for least, words in chosen_words]
    lines.append("| NCCL's own model | " + " | ".join(cells_) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
