"""Boards held to fewer watts: matmuls of long runs slow down, memory does not."""

from dataclasses import replace

import pytest

from cost_models.compute.rates import rates
from hardware_profiles.cluster.cluster_json import cluster_from_dict, cluster_to_dict
from hardware_profiles.cluster.parse import accelerator_name, parse_cluster
from hardware_profiles.cluster.power_limit import with_power_limit
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.api.fit import fit
from planner.request.clusters import cluster_of, clusters_of, part_of
from planner.request.command import cluster_argument

SOFTWARE = software_profile("shardplan")


def test_an_h100_of_500_watts_is_three_tenths_slower_and_reads_memory_as_fast() -> None:
    board, held = (parse_cluster(f"8xH100-SXM{end}").accelerator for end in ("", "@500W"))
    full, less = (rates(chip, "bf16", SOFTWARE) for chip in (board, held))
    assert less.matmul / full.matmul == pytest.approx(5.0 / 7.0)
    assert less.memory == full.memory


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    board, held = (parse_cluster(f"8xA100-80GB{end}").accelerator for end in ("", "@380W"))
    assert rates(held, "bf16", SOFTWARE) == rates(board, "bf16", SOFTWARE)


def test_without_joules_a_flop_the_rate_falls_with_the_power() -> None:
    board, held = (parse_cluster(f"8xMI350X{end}").accelerator for end in ("", "@800W"))
    full, less = (rates(chip, "bf16", SOFTWARE).matmul for chip in (board, held))
    assert less / full == pytest.approx(0.8)


def test_option_and_cluster_argument_are_one_and_survive_plan_files_and_parts() -> None:
    written = parse_cluster("2x8xH100-SXM@500W")
    option = cluster_of("2x8xH100-SXM", 500)
    assert option == written
    assert clusters_of("1..2x8xH100-SXM", 500.0)[1].accelerator == written.accelerator
    assert clusters_of("8xH100-SXM@500W,8xA100-80GB")[1].accelerator.power_limit is None
    assert cluster_from_dict(cluster_to_dict(written), "plan.json").accelerator.watts == (
        written.accelerator.watts
    )
    half = part_of(written, 8)
    assert cluster_argument(half) == "8xH100-SXM-80GB@500W"
    assert parse_cluster(half.name).accelerator == written.accelerator
    assert accelerator_name("16x8xH100@500W") == "H100"


@pytest.mark.parametrize("watts", [100, 701, 1000000])
def test_a_power_that_the_board_does_not_take_is_refused(watts: float) -> None:
    with pytest.raises(InputError, match=rf"--power {watts}: H100-SXM-80GB takes 175 to 700"):
        cluster_of("8xH100-SXM", watts)


def test_an_accelerator_of_unknown_power_is_refused() -> None:
    cluster = parse_cluster("8xH100-SXM")
    unknown = replace(cluster, accelerator=replace(cluster.accelerator, power=None))
    with pytest.raises(InputError, match="its power is not known"):
        with_power_limit(unknown, 500.0)


def test_the_next_command_keeps_the_limit_in_the_name_of_the_cluster() -> None:
    plan = {"data_parallel": 8, "zero_stage": 1, "recompute": "full", "micro_batch_size": 1}
    answer = fit("llama-3.2-1b", "8xH100-SXM", power=500.0, **plan)
    assert "shardplan plan llama-3.2-1b 8xH100-SXM@500W " in answer.text()
