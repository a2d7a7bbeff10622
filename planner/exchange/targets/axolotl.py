"""Axolotl's YAML file.

Source: axolotl-ai-cloud/axolotl 0.19.0, src/axolotl/utils/schemas (config, training, peft, fsdp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    integer,
    not_priced,
    same,
    without_effect,
    words,
)
from planner.exchange.syntax.documents import YAML
from planner.exchange.target import Target
from planner.exchange.targets import huggingface as hf

FILE: Final = "axolotl.yaml"
ADAPTERS: Final = ("lora", "qlora")
OLDER_KERNELS: Final = ("flash", "sdp", "xformers", "flex")  # with a switch each


def _write_adapter(job: Job) -> Any:
    """Return the adapter; ``qlora`` means 4 bits, ``lora`` with ``load_in_8bit`` 8."""
    return "lora" if job.workload.quantisation == "int8" else job.workload.adapter


def _quantised_as(word: str) -> Callable[[Job], Any]:
    return hf.with_qlora(lambda job: True if job.workload.quantisation == word else OMIT)


def _targets(job: Job) -> Any:
    if job.workload.adapter_targets == "all":
        return OMIT
    return hf.module_names(job.workload.adapter_targets)


def _read_adapter(value: Any, source: Source) -> Settings:
    if value not in ADAPTERS:
        raise UnknownWord(f"adapter = {str(value)[:40]!r} (known: lora, qlora)")
    quantised = hf.truth(source.get("load_in_4bit", value == "qlora"))
    in_8bit = hf.truth(source.get("load_in_8bit", False))
    rank = int(source.get("lora_r", 8))
    found: Settings = {
        "qlora" if quantised or in_8bit else "lora": rank,
        "lora_alpha": float(source.get("lora_alpha", 2 * rank)),
    }
    if quantised or in_8bit:
        found["quantisation"] = "nf4" if quantised else "int8"
    if hf.truth(source.get("lora_target_linear", False)):
        found["lora_targets"] = "all"
    elif source.get("lora_target_modules") is not None:
        found["lora_targets"] = hf.target_names_of(source.get("lora_target_modules"))
    return found


def _degree(path: str, name: str) -> Key:
    return Key(
        path, (name,), lambda job: job[name] if job[name] > 1 else OMIT, integer(name), {name: 1}
    )


def _checkpoints(value: Any, source: Source) -> Settings:
    if value == "offload":
        return {"recompute": "full", "offload": "activations"}
    if value in ("offload_disk", "unsloth"):
        return {"recompute": "full"}
    return hf.read_recompute(value, source)


def complete(settings: Settings, source: Source) -> Settings:
    """Return fp32, the degrees' methods, the kernel and the ZeRO stage."""
    found = hf.fp32_without(source, "bf16", "fp16", "bfloat16", "float16", "fp8")
    found |= {"num_microbatches": 1, "attention_kernel": "eager", "recompute": "none"}
    if settings.get("tensor_parallel", 1) > 1:
        found["sequence_parallel"] = False
    if settings.get("context_parallel", 1) > 1:
        found["context_parallel_method"] = "ring"  # ring-flash-attn
    if source.get("deepspeed") is None:
        wrapped = any(source.get(name) not in (None, [], {}) for name in ("fsdp", "fsdp_config"))
        found["zero_stage"] = 3 if wrapped else 0
    return found


def remarks(source: Source) -> list[str]:
    """Return what a file states that is not priced."""
    found = hf.deepspeed_remarks(source)
    if any(hf.truth(value) for name, value in source.document.items() if name.startswith("liger_")):
        found.append(f"liger_* is not priced{hf.LIGER}")
    plugins = source.get("plugins", [])
    if any("CutCrossEntropy" in str(each) for each in plugins if isinstance(plugins, list)):
        found.append(
            "plugin CutCrossEntropyPlugin is not priced (--software hf-trainer+fsdp2+cut-loss "
            "prices it)"
        )
    return found


def check(document: Mapping[str, Any], job: Job) -> None:
    """Raise where the degrees are not the processes."""
    names = ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size")
    product = prod(document.get(name, 1) for name in names)
    if "dp_shard_size" in document and product != job.plan.world_size:
        raise InputError(f"the product of the degrees is {product}, not {job.plan.world_size}")


KEYS: Final = (
    Key("base_model", (), lambda job: job.model.name),
    same("sequence_len", "seq_len"),
    same("micro_batch_size", "micro_batch_size"),
    same("gradient_accumulation_steps", "num_microbatches"),
    *hf.PRECISIONS,
    hf.switch("fp8", precision="fp8"),
    words("optimizer", "optimizer", {**hf.OPTIMIZERS, "muon": "muon"}, also=hf.MORE_OPTIMIZERS),
    Key("adapter", ADAPTERS, hf.with_adapter(_write_adapter), _read_adapter),
    Key("load_in_4bit", (), _quantised_as("nf4")),
    Key("load_in_8bit", ("quantisation",), _quantised_as("int8")),
    Key("lora_r", (), hf.with_adapter(lambda job: job.workload.adapter_rank)),
    Key(
        "lora_alpha", ("lora_alpha",), hf.with_adapter(lambda job: int(job.workload.adapter_alpha))
    ),
    Key(
        "lora_target_linear",
        ("lora_targets",),
        hf.with_adapter(lambda job: True if _targets(job) is OMIT else OMIT),
    ),
    Key("lora_target_modules", ("lora_targets",), hf.with_adapter(_targets)),
    Key(
        "gradient_checkpointing",
        ("recompute",),
        lambda job: job.plan.recompute == "full",
        _checkpoints,
    ),
    hf.switch("activation_offloading", offload="activations"),
    Key(
        "attn_implementation",
        ("attention_kernel",),
        lambda job: "flash_attention_2" if job["attention_kernel"] == "flash" else OMIT,
        hf.read_kernel,
    ),
    *(hf.switch(f"{name}_attention", attention_kernel="flash") for name in OLDER_KERNELS),
    Key("dp_shard_size", (), lambda job: job.plan.dp_shard if hf.uses_fsdp(job) else OMIT),
    _degree("dp_replicate_size", "dp_replicate"),
    _degree("tensor_parallel_size", "tensor_parallel"),
    _degree("context_parallel_size", "context_parallel"),
    Key("sequence_parallel_degree", read=integer("context_parallel")),  # its older name
    Key("fsdp", read=hf.legacy_fsdp),
    *hf.fsdp_keys("fsdp_config.", "fsdp_version", recomputes=False),
    *(
        Key(key.path, read=key.read)
        for key in hf.fsdp_keys("fsdp_config.fsdp_", "fsdp_config.fsdp_version", recomputes=False)
    ),
    hf.deepspeed_key(),
    *without_effect("""
        model_type tokenizer_type base_model_config tokenizer_config datasets test_datasets
        dataset_prepared_path val_set_size sample_packing pad_to_sequence_len eval_sample_packing
        lora_dropout lora_fan_in_fan_out lora_model_dir strict wandb_project wandb_entity
        wandb_watch wandb_name wandb_log_model plugins num_epochs lr_scheduler train_on_inputs tf32
        xformers gptq_groupsize special_tokens.* special_tokens tokens chat_template rl
        saves_per_epoch evals_per_epoch eval_table_size eval_max_new_tokens early_stopping_patience
        hub_model_id push_dataset_to_hub save_safetensors loss_watchdog_threshold
        loss_watchdog_patience cosine_min_lr_ratio liger_* cosine_constant_lr_ratio
        eval_table_max_new_tokens model_config.* flex_attn_compile_kwargs.*
        fp8_enable_fsdp_float8_all_gather trust_remote_code s2_attention is_llama_derived_model
        is_falcon_derived_model is_mistral_derived_model seed lora_mlp_kernel lora_qkv_kernel
        lora_o_kernel lora_modules_to_save resize_token_embeddings_to_32x unfrozen_parameters
        noisy_embedding_alpha neftune_noise_alpha peft.* peft liger_rope liger_rms_norm
        liger_glu_activation liger_layer_norm save_first_step liger_fused_linear_cross_entropy
        liger_cross_entropy gpu_memory_limit heads_k_stride ring_attn_func excess_length_strategy
        dataset_processes group_by_length shuffle_merged_datasets skip_prepare_dataset
        remove_unused_columns optim_args.* cut_cross_entropy pretraining_dataset
        auto_resume_from_checkpoints overrides_of_model_config.* gptq use_tensorboard
        bnb_config_kwargs.* model_config_type revision_of_model processor_type debug
    """),
    *not_priced("torch_compile", "peft_use_dora", "lora_on_cpu"),
    *hf.ARGUMENTS,
)

TARGET: Final = Target(
    name="axolotl",
    file=FILE,
    syntax=YAML,
    keys=KEYS,
    elsewhere={"global_batch_size": "micro-batch x accumulation x data-parallel ranks"},
    recognises=lambda document: "base_model" in document,
    launch=lambda job: (
        f"axolotl train {FILE}"
        if job.cluster.num_nodes == 1
        else f"axolotl train {FILE} --launcher torchrun -- --nnodes {job.cluster.num_nodes} "
        f"--nproc-per-node {job.cluster.gpus_per_node} --rdzv-backend c10d "
        "--rdzv-endpoint $HEAD:29500"
    ),
    complete=complete,
    check=check,
    remarks=remarks,
    model="base_model",
)
