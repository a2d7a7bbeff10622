import pytest

from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from planner.request.clusters import clusters_of, part_of, parts_of, split_clusters


def test_lists_and_ranges_are_split() -> None:
    assert split_clusters("8xA100-80GB") == ["8xA100-80GB"]
    assert split_clusters("8xA100-80GB, 8xA100-80GB") == ["8xA100-80GB"]
    assert split_clusters("2..4x8xH100-SXM,L40S:8") == [
        "2x8xH100-SXM",
        "3x8xH100-SXM",
        "4x8xH100-SXM",
        "L40S:8",
    ]
    assert split_clusters("../cluster.toml") == ["../cluster.toml"]


@pytest.mark.parametrize(
    "text",
    ["8xA100-80GB,", ",", "0..4xH100-SXM", "4..2xH100-SXM", "1..99999xH100-SXM", "1..4", "..x2",
     "1.." + "9" * 40 + "xH100"],
)  # fmt: skip
def test_a_bad_list_is_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        split_clusters(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["4x8xH100-SXM", "2xDGX-A100-80GB"])
def test_a_part_is_the_smaller_cluster_of_the_same_name(text: str) -> None:
    whole = parse_cluster(text)
    for number in (whole.num_gpus // 2, 8, 4, 1):
        part = part_of(whole, number)
        assert part.num_gpus == number
        assert part.tiers[-1].domain_size == number
        typed = parse_cluster(part.name)
        assert [t.domain_size for t in typed.tiers] == [t.domain_size for t in part.tiers]
        assert [t.bandwidth for t in typed.tiers] == [t.bandwidth for t in part.tiers]
        assert (typed.host_memory, typed.num_nodes) == (part.host_memory, part.num_nodes)
    assert part_of(whole, whole.num_gpus) is whole


def test_a_part_of_a_domain_that_spans_nodes_has_one_tier() -> None:
    rack = parse_cluster("2xgb200-nvl72")
    assert [t.domain_size for t in part_of(rack, 36).tiers] == [36]
    assert [t.domain_size for t in part_of(rack, 108).tiers] == [72, 108]


def test_parts_keep_to_the_limit() -> None:
    whole = parse_cluster("6x8xH100-SXM")
    assert [c.num_gpus for c in parts_of(whole)] == [48, 24, 16, 8, 4, 2, 1]
    assert [c.num_gpus for c in parts_of(whole, 44)] == [40, 24, 16, 8, 4, 2, 1]
    assert [c.num_gpus for c in parts_of(whole, 3)] == [2, 1]


def test_compared_clusters_are_read_as_single_ones() -> None:
    compared = clusters_of("16xL40S,8xH100")
    assert compared == [parse_cluster("16xL40S"), parse_cluster("8xH100")]
    with pytest.raises(InputError):
        clusters_of("12xL40S,8xH100")
