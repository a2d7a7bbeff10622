"""Keys that Hugging Face's Trainer, Accelerate, Axolotl and LLaMA-Factory share.

Source: huggingface/transformers v5.23, src/transformers/training_args.py (``optim``,
``fsdp_config`` without the prefix, ``activation_checkpointing``); huggingface/accelerate v1.15,
src/accelerate/utils/dataclasses.py (FullyShardedDataParallelPlugin).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in, read_text
from planner.exchange.job import Job
from planner.exchange.keys import (
    OMIT,
    Key,
    Settings,
    Source,
    UnknownWord,
    not_priced,
    omitted,
    placed,
    without_effect,
)
from planner.exchange.target import ConfigReading

OPTIMIZERS: Final = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "lion_8bit": "lion_8bit",
    "ademamix": "ademamix",
    "ademamix_8bit": "ademamix_8bit",
    "sgd": "sgd",
}
MORE_OPTIMIZERS: Final = {  # further names, of older versions too
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_8bit": "adamw_8bit",
}
MODULES: Final = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"} | {
    name: f"{name}_proj" for name in ("gate", "up", "down")
}
ATTENTION: Final = ("q", "k", "v", "o")
STRATEGIES: Final = {  # FSDP1: ZeRO stage
    "1": 3,
    "full_shard": 3,
    "2": 2,
    "shard_grad_op": 2,
    "3": 0,
    "no_shard": 0,
    "4": 3,
    "hybrid_shard": 3,
    "5": 2,
    "hybrid_shard_zero2": 2,
}
FSDP1: Final = "hf-trainer+fsdp1"
FSDP2: Final = "hf-trainer+fsdp2"


def auto_class(job: Job) -> str:
    """Return the class of transformers that loads the model as it is trained."""
    return "AutoModelForSeq2SeqLM" if job.model.bridge else "AutoModelForCausalLM"


def uses_deepspeed(job: Job) -> bool:
    """Whether a plan runs with DeepSpeed: ZeRO-1, and optimizer states in host memory."""
    return job.plan.zero_stage == 1 or job.plan.offload == "optimizer"


def uses_fsdp(job: Job) -> bool:
    """Whether a plan runs with FSDP2."""
    return job.plan.zero_stage >= 2 and not uses_deepspeed(job)


def with_adapter(value: Callable[[Job], Any]) -> Callable[[Job], Any]:
    """Return what writes a value for plans with adapters alone."""
    return lambda job: OMIT if job.workload.adapter == "none" else value(job)


def with_qlora(value: Callable[[Job], Any]) -> Callable[[Job], Any]:
    """Return what writes a value for plans with quantised weights alone."""
    return lambda job: value(job) if job.workload.adapter == "qlora" else OMIT


def on_cpu(job: Job) -> bool:
    """Whether a plan runs on CPUs."""
    return job.cluster.accelerator.device == "cpu"


def truth(value: Any) -> bool:
    """Return a switch that may be a word.

    >>> truth("true"), truth("False"), truth(True)
    (True, False, True)
    """
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "on")
    return bool(value)


def switch(
    path: str, carries: tuple[str, ...] = (), write: Callable[[Job], Any] = omitted, **settings: Any
) -> Key:
    """Return a key that states settings where it is on, and nothing where it is off."""
    return Key(path, carries, write, lambda value, source: settings if truth(value) else {})


def _precision_key(name: str) -> Key:
    def write(job: Job) -> Any:
        return True if job["precision"] == name else OMIT

    return switch(name, ("precision",), write, precision=name)


# the two switches of 16-bit precision
PRECISIONS: Final = (_precision_key("bf16"), _precision_key("fp16"))


def fp32_without(source: Source, *paths: str) -> Settings:
    """Return fp32 where no switch of 16 bits is on or automatic."""
    given = [source.get(path) for path in paths]
    return {} if any(one == "auto" or truth(one) for one in given) else {"precision": "fp32"}


def of_deepspeed(stage: int) -> str:
    """Return the software profile of a ZeRO stage of DeepSpeed."""
    return f"hf-trainer+deepspeed-zero{stage}" if stage else "hf-trainer-autocast"


def _zero_of_strategy(value: Any, source: Source) -> Settings:
    word = str(value).lower()
    if word in ("true", "false"):  # reshard_after_forward, under its old name
        return {"zero_stage": 3 if word == "true" else 2}
    if word not in STRATEGIES:
        raise UnknownWord(f"sharding strategy {str(value)[:60]!r} (known: {', '.join(STRATEGIES)})")
    return {"zero_stage": STRATEGIES[word]}


def read_recompute(value: Any, source: Source) -> Settings:
    """Return whether layers are checkpointed."""
    return {"recompute": "full" if truth(value) else "none"}


def fsdp_keys(
    section: str, version: str, *, recomputes: bool, offload: str = "offload_params"
) -> tuple[Key, ...]:
    """Return the keys of a section of FSDP: ``section`` ends in its prefix.

    ``version``: the path of FSDP's version; ``recomputes``: whether the section carries activation
    checkpointing for this trainer (else another key does); ``offload``: the written one of two
    names of a key.
    """
    checkpointing = f"{section}activation_checkpointing"

    def on(value: Callable[[Job], Any]) -> Callable[[Job], Any]:
        return lambda job: value(job) if uses_fsdp(job) else OMIT

    return (
        Key(
            version,
            (),
            on(lambda job: 2),
            lambda value, source: {"software": FSDP2 if str(value) == "2" else FSDP1},
        ),
        Key(f"{section}sharding_strategy", ("zero_stage",), read=_zero_of_strategy),
        Key(
            f"{section}reshard_after_forward",
            ("zero_stage",),
            on(lambda job: job.plan.zero_stage == 3),
            _zero_of_strategy,
        ),
        Key(f"{section}auto_wrap_policy", (), on(lambda job: "TRANSFORMER_BASED_WRAP")),
        Key(f"{section}state_dict_type", (), on(lambda job: "SHARDED_STATE_DICT")),
        # with 4-bit weights, which the first rank alone would make, it hangs (Axolotl refuses it)
        Key(
            f"{section}cpu_ram_efficient_loading",
            (),
            on(lambda job: job.workload.adapter != "qlora"),
        ),
        *(
            switch(
                f"{section}{name}",
                ("offload",),
                on(lambda job: True if job.plan.offloads_weights else OMIT)
                if name == offload
                else omitted,
                offload="weights",
            )
            for name in ("offload_params", "cpu_offload")
        ),
        Key(
            checkpointing,
            ("recompute",),
            on(lambda job: job.plan.recompute == "full"),
            read_recompute,
        )
        if recomputes
        else switch(checkpointing, recompute="full"),
        *without_effect(
            """
            transformer_layer_cls_to_wrap transformer_cls_names_to_wrap backward_prefetch
            forward_prefetch use_orig_params min_num_params sync_module_states limit_all_gathers
            ignored_modules xla_fsdp_v2 xla_fsdp_grad_ckpt final_state_dict_type
            xla_fsdp_settings.* backward_prefetch_policy
            """,
            section=section,
        ),
        *not_priced(f"{section}xla", f"{section}activation_checkpointing_offload"),
    )


def deepspeed_key() -> Key:
    """Return the key of DeepSpeed's configuration: a mapping, or the name of its file."""

    def write(job: Job) -> Any:
        if not uses_deepspeed(job):
            return OMIT
        section: dict[str, Any] = {"stage": job.plan.zero_stage}
        if job.plan.offloads_optimizer:
            section["offload_optimizer"] = {"device": job.plan.offload_device}
        automatic = names_in("""
            train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
            bf16.enabled fp16.enabled
        """)
        return placed({**dict.fromkeys(automatic, "auto"), "zero_optimization": section})

    return Key("deepspeed", ("zero_stage", "offload", "offload_device"), write, read_deepspeed)


def read_deepspeed(value: Any, source: Source) -> Settings:
    """Return what DeepSpeed's configuration states: a mapping, or a file next to this one."""
    found = _deepspeed_document(value, source).settings
    stage = found.get("zero_stage", 0)
    sharding = ("zero_stage", "offload", "offload_device", "secondary_ranks")
    kept = [*sharding, "quantised_weights", "quantised_gradients"]
    if found.get("tensor_parallel", 1) > 1:
        kept += ["tensor_parallel", "sequence_parallel"]
    if found.get("context_parallel", 1) > 1:
        kept += ["context_parallel", "context_parallel_method"]
    return {name: found[name] for name in kept if name in found} | {"software": of_deepspeed(stage)}


def _deepspeed_document(value: Any, source: Source) -> ConfigReading:
    """Return the reading of DeepSpeed's configuration: a mapping, or the name of its file."""
    from planner.exchange.targets.deepspeed import TARGET

    if isinstance(value, str):
        try:
            value = neighbour(value, source, "a DeepSpeed configuration")
        except InputError as error:
            raise UnknownWord(f"deepspeed: {error}") from None
    if not isinstance(value, Mapping):
        raise UnknownWord("deepspeed: neither a mapping nor a file")
    return TARGET.read_document(Source(value, source.folder))


def deepspeed_remarks(source: Source, path: str = "deepspeed") -> list[str]:
    """Return what is not understood in DeepSpeed's configuration, which a key names or holds."""
    value = source.get(path)
    try:
        reading = None if value is None else _deepspeed_document(value, source)
    except UnknownWord:
        return []  # the key's own note
    if reading is None:
        return []
    found = [f"{path}: {note}" for note in reading.notes]
    if reading.unknown:
        found.append(
            f"{path}: keys that are not known, so not priced: {', '.join(reading.unknown)}"
        )
    return found


def neighbour(name: str, source: Source, what: str) -> Mapping[str, Any]:
    """Return the document of a file that a file names.

    A relative name starts in the folder of the naming file or in one above it, since people start
    their jobs at the root of a repository.
    """
    from planner.exchange.syntax.documents import parse_yaml

    folder = Path() if source.folder is None else source.folder
    above = [folder, *folder.resolve().parents]
    try:
        path = next((each / name for each in above if (each / name).is_file()), folder / name)
    except OSError as error:  # a name that is too long
        raise InputError(f"{name[:60]}: {error.strerror}") from None
    return parse_yaml(read_text(path, what), str(path))


def legacy_fsdp(value: Any, source: Source) -> Settings:
    """Return what the words of ``fsdp`` state: ``full_shard auto_wrap offload``, or a switch."""
    if isinstance(value, bool):
        return {}
    given = " ".join(value) if isinstance(value, list) else str(value)
    found: Settings = {}
    for word in given.split():
        if word in STRATEGIES:
            found["zero_stage"] = STRATEGIES[word]
            found.setdefault("software", FSDP1)
        elif word == "offload":
            found["offload"] = "weights"
    return found


def zero_of_wrapper(source: Source, *, fsdp: str, deepspeed: str) -> Settings:
    """Return the ZeRO stage of a file that states none: FSDP's full sharding, or none."""
    if source.get(deepspeed) is not None:
        return {}
    wrapped = source.get(fsdp) not in (None, "", [], {}, False)
    return {"zero_stage": 3 if wrapped else 0}


def read_kernel(value: Any, source: Source) -> Settings:
    """Return the attention kernel of ``attn_implementation``."""
    word = str(value).lower()
    known = ("flash", "sdpa", "xformers", "flex_attention", "sage")
    if word != "eager" and not any(name in word for name in known):
        raise UnknownWord(f"attn_implementation = {word[:60]!r} (known: eager, {', '.join(known)})")
    return {"attention_kernel": "eager" if word == "eager" else "flash"}


def target_names_of(value: Any) -> str:
    """Return adapted matrices in our words.

    >>> target_names_of("q_proj,v_proj"), target_names_of(["all-linear"])
    ('q,v', 'all')
    """
    given = value if isinstance(value, list) else str(value).split(",")
    words_ = [str(word).strip() for word in given]
    if words_ and words_[0] in ("all", "all-linear"):
        return "all"
    ours = {theirs: name for name, theirs in MODULES.items()}
    unknown = [word for word in words_ if word not in ours]
    if unknown:
        raise UnknownWord(f"adapted matrices {unknown[0][:40]!r} (known: {', '.join(ours)})")
    names = [name for name in MODULES if MODULES[name] in words_]
    if len(names) == len(MODULES):
        return "all"
    return "attention" if tuple(names) == ATTENTION else ",".join(names)


def module_names(targets: str) -> list[str]:
    """Return adapted matrices as peft names them.

    >>> module_names("q,v")
    ['q_proj', 'v_proj']
    """
    names = {"all": tuple(MODULES), "attention": ATTENTION}.get(targets) or targets.split(",")
    return [MODULES[name] for name in names]


LIGER: Final = " (--software hf-trainer-liger+fsdp2 prices its kernels)"
# arguments of TrainingArguments on which a price does not depend
ARGUMENTS: Final = without_effect("""
    output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs.* warmup_steps warmup_ratio optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon max_grad_norm seed label_smoothing_factor bf16_full_eval fp16_full_eval
    torch_compile_backend torch_compile_mode neftune_noise_alpha logging_strategy logging_steps
    logging_first_step logging_dir log_level log_level_replica disable_tqdm report_to run_name
    project eval_strategy evaluation_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_accumulation_steps save_strategy save_steps
    save_total_limit save_only_model save_on_each_node save_safetensors push_to_hub hub_model_id
    hub_strategy hub_private_repo hub_token load_best_model_at_end data_seed metric_for_best_model
    greater_is_better ignore_data_skip full_determinism dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory ddp_timeout dataloader_persistent_workers dataloader_prefetch_factor
    remove_unused_columns label_names group_by_length length_column_name ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend do_train do_eval do_predict
    resume_from_checkpoint local_rank train_sampling_strategy gradient_checkpointing_kwargs.*
    activation_checkpointing_kwargs.* debug accelerator_config.* include_num_input_tokens_seen
    average_tokens_across_devices skip_memory_metrics torch_empty_cache_steps auto_find_batch_size
    use_cache gradient_checkpointing_kwargs lr_scheduler_kwargs hub_revision use_cpu
    trackio_space_id
""")
