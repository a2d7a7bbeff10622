"""LLaMA-Factory's YAML file: TrainingArguments and its own arguments.

Source: hiyouga/LLaMA-Factory, src/llamafactory/hparams/model_args.py, finetuning_args.py,
data_args.py; checkpointing of layers is on unless ``disable_gradient_checkpointing`` is.
"""

from __future__ import annotations

from typing import Any, Final

from planner.exchange.keys import (
    OMIT,
    Key,
    Settings,
    Source,
    UnknownWord,
    constant,
    not_priced,
    same,
    without_effect,
    words,
)
from planner.exchange.syntax.documents import YAML
from planner.exchange.target import Target
from planner.exchange.targets import huggingface as hf
from planner.exchange.targets.transformers import prepare

FILE: Final = "llamafactory.yaml"
ATTENTION: Final = {"flash": "fa2", "eager": "disabled"}
DEFAULT_RANK: Final = 8  # finetuning_args.py, lora_rank


def complete(settings: Settings, source: Source) -> Settings:
    """Return the adapter, fp32, and the ZeRO stage."""
    found = hf.fp32_without(source, "bf16", "fp16", "pure_bf16")
    found |= hf.zero_of_wrapper(source, fsdp="fsdp", deepspeed="deepspeed")
    found |= {"num_microbatches": 1}
    if str(source.get("finetuning_type", "lora")) == "lora":
        rank = int(source.get("lora_rank", DEFAULT_RANK))
        quantised = source.get("quantization_bit") is not None
        found["qlora" if quantised else "lora"] = rank
        found["lora_alpha"] = float(source.get("lora_alpha", 2 * rank))
        found["lora_targets"] = hf.target_names_of(source.get("lora_target", "all"))
        if quantised:
            nf4 = "nf4_double" if hf.truth(source.get("double_quantization", True)) else "nf4"
            found["quantisation"] = {4: nf4, 8: "int8"}[int(source.get("quantization_bit"))]
    return found


def _frozen(value: Any, source: Source) -> Settings:
    if value not in ("full", "lora"):
        raise UnknownWord(f"finetuning_type = {str(value)[:40]!r} (known: full, lora)")
    return {}


KEYS: Final = (
    Key("model_name_or_path", (), lambda job: job.model.name),
    constant("stage", "pt"),
    constant("do_train", True),
    Key(
        "finetuning_type",
        ("lora", "qlora"),
        lambda job: "full" if job.workload.adapter == "none" else "lora",
        _frozen,
    ),
    Key("lora_rank", ("lora", "qlora"), hf.with_adapter(lambda job: job.workload.adapter_rank)),
    Key(
        "lora_alpha", ("lora_alpha",), hf.with_adapter(lambda job: int(job.workload.adapter_alpha))
    ),
    Key(
        "lora_target",
        ("lora_targets",),
        hf.with_adapter(
            lambda job: (
                "all"
                if job.workload.adapter_targets == "all"
                else ",".join(hf.module_names(job.workload.adapter_targets))
            )
        ),
    ),
    Key("quantization_bit", ("qlora", "quantisation"), hf.with_qlora(lambda job: 4)),
    Key(
        "double_quantization",
        ("quantisation",),
        hf.with_qlora(lambda job: job.workload.quantisation == "nf4_double"),
    ),
    same("cutoff_len", "seq_len"),
    constant("dataset", "c4_demo"),
    constant("template", "default"),
    constant("output_dir", "out"),
    same("per_device_train_batch_size", "micro_batch_size"),
    same("gradient_accumulation_steps", "num_microbatches"),
    *hf.PRECISIONS,
    hf.switch("pure_bf16", ("master_weights",), precision="bf16", master_weights=False),
    words("optim", "optimizer", hf.OPTIMIZERS, also=hf.MORE_OPTIMIZERS),
    Key(
        "disable_gradient_checkpointing",
        ("recompute",),
        lambda job: job.plan.recompute == "none",
        lambda value, source: {"recompute": "none" if hf.truth(value) else "full"},
        {"recompute": "full"},
    ),
    words(
        "flash_attn",
        "attention_kernel",
        ATTENTION,
        also={"sdpa": "flash", "auto": "flash", "fa3": "flash"},
    ),
    Key("fsdp", (), lambda job: True if hf.uses_fsdp(job) else OMIT, hf.legacy_fsdp),
    *hf.fsdp_keys("fsdp_config.", "fsdp_config.version", recomputes=False, offload="cpu_offload"),
    hf.deepspeed_key(),
    *without_effect("""
        trust_remote_code dataset_dir max_samples preprocessing_num_workers plot_loss val_size
        lora_dropout quantization_method quantization_type image_max_pixels video_max_pixels
        eval_dataset packing neat_packing freeze_vision_tower freeze_multi_modal_projector
        freeze_language_model pref_beta pref_loss reward_model use_v1_kernels ref_model mask_history
        train_on_prompt tf32 overwrite_cache streaming cache_dir additional_target buffer_size
        loraplus_lr_ratio use_rslora upcast_layernorm dataset_shards enable_thinking
        adapter_name_or_path ray_run_name galore_* apollo_* badam_*
    """),
    *not_priced("use_galore", "use_apollo", "use_badam", "use_dora", "use_unsloth", "use_kt"),
    *not_priced("torch_compile", "mixture_of_depths", "fp8"),
    *not_priced("enable_liger_kernel", advice=hf.LIGER),
    *hf.ARGUMENTS,
)

TARGET: Final = Target(
    name="llamafactory",
    file=FILE,
    syntax=YAML,
    keys=KEYS,
    elsewhere={"global_batch_size": "micro-batch x accumulation x processes"},
    recognises=lambda document: (
        "model_name_or_path" in document
        and any(mark in document for mark in ("finetuning_type", "cutoff_len", "template", "stage"))
    ),
    launch=lambda job: (
        f"FORCE_TORCHRUN=1 llamafactory-cli train {FILE}"
        if job.cluster.num_nodes == 1
        else f"FORCE_TORCHRUN=1 NNODES={job.cluster.num_nodes} NODE_RANK=$RANK MASTER_ADDR=$HEAD "
        f"llamafactory-cli train {FILE}"
    ),
    prepare=prepare,
    complete=complete,
    remarks=hf.deepspeed_remarks,
    model="model_name_or_path",
)
