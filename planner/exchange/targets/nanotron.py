"""Configurations of nanotron.

Source: huggingface/nanotron@19f88fbe45, src/nanotron/config/parallelism_config.py, config.py,
models_config.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from planner.exchange.job import Job
from planner.exchange.keys import Key, Settings, Source, UnknownWord, without_effect
from planner.exchange.launch import torchrun
from planner.exchange.syntax.documents import YAML
from planner.exchange.target import Target

FILE: Final = "nanotron.yaml"
SCHEDULES: Final = {"1f1b": "1f1b", "gpipe": "afab"}
DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODEL: Final = "model.model_config"
# keys of a config.json that model_config has too
OF_MODEL: Final = names_in("""
    hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
    num_key_value_heads tie_word_embeddings vocab_size hidden_act rope_theta rms_norm_eps
""")


def values(job: Job) -> dict[str, Any]:
    """Return the values of a configuration by path."""
    plan, work = job.plan, job.workload
    return {
        "general.project": "shardplan",
        "general.run": job.model.name,
        "general.seed": 42,
        "general.ignore_sanity_checks": True,
        "parallelism.dp": plan.data_parallel,
        "parallelism.pp": plan.pipeline_parallel,
        "parallelism.tp": plan.tensor_parallel,
        "parallelism.context_parallel_size": plan.context_parallel,
        "parallelism.expert_parallel_size": plan.expert_parallel,
        "parallelism.pp_engine": SCHEDULES.get(plan.pipeline_schedule, "1f1b"),
        "parallelism.tp_mode": "REDUCE_SCATTER" if plan.sequence_parallel else "ALL_REDUCE",
        "parallelism.tp_linear_async_communication": plan.sequence_parallel,
        "parallelism.recompute_layer": plan.recompute == "full",
        **_model(job),
        "model.dtype": DTYPES.get(work.precision),
        "model.init_method.std": 0.02,
        "model.make_vocab_size_divisible_by": 1,
        "model.ddp_bucket_cap_mb": 25,
        "tokenizer.tokenizer_name_or_path": job.hub_name,
        "tokens.sequence_length": work.seq_len,
        "tokens.micro_batch_size": plan.micro_batch_size,
        "tokens.batch_accumulation_per_replica": plan.num_microbatches,
        "tokens.train_steps": 100,
        "optimizer.zero_stage": plan.zero_stage,
        "optimizer.accumulate_grad_in_fp32": work.gradient_precision != "bf16",
        "optimizer.clip_grad": 1.0,
        "optimizer.weight_decay": 0.1,
        "optimizer.optimizer_factory.name": "adamW",
        "optimizer.optimizer_factory.adam_beta1": 0.9,
        "optimizer.optimizer_factory.adam_beta2": 0.95,
        "optimizer.optimizer_factory.adam_eps": 1e-8,
        "optimizer.optimizer_factory.torch_adam_is_fused": True,
        "optimizer.learning_rate_scheduler.learning_rate": 3e-4,
        "optimizer.learning_rate_scheduler.lr_warmup_steps": 2,
        "optimizer.learning_rate_scheduler.lr_warmup_style": "linear",
        "optimizer.learning_rate_scheduler.lr_decay_style": "cosine",
        "optimizer.learning_rate_scheduler.lr_decay_steps": 98,
        "optimizer.learning_rate_scheduler.min_decay_lr": 1e-5,
    }


def _model(job: Job) -> dict[str, Any]:
    """Return the sizes of the model; nanotron has Llama's and Qwen2's layers."""
    config, family = job.model.config, job.model.family
    marks = {"llama": "is_llama_config", "qwen2": "is_qwen2_config"}
    if family not in marks:
        raise InputError(
            f"{job.model.name}: nanotron has {', '.join(marks)}, not model_type {family}"
        )
    found = {f"{MODEL}.{name}": config[name] for name in OF_MODEL if name in config}
    return {**found, f"{MODEL}.{marks[family]}": True}


def check(document: Mapping[str, Any], job: Job) -> None:
    """Raise for plans that nanotron refuses, beyond the table of capabilities."""
    plan = job.plan
    by_stage = job.file.stage_recompute_layers is not None
    if plan.recompute_layers or plan.recompute_every or by_stage:
        raise InputError("recompute_layers: nanotron recomputes every layer or none (leave it out)")


def _read(path: str, value: Any, source: Source) -> Settings:
    if path in COUNTS:
        if type(value) is not int:
            raise ValueError(value)
        return {COUNTS[path]: value}
    match path:
        case "parallelism.recompute_layer":
            return {"recompute": "full" if value else "none"}
        case "optimizer.accumulate_grad_in_fp32":
            return {} if value else {"gradient_precision": "bf16"}
        case "model.dtype":
            return {"precision": _word(path, value, {v: k for k, v in DTYPES.items()})}
        case "optimizer.optimizer_factory.name":
            return {"optimizer": _word(path, str(value).lower(), {"adamw": "adamw", "sgd": "sgd"})}
    return {}


def _word(path: str, value: Any, known: Mapping[str, str]) -> str:
    if value not in known:
        raise UnknownWord(f"{path} = {str(value)[:60]!r} (known: {', '.join(known)})")
    return known[value]


def complete(settings: Settings, source: Source) -> Settings:
    """Return the options that several keys state together."""
    found: Settings = {"recompute": "none", "precision": "bf16", "zero_stage": 0}
    if settings.get("tensor_parallel", 1) > 1:
        mode = str(source.get("parallelism.tp_mode", "ALL_REDUCE")).upper()
        found["sequence_parallel"] = mode == "REDUCE_SCATTER"
    if settings.get("pipeline_parallel", 1) > 1:
        engine = str(source.get("parallelism.pp_engine", "afab")).lower()
        found["pipeline_schedule"] = "1f1b" if engine == "1f1b" else "gpipe"
        found["virtual_stages"] = 1
    if settings.get("context_parallel", 1) > 1:
        found["context_parallel_method"] = "ring"
    parts = [settings.get(n) for n in ("micro_batch_size", "num_microbatches", "data_parallel")]
    sizes = [part for part in parts if type(part) is int]
    if len(sizes) == len(parts):
        found["global_batch_size"] = math.prod(sizes)
    return found


def model_config(source: Source) -> dict[str, Any] | None:
    """Return the config.json of the model whose sizes the file states."""
    sizes = source.get(MODEL)
    if not isinstance(sizes, Mapping) or "hidden_size" not in sizes:
        return None
    kind = "qwen2" if sizes.get("is_qwen2_config") else "llama"
    if not (sizes.get("is_llama_config") or sizes.get("is_qwen2_config")):
        return None
    given = {name: sizes[name] for name in OF_MODEL if sizes.get(name) is not None}
    return {"model_type": kind, **given}


COUNTS: Final = {
    "parallelism.dp": "data_parallel",
    "parallelism.pp": "pipeline_parallel",
    "parallelism.tp": "tensor_parallel",
    "parallelism.context_parallel_size": "context_parallel",
    "parallelism.expert_parallel_size": "expert_parallel",
    "tokens.sequence_length": "seq_len",
    "tokens.micro_batch_size": "micro_batch_size",
    "tokens.batch_accumulation_per_replica": "num_microbatches",
    "optimizer.zero_stage": "zero_stage",
}
CARRIES: Final = {
    **{path: (name,) for path, name in COUNTS.items()},
    "parallelism.pp_engine": ("pipeline_schedule",),
    "parallelism.tp_mode": ("sequence_parallel",),
    "parallelism.recompute_layer": ("recompute",),
    "model.dtype": ("precision",),
    "optimizer.accumulate_grad_in_fp32": ("gradient_precision",),
    "optimizer.optimizer_factory.name": ("optimizer",),
}
TARGET: Final = Target(
    name="nanotron",
    file=FILE,
    syntax=YAML,
    keys=(
        *(Key(path, names, read=partial(_read, path)) for path, names in CARRIES.items()),
        *without_effect("""
            general.* checkpoints.* data_stages data.* logging.* lighteval.* profiler.* s3_upload.*
            tokenizer.* metrics_logging.* model.* optimizer.* checkpoints lighteval profiler logging
            s3_upload data metrics_logging parallelism.tp_linear_async_communication
            parallelism.tp_recompute_allgather parallelism.moe_layer_recompute tokens.train_steps
            tokens.val_check_interval tokens.limit_test_batches tokens.limit_val_batches
        """),
    ),
    elsewhere={
        "global_batch_size": "micro_batch_size x batch_accumulation_per_replica x dp",
        "expert_tensor_parallel": "no effect without tensor parallelism or experts",
        "attention_kernel": "model_config._attn_implementation",
        "layers": "nanotron's own split",
    },
    recognises=lambda document: "parallelism" in document and "tokens" in document,
    launch=lambda job: torchrun(job, f"run_train.py --config-file {FILE}"),
    complete=complete,
    check=check,
    values=values,
    model_config=model_config,
)
