"""Planning again for what is left of a cluster."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models.plan_file import read_plan_file, write_plan_file
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.subset import part_of
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.cli import app as cli
from planner.runs import replan as module
from planner.runs.replan import replan

MODEL = "llama-3-8b"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    answer = planner.plan(MODEL, "3x8xH100-SXM", seq_len=2048, global_batch_size=48, top=1)
    write_plan_file(path, answer.plan_file())
    return path


@pytest.mark.slow
def test_two_of_three_nodes_keep_the_batch(plan: Path) -> None:
    before, answer = read_plan_file(plan), replan(plan, 16)
    assert answer.notes == ()
    file = answer.file
    assert (file.cluster.num_nodes, file.cluster.num_gpus, file.plan.world_size) == (2, 16, 16)
    assert file.workload == before.workload
    assert file.model.config == before.model.config
    assert file.plan.global_batch_size == 48
    assert file.prediction["time"]["step_seconds"] > before.prediction["time"]["step_seconds"]


@pytest.mark.slow
def test_a_batch_that_cannot_be_kept_is_said(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.search

    def refuse(scenario: Scenario, **options: Any) -> Any:
        found = original(scenario, **options)
        return replace(found, plans=()) if scenario.workload.global_batch_size == 48 else found

    monkeypatch.setattr(module, "search", refuse)
    with pytest.raises(NoLegalPlanError):
        replan(plan, 16)  # 48 is a multiple of 16: there is no nearer batch
    monkeypatch.setattr(module, "_batches", lambda wanted, _: iter((wanted, 32)))
    left = replan(plan, 16)
    assert left.file.plan.global_batch_size == left.file.workload.global_batch_size == 32
    assert left.notes[0].startswith("global_batch_size 48 -> 32: no plan for 16 accelerators")


def test_the_nearest_batch_gives_every_rank_a_share() -> None:
    assert list(module._batches(48, 16)) == [48]
    assert list(module._batches(50, 16)) == [50, 48]
    assert list(module._batches(3, 16)) == [3, 16]


@pytest.mark.slow
def test_nothing_fits_is_said(plan: Path) -> None:
    with pytest.raises(NoLegalPlanError, match="nothing fits 1 of its 24 accelerators"):
        replan(plan, 1)
    with pytest.raises(InputError, match=r"--gpus = 25 \(must be 1 to 24"):
        replan(plan, 25)


@pytest.mark.slow
def test_the_command_writes_a_plan_beside_the_old_one(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, before = tmp_path / "plan-for-16.json", plan.read_bytes()
    with pytest.raises(SystemExit) as stop:
        cli.main(["replan", str(plan), "--gpus", "16", "-o", str(new)])
    assert not stop.value.code
    wrote, found = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {new}"
    assert found.startswith("--dp 16 ")
    assert found.endswith(" a step")
    assert plan.read_bytes() == before
    assert read_plan_file(new).plan.world_size == 16
    with pytest.raises(SystemExit) as stop:
        cli.main(["replan", str(plan), "--gpus", "16", "-o", str(new)])
    assert stop.value.code == 2


def test_a_part_of_a_cluster_is_whole_nodes_or_less_than_one() -> None:
    cluster = parse_cluster("4x8xH100-SXM")
    assert part_of(cluster, 32).tiers == cluster.tiers
    part = part_of(cluster, 4)
    assert (part.num_nodes, part.gpus_per_node, part.num_gpus) == (1, 4, 4)
    assert [tier.domain_size for tier in part.tiers] == [4]
    with pytest.raises(InputError, match="12 accelerators of 4x8xH100-SXM"):
        part_of(cluster, 12)
