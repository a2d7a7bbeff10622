"""Written files against the targets' own classes, where their packages are installed.

CI installs them into an environment of its own and sets SHARDPLAN_EXPORT_TESTS: then a missing
package is an error.
"""

import ast
import importlib
import importlib.metadata
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from planner.exchange.job import Job
from planner.exchange.keys import placed
from planner.exchange.megatron_fields import CARRIES, fields_of
from planner.exchange.megatron_model import model_fields
from planner.exchange.registry import target
from planner.exchange.syntax.python_document import CALL
from planner.exchange.targets.megatron import OF_MODEL
from tests.planner.exchange.test_targets import MODELS, RANKS, files_of

# fields of the program's parser alone, and those that it renames
pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core deprecates its own defaults
OF_PARSER = {
    *(
        "micro_batch_size",
        "global_batch_size",
        "seq_length",
        "vocab_size",
        "max_position_embeddings",
    ),
    *("position_embedding_type", "rotary_base", "rotary_percent", "optimizer_offload_fraction"),
    *("untie_embeddings_and_output_weights", "optimizer"),
}


def package(name: str) -> ModuleType:
    """Return a module of a target; the test is skipped without it, but not in CI."""
    if os.environ.get("SHARDPLAN_EXPORT_TESTS"):
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name)
    return module


def document_of(name: str, job: Job) -> dict[str, Any]:
    """Return the document of a written file."""
    one = target(name)
    return one.syntax.parse(one.write(job, "1")[one.file], one.file)


def without_call(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != CALL}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_torchtitan_takes_its_sections(model: str) -> None:
    configs = package("torchtitan.config.configs")
    for file in files_of("torchtitan", model, 40):
        document = placed(target("torchtitan").leaves(Job(file)))
        parallel = configs.ParallelismConfig(**without_call(document["parallelism"]))
        training = configs.TrainingConfig(**without_call(document["training"]))
        configs.CompileConfig(**without_call(document["compile"]))
        data = parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree
        assert training.global_batch_size % (training.local_batch_size * data) == 0
        if parallel.pipeline_parallel_degree > 1:
            assert training.local_batch_size % parallel.pipeline_parallel_microbatch_size == 0
            parts = parallel.module_fqns_per_model_part
            assert len(parts) % parallel.pipeline_parallel_degree == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["megatron", "megatron-bridge", "nemo"])
def test_megatron_core_takes_the_fields(name: str, model: str) -> None:
    core = package("megatron.core")
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    assert core.__version__
    known = {
        cls: {f.name for f in fields(cls)}
        for cls in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    }
    for file in files_of(name, model, 24):
        job = Job(file)
        given = {**model_fields(job.model), **fields_of(job)}
        given = {key: value for key, value in given.items() if value is not None}
        given |= {"pipeline_dtype": torch.bfloat16, "bf16": given["bf16"]}
        given.pop("activation")
        # with it, megatron-core 0.16.1 compares the version of Transformer Engine, which needs CUDA
        given["use_precision_aware_optimizer"] = given["optimizer_cpu_offload"] = False
        for cls, names in known.items():
            cls(**{key: value for key, value in given.items() if key in names})
        everywhere = set().union(*known.values())
        assert given.keys() <= everywhere | OF_PARSER


@pytest.mark.slow
def test_flags_are_fields_of_megatron_core() -> None:
    package("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    classes = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    known = {field.name for cls in classes for field in fields(cls)}
    assert {*CARRIES, *OF_MODEL} <= known | OF_PARSER


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_lightning_takes_the_trainer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = package("lightning.pytorch")
    from inspect import signature

    from lightning.fabric.connector import _convert_precision_to_unified_args
    from lightning.pytorch import strategies

    real, made = lightning.Trainer, list[dict[str, Any]]()
    monkeypatch.setattr(lightning, "Trainer", lambda **arguments: made.append(arguments))
    deepspeed = list[dict[str, Any]]()
    if not strategies.deepspeed._DEEPSPEED_AVAILABLE:
        known = signature(strategies.DeepSpeedStrategy).bind
        monkeypatch.setattr(
            strategies, "DeepSpeedStrategy", lambda **given: deepspeed.append(known(**given))
        )
    for file in files_of("lightning", model, 24):
        texts = target("lightning").write(Job(file), "1")
        compile(texts["lightning_model.py"], "lightning_model.py", "exec")
        module: dict[str, Any] = {"__name__": "lightning_trainer"}
        exec(texts["lightning_trainer.py"], module)
        module["make_trainer"]()
        assert module["make_loader"]([1, 2]).batch_size == file.plan.micro_batch_size
        given = made[-1]
        signature(real).bind(**given)
        assert _convert_precision_to_unified_args(given["precision"]) == given["precision"]
        if isinstance(given["strategy"], strategies.DDPStrategy):
            real(**{**given, "accelerator": "cpu", "num_nodes": 1})


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_deepspeed_takes_the_file(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = package("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *group: RANKS)
    for file in files_of("deepspeed", model, 24):
        document = document_of("deepspeed", Job(file))
        document.pop("shardplan")
        read = config.DeepSpeedConfig(document)  # checks the batch, and the keys of its sections
        assert read.zero_config.stage == file.plan.zero_stage
        assert read.train_micro_batch_size_per_gpu == file.plan.micro_batch_size
        assert read.gradient_accumulation_steps == file.plan.num_microbatches
        offloads = read.zero_config.offload_optimizer
        assert (offloads is not None) == file.plan.offloads_optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning")  # of deprecated arguments
@pytest.mark.parametrize("model", MODELS)
def test_transformers_takes_the_arguments(model: str) -> None:
    package("accelerate")
    package("deepspeed")
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    for file in files_of("transformers", model, 24):
        document = document_of("transformers", Job(file))
        (read,) = parser.parse_dict({**document, "use_cpu": True})
        assert read.per_device_train_batch_size == file.plan.micro_batch_size
        assert read.gradient_accumulation_steps == file.plan.num_microbatches
        if read.fsdp:
            assert read.fsdp_config["reshard_after_forward"] == (file.plan.zero_stage == 3)
        else:
            stage = json.loads(json.dumps(read.deepspeed or {})).get("zero_optimization", {})
            assert stage.get("stage", 0) == file.plan.zero_stage


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_accelerate_takes_the_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = package("accelerate.commands.launch")
    package("deepspeed")
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    parser = launch.launch_command_parser()
    known = vars(parser.parse_args(["train.py"]))
    started = list[Any]()
    for name in ("deepspeed_launcher", "multi_gpu_launcher"):
        monkeypatch.setattr(launch, name, started.append)
    for file in files_of("accelerate", model, 24):
        plan = file.plan
        path = tmp_path / "accelerate.yaml"
        path.write_text(target("accelerate").write(Job(file), "1")["accelerate.yaml"])
        document = document_of("accelerate", Job(file))
        assert {*document.get("fsdp_config", {}), *document.get("parallelism_config", {})} <= {
            *known
        }
        launch.launch_command(parser.parse_args(["--config_file", str(path), "train.py"]))
        read = started[-1]
        assert read.num_processes == RANKS
        with monkeypatch.context() as patched:
            if read.use_deepspeed:
                _, variables = prepare_deepspeed_cmd_env(read)
            else:
                variables = prepare_multi_gpu_env(read)
            for name, value in variables.items():
                if name not in os.environ:
                    patched.setenv(name, value)
            if read.use_deepspeed:
                assert DeepSpeedPlugin().zero_stage == plan.zero_stage
            elif read.use_fsdp:
                plugin = FullyShardedDataParallelPlugin()
                assert plugin.fsdp_version == 2
                assert plugin.reshard_after_forward == (plan.zero_stage == 3)
                assert plugin.activation_checkpointing == (plan.recompute == "full")
            if "parallelism_config" in document:
                degrees = ParallelismConfig()
                assert degrees.total_size == RANKS
                assert degrees.tp_size == plan.tensor_parallel
                assert degrees.cp_size == plan.context_parallel


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_axolotl_takes_the_file(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    validate = package("axolotl.utils.config").validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from axolotl.utils.schemas.fsdp import FSDPConfig

    monkeypatch.setitem(sys.modules, "ring_flash_attn", ModuleType("ring_flash_attn"))
    gpu = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": RANKS, "n_node": 1}
    for file in files_of("axolotl", model, 16):
        document = document_of("axolotl", Job(file))
        # unknown keys pass its validation
        assert document.keys() <= AxolotlInputConfig.model_fields.keys()
        assert document.get("fsdp_config", {}).keys() <= FSDPConfig.model_fields.keys()
        data = {"datasets": [{"path": "x", "type": "alpaca"}], "learning_rate": 1e-4}
        read = validate(
            DictDefault({**document, **data}),
            capabilities={**gpu, "compute_capability": "sm_90"},
            env_capabilities={"torch_version": "2.13.0"},
        )
        assert read.micro_batch_size == file.plan.micro_batch_size
        assert (read.tensor_parallel_size or 1) == file.plan.tensor_parallel
        assert (read.context_parallel_size or 1) == file.plan.context_parallel


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_llamafactory_takes_the_file(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # of packages that its arguments do not need
    parser = package("llamafactory.hparams.parser")
    package("deepspeed")
    for file in files_of("llamafactory", model, 16):
        document = document_of("llamafactory", Job(file))
        read = parser._parse_train_args({**document, "use_cpu": True})
        model_arguments, data, training, finetuning, _ = read
        parser._verify_model_args(model_arguments, data, finetuning)
        assert training.per_device_train_batch_size == file.plan.micro_batch_size
        assert data.cutoff_len == file.workload.seq_len
        assert model_arguments.disable_gradient_checkpointing == (file.plan.recompute == "none")


@pytest.mark.slow
def test_megatron_bridge_has_the_fields() -> None:
    """Its import needs Transformer Engine, which needs CUDA: the names are read from its source."""
    if not os.environ.get("SHARDPLAN_EXPORT_TESTS") and not _has_package("megatron-bridge"):
        pytest.skip("megatron-bridge is not installed")
    files = importlib.metadata.files("megatron-bridge") or []
    source = {str(each): Path(str(each.locate())) for each in files if each.suffix == ".py"}
    tree = ast.parse(source["megatron/bridge/training/config.py"].read_text())
    annotated = {
        node.name: {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    recipes = ast.parse(source["megatron/bridge/recipes/common.py"].read_text())
    functions = {node.name for node in recipes.body if isinstance(node, ast.FunctionDef)}
    for file in files_of("megatron-bridge", "qwen2.5-0.5b", 24):
        document = placed(target("megatron-bridge").leaves(Job(file)))
        assert without_call(document).keys() <= annotated["ConfigContainer"]
        assert document["train"].keys() <= annotated["TrainingConfig"]
        assert document[CALL].rsplit(".", 1)[-1] in functions


def _has_package(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
