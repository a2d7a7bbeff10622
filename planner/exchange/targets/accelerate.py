"""Accelerate's YAML file: FSDP2, ``parallelism_config``, DeepSpeed's plugin.

Source: huggingface/accelerate, src/accelerate/commands/config/config_args.py (ClusterConfig),
parallelism_config.py, utils/launch.py (each key of a section is an environment variable).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, Final

from hardware_profiles.errors import InputError
from planner.exchange.job import Job
from planner.exchange.keys import (
    OMIT,
    Key,
    Settings,
    Source,
    UnknownWord,
    constant,
    integer,
    without_effect,
    words,
)
from planner.exchange.launch import accelerate_launch
from planner.exchange.syntax.documents import YAML
from planner.exchange.target import ADAPTERS_IN_SCRIPT, Target
from planner.exchange.targets import huggingface as hf

FILE: Final = "accelerate.yaml"
PARALLEL: Final = "parallelism_config.parallelism_config_"
METHODS: Final = {"ring": "alltoall", "allgather": "allgather"}
DEEPSPEED: Final = "deepspeed_config"
MEGATRON: Final = "megatron_lm_config.megatron_lm_"
OF_MEGATRON: Final = {  # of the plugin for Megatron-LM, which is read alone
    "tp_degree": "tensor_parallel",
    "pp_degree": "pipeline_parallel",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "num_micro_batches": "num_microbatches",
}
MARKS: Final = ("compute_environment", "distributed_type", "fsdp_config", "mixed_precision")


def _distributed(job: Job) -> str:
    if job.plan.world_size == 1 and not hf.uses_deepspeed(job):
        return "NO"
    return "FSDP" if hf.uses_fsdp(job) else "DEEPSPEED" if hf.uses_deepspeed(job) else "MULTI_GPU"


def _grid(job: Job) -> bool:
    """Whether the ranks form a grid, which needs ``parallelism_config``."""
    plan = job.plan
    return plan.tensor_parallel > 1 or plan.context_parallel > 1 or plan.dp_replicate > 1


def _degree(name: str, option: str, value: Callable[[Job], int], *, states: bool = True) -> Key:
    """Return the key of a degree; ``states``: an option of ``fit``."""

    def write(job: Job) -> Any:
        return value(job) if _grid(job) else OMIT

    def read(found: Any, source: Source) -> Settings:
        degree = int(found)
        return {option: degree} if states else {}

    return Key(f"{PARALLEL}{name}", (option,), write, read)


def _read_ulysses(value: Any, source: Source) -> Settings:
    degree = int(value)
    if degree <= 1:
        return {}
    return {"context_parallel": degree, "context_parallel_method": "ulysses"}


def _only_deepspeed(value: Callable[[Job], Any]) -> Callable[[Job], Any]:
    return lambda job: value(job) if hf.uses_deepspeed(job) else OMIT


def _device(part: str) -> Callable[[Any, Source], Settings]:
    def read(value: Any, source: Source) -> Settings:
        word = str(value).lower()
        if word in ("none", "null"):
            return {}
        if word not in ("cpu", "nvme"):
            raise UnknownWord(f"{DEEPSPEED}.offload_{part}_device = {word!r}")
        offload = "weights" if part == "param" else "optimizer"
        return {"offload": offload, "offload_device": word}

    return read


def complete(settings: Settings, source: Source) -> Settings:
    """Return the precision, the degrees and the ZeRO stage of keys that are not there."""
    kind = str(source.get("distributed_type", "")).upper()
    found: Settings = (
        {"precision": "fp32"} if source.get("mixed_precision") in (None, "no", False) else {}
    )
    found |= {"tensor_parallel": 1, "context_parallel": 1, "dp_replicate": 1}
    if settings.get("tensor_parallel", 1) > 1:
        found["sequence_parallel"] = False
    if settings.get("context_parallel", 1) > 1:
        found["context_parallel_method"] = "allgather"  # of TorchContextParallelConfig
    if kind == "DEEPSPEED":
        return found
    if kind == "FSDP":
        version = {} if source.get("fsdp_config.fsdp_version") else {"software": hf.FSDP1}
        return found | {"zero_stage": 3} | version
    if kind == "MEGATRON_LM":
        sharded = hf.truth(source.get(f"{MEGATRON}use_distributed_optimizer", False))
        found |= {"zero_stage": int(sharded), "software": "megatron-core", "recompute": "none"}
        return found
    return found | hf.zero_of_wrapper(source, fsdp="fsdp_config", deepspeed=DEEPSPEED)


def _launch(job: Job) -> str:
    """Return the command; its launcher starts several processes on CPUs only with MPI otherwise."""
    before = "ACCELERATE_USE_CPU=true " if hf.on_cpu(job) else ""
    return before + accelerate_launch(job, FILE, "train.py")


def check(document: Mapping[str, Any], job: Job) -> None:
    """Raise where the degrees are not the processes, or CPUs shard."""
    if hf.on_cpu(job) and (hf.uses_fsdp(job) or hf.uses_deepspeed(job)):
        raise InputError(
            f"zero_stage = {job.plan.zero_stage} on CPUs: Accelerate runs FSDP and DeepSpeed on "
            "accelerators only (its processes on CPUs would not exchange gradients): --fix zero=0"
        )
    degrees = document.get("parallelism_config", {})
    product = prod(value for name, value in degrees.items() if name.endswith("_size"))
    if degrees and product != document["num_processes"]:
        raise InputError(
            f"parallelism_config: the product of the degrees is {product}, num_processes is "
            f"{document['num_processes']}"
        )


KEYS: Final = (
    constant("compute_environment", "LOCAL_MACHINE"),
    constant("debug", False),
    Key("distributed_type", ("zero_stage",), _distributed),
    words(
        "mixed_precision", "precision", {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "no"}
    ),
    Key("num_machines", (), lambda job: job.cluster.num_nodes),
    Key("num_processes", (), lambda job: job.plan.world_size),
    Key("machine_rank", (), lambda job: 0),
    constant("main_training_function", "main"),
    Key("rdzv_backend", (), lambda job: "static"),
    constant("same_network", True),
    Key("use_cpu", (), hf.on_cpu),
    *hf.fsdp_keys("fsdp_config.fsdp_", "fsdp_config.fsdp_version", recomputes=True),
    _degree("dp_replicate_size", "dp_replicate", lambda job: job.plan.dp_replicate),
    _degree("dp_shard_size", "data_parallel", lambda job: job.plan.dp_shard, states=False),
    _degree("tp_size", "tensor_parallel", lambda job: job.plan.tensor_parallel),
    _degree("cp_size", "context_parallel", lambda job: job.plan.context_parallel),
    words(f"{PARALLEL}cp_comm_strategy", "context_parallel_method", METHODS),
    *without_effect(
        "cp_backend sp_backend sp_attn_implementation sp_seq_length sp_seq_length_is_variable",
        section=PARALLEL,
    ),
    Key(f"{PARALLEL}sp_size", read=_read_ulysses),
    Key(
        f"{DEEPSPEED}.zero_stage",
        ("zero_stage",),
        _only_deepspeed(lambda job: job.plan.zero_stage),
        lambda value, source: {"zero_stage": int(value), "software": hf.of_deepspeed(int(value))},
    ),
    Key(
        f"{DEEPSPEED}.gradient_accumulation_steps",
        ("num_microbatches",),
        _only_deepspeed(lambda job: job.plan.num_microbatches),
        integer("num_microbatches"),
    ),
    Key(
        f"{DEEPSPEED}.offload_optimizer_device",
        ("offload",),
        _only_deepspeed(lambda job: "cpu" if job.plan.offload == "optimizer" else "none"),
        _device("optimizer"),
    ),
    Key(
        f"{DEEPSPEED}.offload_param_device",
        (),
        _only_deepspeed(lambda job: "none"),
        _device("param"),
    ),
    Key(f"{DEEPSPEED}.zero3_init_flag", (), _only_deepspeed(lambda job: job.plan.zero_stage == 3)),
    Key(f"{DEEPSPEED}.deepspeed_config_file", read=hf.read_deepspeed),
    *(Key(f"{MEGATRON}{name}", read=integer(option)) for name, option in OF_MEGATRON.items()),
    Key(
        f"{MEGATRON}sequence_parallelism",
        read=lambda value, source: {"sequence_parallel": hf.truth(value)},
    ),
    Key(
        f"{MEGATRON}recompute_activations",
        read=lambda value, source: {"recompute": "selective" if hf.truth(value) else "none"},
    ),
    *without_effect("gradient_clipping use_distributed_optimizer", section=MEGATRON),
    *without_effect(
        """
        gradient_clipping zero3_save_16bit_model deepspeed_multinode_launcher deepspeed_hostfile
        deepspeed_inclusion_filter deepspeed_exclusion_filter deepspeed_moe_layer_cls_names
        offload_param_nvme_path offload_optimizer_nvme_path
        """,
        section=f"{DEEPSPEED}.",
    ),
    *without_effect("""
        downcast_bf16 tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone gpu_ids fp8_config.*
        main_process_ip main_process_port dynamo_config.* enable_cpu_affinity commands command_file
        mpirun_config.*
    """),
)

ELSEWHERE: Final = {
    "seq_len": "tokens of a sequence: your data loader",
    "target_seq_len": "tokens of a target: your data loader",
    "global_batch_size": "micro-batch x accumulation x data-parallel ranks, in your script",
    "micro_batch_size": "the batch size of your data loader",
    "num_microbatches": "Accelerator(gradient_accumulation_steps=…)",
    "recompute": "your script: model.gradient_checkpointing_enable(), or no such call for none",
    "optimizer": "the optimizer of your script",
    "optimizer_state_precision": "the optimizer of your script",
    "gradient_precision": "the model's dtype in your script",
    "master_weights": "the model's dtype in your script",
    "attention_kernel": "attn_implementation of the model",
    "freeze": "requires_grad_(False) in your script",
    **ADAPTERS_IN_SCRIPT,
}

TARGET: Final = Target(
    name="accelerate",
    file=FILE,
    syntax=YAML,
    keys=KEYS,
    elsewhere=ELSEWHERE,
    processes=("num_processes",),
    recognises=lambda document: (
        "compute_environment" in document or sum(mark in document for mark in MARKS) > 1
    ),
    launch=_launch,
    complete=complete,
    check=check,
    remarks=partial(hf.deepspeed_remarks, path=f"{DEEPSPEED}.deepspeed_config_file"),
)
