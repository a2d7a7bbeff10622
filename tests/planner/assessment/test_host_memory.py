"""The host's memory and drives are part of the verdict."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles.cluster.cluster_json import cluster_from_dict, cluster_to_dict
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster, Figure
from hardware_profiles.cluster.subset import part_of
from hardware_profiles.errors import NoLegalPlanError
from planner import fit, plan

ASKED: dict[str, Any] = {"seq_len": 512, "zero_stage": 3, "recompute": "full"}


def node(**sizes: float) -> Cluster:
    """Return eight accelerators beside a host of these sizes."""
    figures = {name: Figure(size, "assumed", "this test") for name, size in sizes.items()}
    sized: dict[str, Any] = {"host_memory": None, "nvme": None, **figures}
    return replace(parse_cluster("8xA100-80GB"), **sized)


def test_a_host_that_is_too_small_is_named() -> None:
    """16 bytes of 8 billion parameters: 128.5 GB."""
    small = fit("llama-3-8b", node(host_memory=128e9), offload="optimizer", **ASKED)
    assert small.verdict == "does_not_fit"
    words = " ".join(str(small).split())
    assert "DOES NOT FIT the host: 120 GiB of 107 GiB host memory of a node, short by" in words
    assert "it fits the accelerator: peak" in words
    assert small.assessment.host.short_of == "memory"
    large = fit("llama-3-8b", node(host_memory=256e9), offload="optimizer", **ASKED)
    assert large.verdict == "fits"
    assert "256" in " ".join(large.assumptions) or "238" in " ".join(large.assumptions)


@pytest.mark.slow
def test_drives_that_are_too_small_are_named() -> None:
    sizes = {"host_memory": 1e12, "nvme": 90e9}
    options = {**ASKED, "offload": "weights", "offload_device": "nvme"}
    answer = fit("llama-3-8b", node(**sizes), **options)
    assert answer.verdict == "does_not_fit"
    assert "of 83.8 GiB NVMe drives of a node, short by" in " ".join(str(answer).split())
    assert fit("llama-3-8b", node(**{**sizes, "nvme": 1e12}), **options).verdict == "fits"


def test_an_unknown_host_is_not_checked_and_that_is_said() -> None:
    answer = fit("llama-3-8b", node(), offload="optimizer", **ASKED)
    assert answer.verdict == "fits"
    assert "not known, so not checked" in " ".join(answer.assumptions)
    assert "host memory for it, which is not known" in " ".join(str(answer).split())
    asked = plan("llama-3-8b", node(), fix="offload=optimizer", seq_len=2048)
    assert "host memory for it, which is not known" in " ".join(str(asked).split())


@pytest.mark.slow
def test_drives_are_a_way_out_of_a_host_that_is_too_small() -> None:
    answer = fit("llama-3.1-405b", "8xH200", offload="weights", **ASKED)
    assert answer.assessment.is_short_on_the_host_alone
    assert any("--offload-device nvme" in way.options for way in answer.ways_out)


@pytest.mark.slow
def test_the_search_refuses_what_the_host_cannot_hold() -> None:
    asked = {"seq_len": 512, "fix": "offload=optimizer", "top": 1}
    with pytest.raises(NoLegalPlanError, match="too large for the host"):
        plan("llama-3-8b", node(host_memory=1e9), **asked)
    assert plan("llama-3-8b", node(host_memory=1e12), **asked).best


def test_the_catalogue_knows_the_hosts_of_usual_nodes() -> None:
    whole = parse_cluster("8xA100-80GB").host_memory
    part = parse_cluster("2xA100-80GB").host_memory
    assert whole is not None
    assert part is not None
    assert whole.value == 4 * part.value == 2e12
    two = part_of(parse_cluster("8xA100-80GB"), 2).host_memory
    assert two is not None
    assert two.value == part.value


def test_a_file_says_what_a_host_has(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'nodes = 1\ngpus_per_node = 8\naccelerator = "A100-SXM-80GB"\n'
        '[host]\nmemory = 1e12\nnvme = 7e12\nsource = "ours"\n'
    )
    cluster = parse_cluster(str(path))
    assert cluster.host_memory == Figure(1e12, "assumed", "ours")
    assert cluster.nvme == Figure(7e12, "assumed", "ours")
    assert cluster_from_dict(cluster_to_dict(cluster), "x") == cluster
