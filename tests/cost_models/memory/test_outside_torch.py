"""Memory outside torch's allocator, against published measurements."""

from typing import Any

import numpy as np
import pytest

from cost_models.memory.outside_torch import communicator_bytes, context_bytes, outside_bytes
from cost_models.plan.plan import Plan, PlanTable
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile

MIB = 2.0**20


def communicators(cluster: str, **plan: Any) -> float:
    table = PlanTable.from_plans([Plan(**plan)])
    return float(np.ravel(communicator_bytes(parse_cluster(cluster), table))[0])


@pytest.mark.parametrize(("ranks", "published"), [(2, 544), (3, 688), (4, 688)])
def test_a_communicator_on_a100(ranks: int, published: float) -> None:
    """NVIDIA/nccl#964: 544 MB with two ranks, 688 MB with more."""
    found = communicators(f"{ranks}xA100-SXM-80GB", data_parallel=ranks)
    assert found / MIB == pytest.approx(published, rel=1e-3)


def test_an_exchange_between_all_ranks_of_a_node() -> None:
    """NVIDIA/nccl#1685: 3.28 GB more after the first all-to-all of eight H100."""
    usual = communicators("8xH100-SXM-80GB", data_parallel=8)
    experts = communicators("8xH100-SXM-80GB", data_parallel=8, expert_parallel=8)
    assert 3.2e9 < experts - usual < 5.0e9


def test_every_axis_has_a_communicator_and_all_ranks_together() -> None:
    one = communicators("8xA100-SXM-80GB", tensor_parallel=8)
    two = communicators("8xA100-SXM-80GB", tensor_parallel=4, data_parallel=2)
    assert one / MIB == pytest.approx(688, rel=1e-3)
    assert two / MIB == pytest.approx(544 + 688 + 688, rel=1e-3)
    assert communicators("1xA100-SXM-80GB") == 0.0
    assert communicators("8xL40S", tensor_parallel=8) < one / 5  # channels on PCIe


def test_memory_on_several_nodes_does_not_grow_with_their_number() -> None:
    """NVIDIA/nccl#986: beyond two nodes it no longer increases."""
    few = communicators("2x8xH100-SXM-80GB", data_parallel=16)
    assert communicators("64x8xH100-SXM-80GB", data_parallel=512) == few


def test_the_context_depends_on_the_generation() -> None:
    software = software_profile("shardplan")
    assert context_bytes(software, "Volta") < context_bytes(software, "Hopper")
    assert context_bytes(software, "Ada") == context_bytes(software, "no such generation")
    table = PlanTable.from_plans([Plan()])
    found = outside_bytes(software, parse_cluster("1xH100-SXM-80GB"), table)
    assert float(np.ravel(found)[0]) == context_bytes(software, "Hopper")
