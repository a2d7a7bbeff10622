"""Configurations of torchtitan: a Python function of 0.3.0, and the TOML job files before it.

Source: torchtitan 0.3.0 (torchtitan/config/configs.py, trainer.py, distributed/fsdp.py,
distributed/pipeline_parallel.py, distributed/activation_checkpoint.py, models/*/__init__.py);
pytorch/torchtitan@6404b93242, torchtitan/config/job_config.py for TOML.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Final

from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import ModelSpec
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from planner.exchange.job import Job
from planner.exchange.keys import (
    MISSING,
    Key,
    Settings,
    Source,
    UnknownWord,
    lookup,
    without_effect,
)
from planner.exchange.launch import torchrun
from planner.exchange.syntax.python_document import CALL
from planner.exchange.syntax.python_recipe import FUNCTION, PYTHON
from planner.exchange.target import Target

FILE: Final = "torchtitan_job.py"
BACKEND: Final = "torchtitan.experiments.transformers_modeling_backend"
# models of torchtitan by module and flavor
FLAVORS: Final = {
    ("llama3", "1B"): "llama-3.2-1b",
    ("llama3", "3B"): "llama-3.2-3b",
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
SCHEDULES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
ALSO_SCHEDULES: Final = {"ScheduleZBVZeroBubble": "zbv", "ScheduleDualPipeV": "dualpipev"}
RECOMPUTE: Final = {"full": "FullAC", "ops:every-2nd-mm": "SelectiveAC"}
AC: Final = "torchtitan.distributed.activation_checkpoint"
OPTIMIZERS: Final = {"adamw": "adamw", "adam": "adam"}


def _shape(model: ModelSpec) -> tuple[Any, ...]:
    return (model.hidden_size, model.vocab_size, model.pattern, model.kinds, model.tie_embeddings)


@cache
def _shapes() -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return the shapes of torchtitan's models."""
    found = {}
    for flavor, name in FLAVORS.items():
        found[flavor] = _shape(model_spec(load_preset(name).config, name=name))
    return found


def flavor_of(model: ModelSpec) -> tuple[str, str] | None:
    """Return the module and the flavor of a model that torchtitan has."""
    wanted = _shape(model)
    return next((flavor for flavor, shape in _shapes().items() if shape == wanted), None)


# --- writing ---


def values(job: Job) -> dict[str, Any]:
    """Return the values of the configuration by path."""
    plan, work = job.plan, job.workload
    has_pipeline = plan.pipeline_parallel > 1
    sharded = plan.zero_stage > 0
    micro, batches = plan.micro_batch_size, plan.num_microbatches
    found = {
        **_model_leaves(job),
        f"optimizer.{CALL}": "torchtitan.components.optimizer.default_adamw",
        "optimizer.lr": 3e-4,
        f"dataloader.{CALL}": (
            "torchtitan.hf_datasets.text_datasets.HuggingFaceTextDataLoader.Config"
        ),
        "dataloader.dataset": "c4",
        f"training.{CALL}": "torchtitan.config.TrainingConfig",
        "training.local_batch_size": micro * batches if has_pipeline else micro,
        "training.global_batch_size": work.global_batch_size,
        "training.seq_len": work.seq_len,
        "training.dtype": "float32" if work.master_weights else "bfloat16",
        "training.mixed_precision_param": "float32" if work.precision == "fp32" else "bfloat16",
        "training.enable_cpu_offload": plan.offloads_weights,
        "training.disable_cuda_graphs": True,
        f"parallelism.{CALL}": "torchtitan.config.ParallelismConfig",
        "parallelism.data_parallel_replicate_degree": (
            plan.dp_replicate if sharded else plan.data_parallel
        ),
        "parallelism.data_parallel_shard_degree": plan.dp_shard if sharded else 1,
        "parallelism.fsdp_reshard_after_forward": {3: "always", 2: "never"}.get(
            plan.zero_stage, "default"
        ),
        "parallelism.tensor_parallel_degree": plan.tensor_parallel,
        "parallelism.enable_sequence_parallel": plan.sequence_parallel,
        "parallelism.pipeline_parallel_degree": plan.pipeline_parallel,
        "parallelism.context_parallel_degree": plan.context_parallel,
        "parallelism.expert_parallel_degree": plan.expert_parallel,
        f"compile.{CALL}": "torchtitan.config.CompileConfig",
        "compile.enable": True,
    }
    if plan.recompute in RECOMPUTE:
        found[f"activation_checkpoint.{CALL}"] = f"{AC}.{RECOMPUTE[plan.recompute]}.Config"
    else:
        found["activation_checkpoint"] = None
    if has_pipeline:
        found |= {
            "parallelism.pipeline_parallel_schedule": SCHEDULES.get(plan.pipeline_schedule),
            "parallelism.pipeline_parallel_microbatch_size": micro,
            "parallelism.module_fqns_per_model_part": _parts(job),
        }
    return found


def _parts(job: Job) -> list[list[str]]:
    """Return the modules of each stage."""
    parts = [[f"layers.{i}" for i in range(*pair)] for pair in job.file.layer_ranges]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    if flavor_of(job.model) is None:
        parts = [[*part, "rotary_emb"] for part in parts]
    return parts


def _model_leaves(job: Job) -> dict[str, Any]:
    """Return the model: a flavor of torchtitan, else transformers' own under its backend."""
    loss = "torchtitan.components.loss.CrossEntropyLoss.Config"
    found: dict[str, Any]
    if (flavor := flavor_of(job.model)) is None:
        found = {
            CALL: f"{BACKEND}.configs.TransformersBackendConfig",
            "hf_model": job.hub_name,
            f"loss.{CALL}": loss,
            f"model_spec.{CALL}": f"{BACKEND}.model_registry",
            "model_spec.0": "full",
        }
        if job.model.has_experts:
            found |= {
                f"model_spec.{CALL}": "dataclasses.replace",
                "model_spec.0": {CALL: f"{BACKEND}.model_registry", "0": "full"},
                f"model_spec.model.{CALL}": f"{BACKEND}.HFTransformerModel.Config",
                f"model_spec.model.model_config.{CALL}": f"{BACKEND}.TitanMoeModelConfig",
            }
    else:
        found = {
            CALL: "torchtitan.trainer.Trainer.Config",
            f"loss.{CALL}": loss,
            "loss.global_vocab_size": job.model.vocab_size,
            f"model_spec.{CALL}": f"torchtitan.models.{flavor[0]}.model_registry",
            "model_spec.0": flavor[1],
        }
    if job.workload.precision == "fp8":
        converter = "torchtitan.components.quantization.Float8LinearConverter.Config"
        found["model_spec.converters"] = [{CALL: converter, "model_compile_enabled": True}]
    return found


def check(document: Mapping[str, Any], job: Job) -> None:
    """Raise for plans that torchtitan refuses, beyond the table of capabilities."""
    plan = job.plan
    if job.workload.precision == "fp8" and flavor_of(job.model) is None:
        raise InputError(f"precision fp8: torchtitan converts its own models, not {job.model.name}")
    if plan.recompute_layers or plan.recompute_every or job.file.stage_recompute_layers is not None:
        raise InputError(
            "recompute_layers: torchtitan recomputes every layer or none (leave it out)"
        )
    if plan.context_parallel > 1 and job.workload.seq_len % (2 * plan.context_parallel):
        raise InputError(
            f"seq_len = {job.workload.seq_len}: torchtitan needs a multiple of 2 x "
            f"context_parallel = {2 * plan.context_parallel}"
        )


def restate(leaves: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as a TOML job file has them, in the tables of its version."""
    if CALL in document:
        return dict(leaves)
    found: dict[str, Any] = {}
    for path, value in leaves.items():
        section, _, name = path.rpartition(".")
        if section not in ("parallelism", "training") or name == CALL:
            continue
        name = OLDER.get(name, name) if lookup(document, path) is MISSING else name
        places = [f"{place}.{name}" for place in (section, *PLACES)]
        at = next((place for place in places if lookup(document, place) is not MISSING), path)
        found[at] = value
    policy = str(leaves.get(f"activation_checkpoint.{CALL}", ""))
    mode = "full" if "FullAC" in policy else "selective" if policy else "none"
    found["activation_checkpoint.mode"] = mode
    if mode == "selective":
        found["activation_checkpoint.selective_ac_option"] = "op"
    return found


# --- reading ---


PLACES: Final = ("parallelism", "training", "experimental")
OLDER: Final = {"local_batch_size": "batch_size"}


def _parallel(source: Source, name: str, default: Any = None) -> Any:
    """Return a value, which older files have in other tables; the default for another type."""
    given = [source.get(f"{place}.{name}") for place in PLACES]
    found = next((value for value in given if value is not None), default)
    return found if default is None or type(found) is type(default) else default


def complete(settings: Settings, source: Source) -> Settings:
    """Return the options that a configuration states."""
    tensor = _parallel(source, "tensor_parallel_degree", 1)
    pipeline = _parallel(source, "pipeline_parallel_degree", 1)
    context = _parallel(source, "context_parallel_degree", 1)
    experts = _parallel(source, "expert_parallel_degree", 1)
    older = _parallel(source, "expert_tensor_parallel_degree")
    found: Settings = {
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "context_parallel": context,
        "expert_parallel": experts,
        "expert_tensor_parallel": experts == 1 or tensor == 1 or (older or 1) > 1,
        "recompute": _recompute(source),
        "optimizer": _optimizer(source),
        **_precision(source),
        **_data_parallel(source, pipeline, context),
    }
    if tensor > 1:
        found["sequence_parallel"] = _parallel(source, "enable_sequence_parallel", True)
    if context > 1:
        rotate = _parallel(source, "context_parallel_rotate_method", "allgather")
        found["context_parallel_method"] = "ring" if rotate == "alltoall" else "allgather"
    if source.get("training.enable_cpu_offload") or _parallel(source, "enable_cpu_offload"):
        found["offload"] = "weights"
    if seq_len := source.get("training.seq_len"):
        found["seq_len"] = seq_len
    return found | _pipeline(source, pipeline) | _batches(source, found, pipeline)


def _data_parallel(source: Source, pipeline: int, context: int) -> Settings:
    replicas = _parallel(source, "data_parallel_replicate_degree", 1)
    shards = _parallel(source, "data_parallel_shard_degree")
    if shards is None:
        shards = _parallel(source, "data_parallel_degree", -1)
    policy = _parallel(source, "fsdp_reshard_after_forward", "default")
    if shards == 1 and context == 1:
        return {"data_parallel": replicas, "zero_stage": 0}
    keeps = policy == "never" or (policy == "default" and pipeline > 1)
    found: Settings = {"zero_stage": 2 if keeps else 3, "dp_replicate": replicas}
    return found | ({"data_parallel": replicas * shards} if shards > 0 else {})


def _batches(source: Source, found: Settings, pipeline: int) -> Settings:
    local = source.get("training.local_batch_size") or source.get("training.batch_size") or 8
    whole = source.get("training.global_batch_size")
    micro = local
    if pipeline > 1:
        micro = _parallel(source, "pipeline_parallel_microbatch_size")
        number = _parallel(source, "pipeline_parallel_microbatches")
        micro = micro or (max(local // number, 1) if number else 1)
    passes = local // micro
    settings: Settings = {"micro_batch_size": micro}
    data = found.get("data_parallel")
    if isinstance(whole, int) and whole > 0:
        settings["global_batch_size"] = whole
        if data and whole % (local * data) == 0:
            settings["num_microbatches"] = passes * (whole // (local * data))
    else:
        settings["num_microbatches"] = passes
    return settings


def _pipeline(source: Source, pipeline: int) -> Settings:
    if pipeline == 1:
        return {}
    word = _parallel(source, "pipeline_parallel_schedule", "1F1B")
    ours = {theirs.lower(): name for name, theirs in SCHEDULES.items()}
    ours |= {theirs.lower(): name for theirs, name in ALSO_SCHEDULES.items()}
    schedule = ours.get(str(word).lower(), "1f1b")
    parts = _parallel(source, "module_fqns_per_model_part")
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    found: Settings = {"pipeline_schedule": schedule, "virtual_stages": virtual}
    if isinstance(parts, list) and len(parts) % pipeline == 0:
        layers = [sum(str(name).startswith("layers.") for name in part) for part in parts]
        found["virtual_stages"] = len(parts) // pipeline
        if all(layers):
            found["layers"] = ",".join(map(str, layers))
    return found


def _recompute(source: Source) -> str:
    policy = source.document.get("activation_checkpoint", {CALL: "SelectiveAC"})
    if policy is None:
        return "none"
    if not isinstance(policy, Mapping):
        return "ops:every-2nd-mm"
    if CALL in policy:
        name = str(policy[CALL]).removesuffix(".Config").rsplit(".", 1)[-1]
        if name in ("FullAC", "SelectiveAC"):
            return "full" if name == "FullAC" else "ops:every-2nd-mm"
        return "none"
    mode = policy.get("mode", "selective")
    if mode in ("none", "full"):
        return str(mode)
    option = str(policy.get("selective_ac_option", "2"))
    if option.isdigit():
        return "full" if option == "1" else f"full:1/{option}"
    return "ops:every-2nd-mm"


def _optimizer(source: Source) -> str:
    groups = source.get("optimizer.param_groups")
    named = source.get("optimizer.name")
    if isinstance(groups, list) and groups and isinstance(groups[0], Mapping):
        named = groups[0].get("optimizer_name")
    return OPTIMIZERS.get(str(named or "AdamW").lower(), "adamw")


def _precision(source: Source) -> Settings:
    converters = source.get("model_spec.converters") or source.get("model.converters") or []
    if isinstance(converters, str):
        converters = converters.split(",")
    names = [
        str(each.get(CALL) if isinstance(each, Mapping) else each).lower() for each in converters
    ]
    if any("float8" in name and "mx" not in name for name in names):
        return {"precision": "fp8"}
    if source.get("float8.enable_float8_linear") or source.get("float8.enable_fp8_linear"):
        return {"precision": "fp8"}
    if source.get("training.dtype") == "bfloat16":
        return {"precision": "bf16", "master_weights": False}
    param = source.get("training.mixed_precision_param", "bfloat16")
    return {"precision": "fp32" if param == "float32" else "bf16"}


def model_name(source: Source) -> str | None:
    """Return the name of the model: of the flavor, or transformers' own."""
    if isinstance(named := source.get("hf_model"), str):
        return named
    called = str(source.get(f"model_spec.{CALL}", ""))
    module = source.get("model.name") or called.removesuffix(".model_registry").rsplit(".", 1)[-1]
    flavor = (
        source.get("model.flavor") or source.get("model_spec.0") or source.get("model_spec.flavor")
    )
    return FLAVORS.get((str(module), str(flavor)))


def remarks(source: Source) -> list[str]:
    """Return what a configuration states that is not priced."""
    found = []
    is_compiled = source.get("compile.enable", source.get("training.compile", False))
    if not is_compiled:
        found.append("compile is off: priced with compiled layers, as torchtitan's profile")
    elif "model" not in source.get("compile.components", ["model"]):
        found.append("compile.components is without the model: priced with compiled layers")
    policy = source.get("activation_checkpoint")
    called = str(policy.get(CALL, "")) if isinstance(policy, Mapping) else ""
    if "MemoryBudgetAC" in called or (
        isinstance(policy, Mapping) and policy.get("mode") == "memory_budget"
    ):
        found.append("activation checkpointing by a memory budget is priced as none")
    return found


CARRIES: Final = {
    "training.local_batch_size": ("micro_batch_size", "num_microbatches"),
    "training.global_batch_size": ("global_batch_size",),
    "training.seq_len": ("seq_len",),
    "training.dtype": ("master_weights",),
    "training.mixed_precision_param": ("precision",),
    "training.enable_cpu_offload": ("offload",),
    "parallelism.data_parallel_replicate_degree": ("dp_replicate",),
    "parallelism.data_parallel_shard_degree": ("data_parallel",),
    "parallelism.fsdp_reshard_after_forward": ("zero_stage",),
    "parallelism.tensor_parallel_degree": ("tensor_parallel",),
    "parallelism.enable_sequence_parallel": ("sequence_parallel",),
    "parallelism.pipeline_parallel_degree": ("pipeline_parallel",),
    "parallelism.context_parallel_degree": ("context_parallel",),
    "parallelism.expert_parallel_degree": ("expert_parallel",),
    "parallelism.pipeline_parallel_schedule": ("pipeline_schedule",),
    "parallelism.pipeline_parallel_microbatch_size": ("micro_batch_size",),
    "parallelism.module_fqns_per_model_part": ("layers", "virtual_stages"),
    "activation_checkpoint": ("recompute",),
}
CALLED: Final = names_in("""
    loss model_spec optimizer dataloader training parallelism compile activation_checkpoint
""")
NO_EFFECT: Final = """
    hf_model loss.global_vocab_size model_spec.0 model_spec.converters optimizer.lr
    dataloader.dataset training.disable_cuda_graphs compile.enable
    job.* profiling.* profiler.* metrics.* tokenizer.* dataloader.* comm.* optimizer.*
    lr_scheduler.* checkpoint.* validator.* validation.* debug.* override.* loss.* fault_tolerance.*
    quantize.* float8.* mx.* memory_* model.* model_spec.* hf_assets_path dump_folder
    activation_checkpoint.* compile.* training.dataset* training.steps training.max_norm
    training.seed training.deterministic training.warmup_steps training.gc_* training.compile
    training.mixed_precision_reduce training.batch_size training.data_parallel_*
    training.tensor_parallel_degree training.enable_* training.debug_* experimental.*
    parallelism.enable_* parallelism.context_parallel_* parallelism.pipeline_parallel_*
    parallelism.disable_loss_parallel parallelism.expert_tensor_parallel_degree
    parallelism.spmd_backend structured_logging.*
"""


def _read(path: str, value: Any, source: Source) -> Settings:
    if path == "parallelism.pipeline_parallel_schedule":
        known = {word.lower() for word in (*SCHEDULES.values(), *ALSO_SCHEDULES)}
        if str(value).lower() not in known:
            raise UnknownWord(
                f"{path} = {str(value)[:60]!r} (known: {', '.join(SCHEDULES.values())})"
            )
    return {}


KEYS: Final = (
    *(Key(path, carried, read=partial(_read, path)) for path, carried in CARRIES.items()),
    *without_effect(CALL),
    *without_effect(f"{part}.{CALL}" for part in CALLED),
    *without_effect(NO_EFFECT),
)

TARGET: Final = Target(
    name="torchtitan",
    file=FILE,
    syntax=PYTHON,
    keys=KEYS,
    elsewhere={
        "expert_tensor_parallel": "no effect without tensor parallelism or experts",
        "attention_kernel": "attn_backend of model_registry",
        "optimizer": "optimizer_name of OptimizersContainer.Config",
        "virtual_stages": "follows from the schedule",
        "layers": "torchtitan's own split",
    },
    recognises=lambda document: (
        ("parallelism" in document or "training" in document)
        and ("model_spec" in document or "model" in document or "activation_checkpoint" in document)
        and "trainer" not in document
    ),
    launch=lambda job: torchrun(
        job, f"-m torchtitan.train --module {FILE.removesuffix('.py')} --config {FUNCTION}"
    ),
    complete=complete,
    check=check,
    values=values,
    remarks=remarks,
    model_name=model_name,
    restate=restate,
)
