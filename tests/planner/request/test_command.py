import shlex
from pathlib import Path
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from hardware_profiles.command_line.declarations import command
from hardware_profiles.command_line.usage import parse
from hardware_profiles.options import declared
from planner.api.fit import fit
from planner.request.command import cluster_argument, describe_plan, plan_command
from planner.request.requests import FitRequest, PlanRequest
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


EXAMPLES: dict[str, dict[str, Any]] = {
    "global_batch_size": {"global_batch_size": 32},
    "precision": {"precision": "fp16"},
    "optimizer": {"optimizer": "lion"},
    "seq_len": {"seq_len": 1024},
    "target_seq_len": {"target_seq_len": 114, "model": "t5-small"},
    "optimizer_rank": {"optimizer_rank": 16, "optimizer": "galore_adamw", "zero_stage": 0},
    "optimizer_state_precision": {"optimizer_state_precision": "bf16"},
    "gradient_precision": {"gradient_precision": "bf16"},
    "master_weights": {"master_weights": False},
    "attention_kernel": {"attention_kernel": "eager"},
    "software": {"software": "megatron-core"},
    "freeze": {"freeze": "embedding,head"},
    "layers": {"layers": "7,9", "data_parallel": 4, "pipeline_parallel": 2},
    "lora": {"lora": 8},
    "qlora": {"qlora": 8},
    "adapter_method": {"adapter_method": "dora", "lora": 8, "software": "hf-trainer"},
    "lora_alpha": {"lora_alpha": 5.0, "lora": 8},
    "lora_targets": {"lora_targets": "q,v", "lora": 8},
    "quantisation": {"quantisation": "nf4_double", "qlora": 8},
    "price": {"price": "H100-SXM-80GB=3", "tokens": "300B"},
    "tokens": {"tokens": "300B"},
    "compute_optimal": {"compute_optimal": True},
    "carbon": {"carbon": 300.5, "tokens": "3B"},
    "failures": {"failures": "mtbf=50000,restart=11", "tokens": "300B"},
}
OF_ALL = {"model", "cluster", "inputs", "source"}  # the subject; of modules; read into others
OF_CLUSTER = {"power"}  # part of its name in the next command: test_power_limit.py
OF_SOFTWARE = {"optimizer_kernel", "gradient_copy"}  # parts of its name in the next command


@pytest.mark.parametrize(
    "name",
    sorted(
        (set(declared(FitRequest)) & set(declared(PlanRequest))) - OF_ALL - OF_SOFTWARE - OF_CLUSTER
    ),
)
def test_the_next_command_keeps_every_option_that_plan_takes(name: str) -> None:
    given = EXAMPLES[name]
    plan = {"data_parallel": 8, "zero_stage": 1, "recompute": "full", "micro_batch_size": 1}
    model = given.get("model", "llama-3.2-1b")
    answer = fit(**{**plan, "cluster": "8xH100-SXM", **given, "model": model})
    _, following = answer.text().split("Next       shardplan plan ")
    words = shlex.split(following.replace("\\\n", ""))[:-2]
    asked = vars(parse(command(PlanRequest, name="plan", help=""), words, "shardplan plan"))
    for one in ("model", "cluster", *(set(given) & set(declared(PlanRequest)))):
        wanted = {"model": model, "cluster": "8xH100-SXM"}.get(one, given.get(one))
        assert str(asked[one]) == str(wanted), one


def test_engines_that_options_name_are_part_of_the_software() -> None:
    options = {"software": "hf-trainer", "optimizer_kernel": "fused", "gradient_copy": True}
    answer = fit("llama-3.2-1b", "8xH100-SXM", zero_stage=1, **options)
    assert "--software hf-trainer+adamw-fused+copied-gradients" in answer.text()


@pytest.mark.slow
def test_the_next_command_leaves_out_what_plan_does_not_take() -> None:
    answer = fit("llama-3.2-1b", "8xH100-SXM", pipeline_parallel=2, recompute_layers="3,4")
    assert answer.plan.recompute == "full"
    assert "--recompute" not in answer.text().split("Next")[1]


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
