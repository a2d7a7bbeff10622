"""Written files against the targets' own classes, where their packages are installed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from planner.exchange.job import Job
from planner.exchange.keys import placed
from planner.exchange.megatron_fields import CARRIES, fields_of
from planner.exchange.megatron_model import model_fields
from planner.exchange.python_document import CALL
from planner.exchange.registry import target
from planner.exchange.targets.megatron import OF_MODEL
from tests.planner.exchange.test_targets import MODELS, files_of

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


def without_call(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != CALL}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_torchtitan_takes_its_sections(model: str) -> None:
    configs = pytest.importorskip("torchtitan.config.configs")
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
    core = pytest.importorskip("megatron.core")
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
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    classes = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    known = {field.name for cls in classes for field in fields(cls)}
    assert {*CARRIES, *OF_MODEL} <= known | OF_PARSER


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_lightning_takes_the_trainer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
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
