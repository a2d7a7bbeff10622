from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from planner.api.fit import fit
from planner.request.command import cluster_argument, describe_plan, plan_command
from tests.samples import make_scenario


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"precision": "fp32"}, ["--precision", "fp32"]),
        ({"optimizer": "sgd"}, ["--optimizer", "sgd"]),
        ({"attention_kernel": "eager"}, ["--attention", "eager"]),
        ({"software": "megatron"}, ["--software", "megatron"]),
        ({"offload": "optimizer"}, ["--fix", "offload=optimizer"]),
        (
            {"offload": "weights", "offload_device": "nvme"},
            ["--fix", "offload=weights,offload_device=nvme"],
        ),
    ],
)
def test_the_next_command_asks_the_same_question(options: dict[str, Any], said: list[str]) -> None:
    answer = fit("llama-3.2-1b", "8xA100-80GB", **options)
    words = shlex.split(plan_command(answer.scenario, answer.plan))
    assert words[:4] == ["shardplan", "plan", "llama-3.2-1b", "8xA100-80GB"]
    assert words[4:-2] == said
    given = fit("llama-3.2-1b", "8xA100-80GB", seq_len=512, global_batch_size=32, **options)
    words = shlex.split(plan_command(given.scenario, given.plan))
    assert words[4:-2] == ["--seq-len", "512", "--global-batch-size", "32", *said]


def test_names_with_spaces_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(
        Path("examples/tiny-llama/config.json").read_text(encoding="utf-8")
    )
    command = plan_command(fit(str(folder), "1xA100-80GB").scenario, Plan())
    assert shlex.split(command)[2] == str(folder)
    assert shlex.split(plan_command(fit("7b", "8xA100-80GB").scenario, Plan()))[2] == "7b"


def test_only_a_cluster_of_the_grammar_has_a_name_to_type() -> None:
    cluster = make_scenario().cluster
    assert cluster_argument(cluster) == "8xA100-80GB"


def test_every_part_of_a_plan_is_an_option() -> None:
    plan = Plan(
        8,
        2,
        2,
        2,
        "interleaved_1f1b",
        1,
        True,
        "full",
        2,
        4,
        2,
        2,
        "ulysses",
        4,
        False,
        recompute_layers=3,
    )
    assert describe_plan(plan) == (
        "--dp 8 --tp 2 --sp --pp 2 --schedule interleaved_1f1b --virtual-stages 2 "
        "--dp-replicate 2 --cp 2 --cp-method ulysses --ep 4 --no-etp --zero 1 --recompute full "
        "--recompute-layers 3 --micro-batch-size 2"
    )
