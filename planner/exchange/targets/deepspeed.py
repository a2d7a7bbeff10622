"""DeepSpeed's ``ds_config.json``.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/config.py (batch arithmetic: ``train_batch_size`` =
micro-batch x accumulation x data-parallel ranks), runtime/zero/config.py, offload_config.py.
Activation checkpointing is switched on in the model; the section of that name only tunes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hardware_profiles.errors import InputError
from planner.exchange.job import Job
from planner.exchange.keys import OMIT, Key, Settings, Source, UnknownWord, same, without_effect
from planner.exchange.launch import deepspeed_launch
from planner.exchange.syntax.documents import JSON
from planner.exchange.target import ADAPTERS_IN_SCRIPT, Target

FILE: Final = "ds_config.json"
NVME_PATH: Final = "/local_nvme"
OPTIMIZERS: Final = {  # deepspeed/runtime/engine.py, _configure_basic_optimizer
    "adamw": "adamw",
    "adam": "adamw",  # FusedAdam and DeepSpeedCPUAdam with adam_w_mode
    "fusedadam": "adamw",
    "onebitadam": "adamw",
    "zerooneadam": "adamw",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "onebitlamb": "lamb",
    "lion": "lion",
    "muon": "muon",
    "sgd": "sgd",
}
ZERO: Final = "zero_optimization"
MARKS: Final = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "zero_allow_untested_optimizer",
)


def _read_batch(value: Any, source: Source) -> Settings:
    """Return the sequences of a step: DeepSpeed counts those of each tensor-parallel rank.

    Its check of the batch takes all ranks but those of Ulysses (DeepSpeedConfig, world_size).
    """
    return {"global_batch_size": value // max(1, source.get("tensor_parallel.autotp_size", 1))}


def _read_optimizer(value: Any, source: Source) -> Settings:
    word = str(value).lower()
    if word not in OPTIMIZERS:
        raise UnknownWord(f"optimizer.type = {str(value)[:60]!r} (known: {', '.join(OPTIMIZERS)})")
    found = OPTIMIZERS[word]
    if found == "adamw" and source.get("optimizer.params.adam_w_mode") is False:
        return {"optimizer": "adam"}
    if found == "sgd" and source.get("optimizer.params.momentum", 0):
        return {"optimizer": "sgd_momentum"}
    return {"optimizer": found}


def _precision(word: str) -> Key:
    return Key(
        f"{word}.enabled",
        ("precision",),
        lambda job: True if job["precision"] == word else OMIT,
        lambda value, source: {"precision": word} if value is True else {},
    )


def _pure(job: Job) -> Any:
    """Write bf16 without fp32 master weights."""
    return OMIT if job["master_weights"] or job["precision"] != "bf16" else True


def _read_device(part: str) -> Any:
    def read(value: Any, source: Source) -> Settings:
        device = str(value).lower()
        if device == "none":
            return {}
        if device not in ("cpu", "nvme"):
            raise UnknownWord(f"{ZERO}.offload_{part}.device = {device!r} (known: none, cpu, nvme)")
        return {"offload": "weights" if part == "param" else "optimizer", "offload_device": device}

    return read


def _offload(part: str, offloads: Any) -> tuple[Key, ...]:
    """Return the keys of a section of offloaded tensors."""
    section = f"{ZERO}.offload_{part}"

    def device(job: Job) -> Any:
        return job.plan.offload_device if offloads(job.plan) else OMIT

    def path(job: Job) -> Any:
        return NVME_PATH if device(job) == "nvme" else OMIT

    def pinned(job: Job) -> Any:
        """Write what prices assume: DeepSpeed pins nothing unless told."""
        return OMIT if device(job) is OMIT else True

    return (
        Key(f"{section}.device", ("offload", "offload_device"), device, _read_device(part)),
        Key(f"{section}.nvme_path", (), path),
        Key(f"{section}.pin_memory", (), pinned),
        *without_effect(
            """
            buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init
            ratio super_offload fast_offload cpuadam_cores_perc
            """,
            section=f"{section}.",
        ),
    )


def _legacy_offload(name: str, offload: str) -> Key:
    """Return a key of older versions."""
    return Key(
        f"{ZERO}.{name}",
        ("offload",),
        read=lambda value, source: {"offload": offload} if value is True else {},
    )


def _ranks(path: str, ours: str, also: Mapping[str, Any] | None = None) -> Key:
    """Return a degree that is written above 1."""
    return Key(
        path,
        (ours, *(also or {})),
        lambda job: job[ours] if job[ours] > 1 else OMIT,
        lambda value, source: {ours: value, **(also or {})} if value > 1 else {ours: 1},
        {ours: 1},
    )


def _checkpoints(value: Any, source: Source) -> Settings:
    if value:
        raise UnknownWord("activation_checkpointing.cpu_checkpointing = true is not priced")
    return {}


def complete(settings: Settings, source: Source) -> Settings:
    """Return what follows from the keys together: fp32, and the batch that is left out."""
    found: Settings = {}
    named = [source.get(f"{word}.enabled") for word in ("bf16", "fp16", "bfloat16")]
    if "auto" not in named and source.get("torch_autocast.enabled") is not True:
        found["precision"] = "fp32"
    if isinstance(source.get("zero_optimization"), bool):
        found["zero_stage"] = int(source.document["zero_optimization"])
    micro, batch = settings.get("micro_batch_size"), settings.get("global_batch_size")
    if micro and not batch and "gradient_accumulation_steps" not in source.document:
        found["num_microbatches"] = 1
    return found


def check(document: Mapping[str, Any], job: Job) -> None:
    """Raise where the batch is not the product of its parts."""
    product = (
        document["train_micro_batch_size_per_gpu"]
        * document["gradient_accumulation_steps"]
        * job.plan.data_parallel
        * job.plan.tensor_parallel
    )
    if product != document["train_batch_size"]:
        raise InputError(
            f"train_batch_size = {document['train_batch_size']} is not micro-batch x accumulation "
            f"x ranks = {product}"
        )


SECTIONS: Final = """
    aio.* amp.* autotuning.* comms_logger.* csv_monitor.* data_efficiency.* curriculum_learning.*
    elasticity.* flops_profiler.* monitor_config.* scheduler.* tensorboard.* wandb.* comet.*
    checkpoint.* optimizer.params.* compile.* nebula.* pipeline.* timers.* progressive_layer_drop.*
    eigenvalue.* compression_training.*
"""
SCALARS: Final = """
    activation_checkpointing.partition_activations activation_checkpointing.profile
    activation_checkpointing.contiguous_memory_optimization
    activation_checkpointing.number_checkpoints
    activation_checkpointing.synchronize_checkpoint_boundary bf16.immediate_grad_update
    bf16.check_grad_overflow bf16.bf16_optimizer_states communication_data_type
    data_types.param_dtype dataloader_drop_last disable_allgather dump_state fp16.auto_cast
    fp16.consecutive_hysteresis fp16.fp16_master_weights_and_grads fp16.hysteresis
    fp16.initial_scale_power fp16.loss_scale fp16.loss_scale_window fp16.min_loss_scale
    fp16.opt_level bfloat16.loss_scale gradient_accumulation_dtype gradient_clipping
    gradient_predivide_factor log_level memory_breakdown optimizer.legacy_fusion prescale_gradients
    seq_parallel_communication_data_type sparse_gradients steps_per_print torch_autocast.dtype
    torch_autocast.lower_precision_safe_modules train_steps use_data_before_expert_parallelism
    use_node_local_storage wall_clock_breakdown zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer tensor_parallel.tp_overlap_comm tensor_parallel.preset_model
    tensor_parallel.dtype
"""
TUNING: Final = """
    allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint
    ignore_unused_parameters load_from_fp32_weights memory_efficient_linear overlap_comm
    parameter_alignment reduce_bucket_size reduce_scatter round_robin_gradients
    stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save
    stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size
    stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce
    zero_quantized_nontrainable_weights leaf_module.* load_optimizer_states
    cpu_offload_use_pin_memory find_unused_parameters
"""

KEYS: Final = (
    Key(
        "train_batch_size",
        ("global_batch_size",),
        lambda job: job["global_batch_size"] * job.plan.tensor_parallel,
        _read_batch,
    ),
    same("train_micro_batch_size_per_gpu", "micro_batch_size"),
    same("gradient_accumulation_steps", "num_microbatches"),
    _precision("bf16"),
    _precision("fp16"),
    Key(  # the older name of bf16
        "bfloat16.enabled",
        read=lambda value, source: {"precision": "bf16"} if value is True else {},
    ),
    Key("torch_autocast.enabled"),
    Key(
        "bf16.bf16_master_weights_and_grads",
        ("master_weights",),
        _pure,
        lambda value, source: {"master_weights": not value},
    ),
    same("data_types.grad_accum_dtype", "gradient_precision", unless="auto"),
    Key("optimizer.type", ("optimizer",), read=_read_optimizer),
    same(f"{ZERO}.stage", "zero_stage", absent=0),
    *_offload("optimizer", lambda plan: plan.offloads_optimizer),
    *_offload("param", lambda plan: plan.offloads_weights),
    _legacy_offload("cpu_offload", "optimizer"),
    _legacy_offload("cpu_offload_params", "weights"),
    same(f"{ZERO}.zero_hpz_partition_size", "secondary_ranks", unless=1),
    same(f"{ZERO}.zero_quantized_weights", "quantised_weights", unless=False),
    same(f"{ZERO}.zero_quantized_gradients", "quantised_gradients", unless=False),
    _ranks("tensor_parallel.autotp_size", "tensor_parallel", {"sequence_parallel": False}),
    _ranks("sequence_parallel_size", "context_parallel", {"context_parallel_method": "ulysses"}),
    Key("activation_checkpointing.cpu_checkpointing", read=_checkpoints),
    *without_effect(SECTIONS),
    *without_effect(SCALARS),
    *without_effect(TUNING, section=f"{ZERO}."),
)

ELSEWHERE: Final = {
    "seq_len": "tokens of a sequence: your data loader",
    "target_seq_len": "tokens of a target: your data loader",
    "recompute": "your script: model.gradient_checkpointing_enable(), or no such call for none",
    "optimizer": "the optimizer given to deepspeed.initialize",
    "attention_kernel": "attn_implementation of the model",
    "freeze": "requires_grad_(False) in your script",
    **ADAPTERS_IN_SCRIPT,
}

TARGET: Final = Target(
    name="deepspeed",
    file=FILE,
    syntax=JSON,
    keys=KEYS,
    elsewhere=ELSEWHERE,
    recognises=lambda document: any(mark in document for mark in MARKS),
    launch=lambda job: deepspeed_launch(job, f"train.py --deepspeed --deepspeed_config {FILE}"),
    complete=complete,
    check=check,
)
