"""Files of other trainers: what is written is read back as the same plan, for every target."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from cost_models.legality.capabilities import all_capabilities, capabilities
from cost_models.legality.rules import legality_codes
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.api.export import export
from planner.exchange.job import Job
from planner.exchange.names import target_names
from planner.exchange.registry import kind_of, target
from planner.request.model import resolve_model
from planner.search.space import enumerate_plans
from tests.samples import make_scenario

CLUSTER, RANKS = "2x4xH100-SXM", 8
DRAWN = 3_000  # legal plans, of which each target takes some that it runs
OFFLOADS = ("none", "optimizer", "weights")
MODELS = {"qwen2.5-0.5b": 4096, "mixtral-8x7b": 8192}


@cache
def legal_plans(model_name: str) -> tuple[Scenario, PlanTable]:
    """Return all legal plans of a model."""
    model, cluster = resolve_model(model_name), parse_cluster(CLUSTER)
    workload = Workload(seq_len=MODELS[model_name], global_batch_size=8)
    scenario = Scenario(model, cluster, workload, software_profile("torch-trainer"))
    table = enumerate_plans(model, workload, RANKS, {}, offloads=OFFLOADS)
    rows = np.flatnonzero(legality_codes(scenario, table) == 0)
    return scenario, table.rows(np.random.default_rng(0).choice(rows, min(DRAWN, len(rows)), False))


def files_of(name: str, model_name: str, count: int) -> list[PlanFile]:
    """Return plans that a target runs, spread over all legal ones, as plan files."""
    scenario, table = legal_plans(model_name)
    model, cluster, workload = scenario.model, scenario.cluster, scenario.workload
    table = table.rows(capabilities(name).runnable(table, experts=model.has_experts))
    rows = np.unique(np.linspace(0, len(table) - 1, count).astype(int))
    return [
        PlanFile(model, cluster, workload, plan, default_layer_ranges(scenario, plan))
        for plan in table.rows(rows)
    ]


def plan_of(settings: Mapping[str, Any]) -> Plan:
    """Return the plan that options state: the data-parallel ranks are those that are left."""
    parts = {f.name: settings[f.name] for f in fields(Plan) if f.name in settings}
    assert parts.keys() >= {"zero_stage", "recompute", "tensor_parallel", "micro_batch_size"}
    plan = Plan(**parts)
    data = RANKS // (plan.tensor_parallel * plan.pipeline_parallel * plan.context_parallel)
    count = settings["global_batch_size"] // (data * plan.micro_batch_size)
    return replace(plan, data_parallel=data, num_microbatches=count)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", target_names())
def test_a_written_file_is_read_back_as_the_same_plan(
    name: str, model: str, tmp_path: Path
) -> None:
    one = target(name)
    families = capabilities(name).families
    if families and resolve_model(model).family not in families:
        pytest.skip(f"{name} has no {model}")
    for file in files_of(name, model, 12):
        assert not capabilities(name).problems(file.plan, file.workload)
        texts = one.write(Job(file), "1")
        for path, content in texts.items():
            (tmp_path / path).write_text(content)
        text = texts[one.file]
        assert kind_of(text, one.file).name == name
        read = one.read(text, one.file, tmp_path)
        assert (read.unknown, read.notes) == ((), ())
        assert plan_of(read.settings) == file.plan, text
        given = {k: v for k, v in read.settings.items() if hasattr(file.workload, k)}
        assert replace(file.workload, **given) == file.workload, text
        assert {"global_batch_size", "precision", "seq_len"} <= given.keys(), text


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "lightning", "transformers"])
def test_lengths_of_targets_are_left_to_the_script_and_read_back(name: str, tmp_path: Path) -> None:
    model, cluster = resolve_model("t5-small"), parse_cluster("8xH100-SXM")
    workload, plan = Workload(512, 8, target_seq_len=128), Plan(data_parallel=8)
    ranges = default_layer_ranges(make_scenario(model, "8xH100-SXM"), plan)
    one = target(name)
    texts = one.write(Job(PlanFile(model, cluster, workload, plan, ranges)), "1")
    for path, content in texts.items():
        (tmp_path / path).write_text(content)
        assert "CausalLM" not in content
    assert one.read(texts[one.file], one.file, tmp_path).settings["target_seq_len"] == 128


def test_a_table_and_a_single_plan_agree_on_limits() -> None:
    model, cluster = resolve_model("qwen2.5-0.5b"), parse_cluster(CLUSTER)
    workload = Workload(seq_len=4096, global_batch_size=8)
    table = enumerate_plans(model, workload, cluster.num_gpus, {}, offloads=("none", "weights"))
    table = table.rows(np.arange(0, len(table), max(1, len(table) // 300)))
    for name, one in all_capabilities().items():
        alone = [not one.problems_of_plan(plan) for plan in table]
        assert alone == one.runnable(table).tolist()
        assert one.runnable(table).any() or name == "peft"  # of one GPU
        eager = replace(workload, attention_kernel="eager")
        assert not one.problems(Plan(), workload) or not one.problems(Plan(), eager)


FSDP_SCRIPT = """
import lightning as L
from lightning.pytorch.strategies import FSDPStrategy
class Data(L.LightningDataModule):
    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=64)
    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=2, shuffle=True)
def main():
    strategy = FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", activation_checkpointing={Block})
    L.Trainer(devices=8, precision="bf16-true", strategy=strategy, accumulate_grad_batches=4).fit(m)
"""
CLI = """
trainer:
  devices: 8
  precision: 16-mixed
  strategy: {class_path: lightning.pytorch.strategies.DeepSpeedStrategy, init_args: {stage: 3}}
  no_such_argument: 1
data: {class_path: my.Data, init_args: {batch_size: 4}}
"""


@pytest.mark.parametrize(
    ("text", "expected", "unknown"),
    [
        (
            FSDP_SCRIPT,
            {"zero_stage": 2, "recompute": "full", "micro_batch_size": 2, "num_microbatches": 4}
            | {"precision": "bf16", "master_weights": False},
            (),
        ),
        (
            CLI,
            {"zero_stage": 3, "micro_batch_size": 4, "precision": "fp16"},
            ("trainer.no_such_argument",),
        ),
        (
            "import pytorch_lightning as pl\npl.Trainer(strategy='deepspeed_stage_2_offload')",
            {"zero_stage": 2, "offload": "optimizer", "precision": "fp32"},
            (),
        ),
    ],
)
def test_trainers_of_lightning_are_read(
    text: str, expected: dict[str, Any], unknown: tuple[str, ...]
) -> None:
    found = kind_of(text, "x").read(text, "x")
    assert (found.target, found.unknown, found.notes) == ("lightning", unknown, ())
    assert {name: found.settings.get(name) for name in expected} == expected


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "accelerate"])
def test_a_search_for_a_target_is_priced_with_the_profile_of_the_target(name: str) -> None:
    answer = planner.plan("qwen2.5-0.5b", "2xH100-SXM", to=name, require="zero=0")
    (software,) = {answer.scenario.software.name}
    assert software == capabilities(name).software_for(0)
    assert answer.result.plans[0].zero_stage == 0


def test_accelerate_does_not_shard_over_cpus() -> None:
    scenario, _ = legal_plans("qwen2.5-0.5b")
    cpus = replace(
        scenario.cluster, accelerator=replace(scenario.cluster.accelerator, device="cpu")
    )
    file = files_of("accelerate", "qwen2.5-0.5b", 1)[0]
    for stage in (0, 3):
        job = Job(replace(file, cluster=cpus, plan=Plan(data_parallel=RANKS, zero_stage=stage)))
        if stage:
            with pytest.raises(InputError, match=r"on CPUs: .* --fix zero=0"):
                target("accelerate").write(job, "1")
        else:
            assert "use_cpu: true" in target("accelerate").write(job, "1")["accelerate.yaml"]


def test_deepspeed_pins_what_is_offloaded() -> None:
    file = files_of("deepspeed", "qwen2.5-0.5b", 12)[0]
    for offload in ("none", "optimizer"):
        plan = replace(file.plan, zero_stage=2, offload=offload)
        texts = target("deepspeed").write(Job(replace(file, plan=plan)), "1")
        zero = json.loads(texts[target("deepspeed").file])["zero_optimization"]
        pinned = zero.get("offload_optimizer", {}).get("pin_memory")
        assert pinned is (True if offload == "optimizer" else None)


def test_the_module_of_lightning_keeps_its_model() -> None:
    torch = pytest.importorskip("torch")
    files = files_of("lightning", "qwen2.5-0.5b", 12)
    file = next(one for one in files if one.plan.tensor_parallel == 1)
    text = target("lightning").write(Job(file), "1")
    made = text["lightning_model.py"].partition("class LanguageModel")[2]
    loader = (
        "class Auto:\n    from_pretrained = staticmethod(lambda *_, **__: torch.nn.Linear(1, 1))"
    )
    names = {"LightningModule": torch.nn.Module, "torch": torch, "MODEL": "x"}
    exec(f"{loader}\nAutoModelForCausalLM = Auto\nclass LanguageModel{made}", names)
    module = names["LanguageModel"]()
    module.configure_model()
    assert isinstance(module.model, torch.nn.Linear)


def test_modules_of_forks_are_no_flags_of_megatron_core() -> None:
    cluster, workload = parse_cluster("8xH100-SXM"), Workload(4096, 8)
    plan = Plan(8, zero_stage=1, recompute="modules:layernorm+attn")
    model = resolve_model("llama-3-8b")
    scenario = Scenario(model, cluster, workload, software_profile("megatron"))
    file = PlanFile(model, cluster, workload, plan, default_layer_ranges(scenario, plan))
    with pytest.raises(InputError, match="Megatron Core has no modules attn and experts"):
        export(file, "megatron")


@pytest.mark.slow
def test_a_refused_plan_names_the_nearest_one_and_it_fits() -> None:
    """Replicas with optimizer shards would be faster, but only tight."""
    cluster = parse_cluster("8xA100-80GB")
    workload = Workload(seq_len=8192, global_batch_size=256)
    plan = Plan(2, pipeline_parallel=4, zero_stage=1, num_microbatches=128)
    scenario = Scenario(
        resolve_model("llama-3-8b"), cluster, workload, software_profile("shardplan")
    )
    ranges = default_layer_ranges(scenario, plan)
    with pytest.raises(InputError, match=r"pipeline_parallel = 4 \(it runs 1\)") as raised:
        export(PlanFile(scenario.model, cluster, workload, plan, ranges), "accelerate")
    words = str(raised.value)
    assert "The nearest that it runs: --dp" in words
    assert " a step under " in words  # a time of that trainer, which the plan's own is not
    assert ", tight)" not in words
    assert words.endswith("--to accelerate -o plan.json")
