"""Plans as fields of Megatron Core, whose names its scripts, Megatron Bridge and NeMo share.

Source: NVIDIA/Megatron-LM, megatron/core (megatron-core 0.16.1): model_parallel_config.py,
transformer/transformer_config.py, distributed/distributed_data_parallel_config.py,
optimizer/optimizer_config.py; megatron/training/arguments.py (validate_args).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from cost_models.plan.plan import split_layers
from cost_models.plan.recompute import CONTAINED, OF_MEGATRON, PREFIX, SINGLE, read_setting
from hardware_profiles.errors import InputError
from planner.exchange.job import Job
from planner.exchange.keys import Settings, UnknownWord

Get = Callable[[str], Any]  # the value of a field; None where it is not given

STRATEGIES: Final = {2: "optim_grads", 3: "optim_grads_params"}
CONTEXT: Final = {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather"}
OPTIMIZERS: Final = {"adamw": "adam", "sgd": "sgd", "sgd_momentum": "sgd", "muon": "muon"}
KERNELS: Final = {"flash": "flash", "eager": "unfused"}
OTHER_KERNELS: Final = {"fused": "flash", "auto": "flash", "unfused": "eager", "local": "eager"}
# options that a field carries, for the comments of a written file
CARRIES: Final = {
    "tensor_model_parallel_size": ("tensor_parallel",),
    "pipeline_model_parallel_size": ("pipeline_parallel", "pipeline_schedule"),
    "virtual_pipeline_model_parallel_size": ("virtual_stages",),
    "pipeline_model_parallel_layout": ("layers",),
    "context_parallel_size": ("context_parallel",),
    "cp_comm_type": ("context_parallel_method",),
    "expert_model_parallel_size": ("expert_parallel",),
    "expert_tensor_parallel_size": ("expert_tensor_parallel",),
    "sequence_parallel": ("sequence_parallel",),
    "micro_batch_size": ("micro_batch_size",),
    "global_batch_size": ("global_batch_size",),
    "seq_length": ("seq_len",),
    "recompute_granularity": ("recompute",),
    "recompute_method": (),
    "recompute_num_layers": ("recompute_layers",),
    "recompute_modules": ("recompute",),
    "use_distributed_optimizer": ("zero_stage",),
    "overlap_grad_reduce": (),
    "overlap_param_gather": (),
    "use_megatron_fsdp": ("zero_stage",),
    "data_parallel_sharding_strategy": ("zero_stage",),
    "num_distributed_optimizer_instances": ("dp_replicate",),
    "bf16": ("precision",),
    "fp16": ("precision",),
    "fp8": ("precision",),
    "optimizer": ("optimizer",),
    "sgd_momentum": ("optimizer",),
    "grad_reduce_in_fp32": ("gradient_precision",),
    "exp_avg_dtype": ("optimizer_state_precision",),
    "exp_avg_sq_dtype": ("optimizer_state_precision",),
    "use_precision_aware_optimizer": (),
    "optimizer_cpu_offload": ("offload",),
    "optimizer_offload_fraction": (),
    "attention_backend": ("attention_kernel",),
}
# where a user sets what no field carries
ELSEWHERE: Final = {
    "data_parallel": "the ranks that are left",
    "num_microbatches": "follows from global_batch_size and micro_batch_size",
    "expert_tensor_parallel": "no effect without tensor parallelism or experts",
}


def fields_of(job: Job) -> dict[str, Any]:
    """Return the fields that state a job; None: the field's default."""
    plan, work = job.plan, job.workload
    sharded = STRATEGIES.get(plan.zero_stage)
    interleaved = plan.virtual_stages if plan.virtual_stages > 1 else None
    layout = layout_of(job)
    states = None if work.optimizer_state_precision == "auto" else work.optimizer_state_precision
    gradients = {"auto": None, "fp32": True, "bf16": False}[work.gradient_precision]
    whole_experts = plan.tensor_parallel > 1 and not plan.expert_tensor_parallel
    return {
        "tensor_model_parallel_size": plan.tensor_parallel,
        "sequence_parallel": plan.sequence_parallel,
        "pipeline_model_parallel_size": plan.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": None if layout else interleaved,
        "pipeline_model_parallel_layout": layout,
        "context_parallel_size": plan.context_parallel,
        "cp_comm_type": CONTEXT[plan.context_parallel_method]
        if plan.context_parallel > 1
        else None,
        "expert_model_parallel_size": plan.expert_parallel,
        "expert_tensor_parallel_size": 1 if whole_experts and job.model.has_experts else None,
        "micro_batch_size": plan.micro_batch_size,
        "global_batch_size": work.global_batch_size,
        "seq_length": work.seq_len,
        **_recompute_of(job),
        "use_distributed_optimizer": plan.zero_stage >= 1,
        "overlap_grad_reduce": plan.zero_stage >= 1,
        "overlap_param_gather": plan.zero_stage >= 1,
        "use_megatron_fsdp": sharded is not None,
        "data_parallel_sharding_strategy": sharded,
        "num_distributed_optimizer_instances": plan.dp_replicate if plan.dp_replicate > 1 else None,
        "bf16": work.precision in ("bf16", "fp8"),
        "fp16": work.precision == "fp16",
        "fp8": "hybrid" if work.precision == "fp8" else None,
        "optimizer": OPTIMIZERS.get(work.optimizer),
        "sgd_momentum": {"sgd": 0.0, "sgd_momentum": 0.9}.get(work.optimizer),
        "grad_reduce_in_fp32": gradients,
        "exp_avg_dtype": states,
        "exp_avg_sq_dtype": states,
        "use_precision_aware_optimizer": states is not None or plan.offloads_optimizer,
        "optimizer_cpu_offload": plan.offloads_optimizer,
        "optimizer_offload_fraction": 1.0 if plan.offloads_optimizer else None,
        "attention_backend": KERNELS.get(work.attention_kernel),
    }


def _recompute_of(job: Job) -> dict[str, Any]:
    plan = job.plan
    granularity, method, number = None, None, None
    modules: list[str] | None = None
    if plan.recompute == "full":
        granularity = "full"
        method, number = (
            ("block", plan.recompute_layers) if plan.recompute_layers else ("uniform", 1)
        )
    elif plan.recompute == "selective":
        granularity = "selective"
    elif plan.recompute.startswith(PREFIX):
        granularity, modules = "selective", plan.recompute.removeprefix(PREFIX).split("+")
    return {
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": number,
        "recompute_modules": modules,
    }


def check_fields(job: Job) -> None:
    """Raise where Megatron Core refuses a plan that the table of capabilities lets pass."""
    plan = job.plan
    if plan.recompute_every:
        raise InputError(
            f"recompute = {plan.recompute}:{plan.recompute_layers}/{plan.recompute_every}: "
            "Megatron Core recomputes all layers of a stage or its first ones (choose full)"
        )
    if plan.recompute.startswith(PREFIX) and plan.recompute not in OF_MEGATRON:
        raise InputError(
            f"recompute = {plan.recompute}: Megatron Core has no modules {' and '.join(CONTAINED)} "
            f"(choose some of {', '.join(SINGLE)})"
        )
    if job.file.stage_recompute_layers is not None:
        raise InputError(
            "recompute_layers of each stage: Megatron Core's --recompute-num-layers is one number "
            "for all stages"
        )
    if plan.recompute_layers and plan.recompute != "full":
        raise InputError(
            f"recompute_layers = {plan.recompute_layers} with recompute {plan.recompute}: Megatron "
            "Core selects layers for full recomputation only"
        )
    if plan.virtual_stages > 1 and plan.num_microbatches < plan.pipeline_parallel:
        raise InputError(
            f"interleaved_1f1b with num_microbatches {plan.num_microbatches} < pipeline_parallel "
            f"{plan.pipeline_parallel}: Megatron Core needs at least as many"
        )
    if plan.context_parallel > 1 and job.workload.seq_len % (2 * plan.context_parallel):
        raise InputError(
            f"seq_len = {job.workload.seq_len}: Megatron Core needs a multiple of 2 x "
            f"context_parallel = {2 * plan.context_parallel}"
        )
    if job.model.has_experts and plan.tensor_parallel > 1 and not plan.sequence_parallel:
        raise InputError(
            f"{job.model.name} has experts: with tensor_parallel {plan.tensor_parallel} Megatron "
            "Core needs sequence_parallel"
        )


# --- stages ---


def layout_of(job: Job) -> str | None:
    """Return the layers of each stage as ``Ett|tt|ttL``; None where all stages are equal."""
    ranges, stages = job.file.layer_ranges, job.plan.num_stages
    is_even = job.model.num_layers % stages == 0 and ranges == tuple(
        split_layers(job.model.num_layers, stages)
    )
    if stages == 1 or (is_even and "layers" not in job.settings):
        return None
    texts = [f"t*{last - first}" if last > first else "" for first, last in ranges]
    return "|".join(["E" + texts[0], *texts[1:-1], texts[-1] + "L"])


def layers_of_layout(text: str) -> list[int]:
    """Return the number of layers of each stage of a layout.

    >>> layers_of_layout("Et*3|(tt|)*2t|tL"), layers_of_layout("E|t*8|t*8|L")
    ([3, 2, 2, 1, 1], [0, 8, 8, 0])
    """
    text = text.replace(" ", "").replace(",", "")
    for _ in range(10):
        text, found = re.subn(
            r"(?:\(([^()]*)\)|([A-Za-z]))\*(\d{1,4})",
            lambda m: (m[1] if m[1] is not None else m[2]) * int(m[3]),
            text,
        )
        if not found or len(text) > 100_000:
            break
    if not re.fullmatch(r"[EtmLe|d]+", text):
        raise UnknownWord(f"pipeline_model_parallel_layout = {text[:60]!r} is not understood")
    return [stage.count("t") + stage.count("d") for stage in text.split("|")]


def _stages(get: Get, ranks: int, num_layers: int | None) -> tuple[int, list[int] | None]:
    """Return the virtual stages of a rank, and the layers of each stage where they differ."""
    layout = get("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        layers = layers_of_layout(layout)
        return max(len(layers) // ranks, 1), layers if all(layers[1:-1]) else None
    virtual = get("virtual_pipeline_model_parallel_size") or 1
    per_stage = get("num_layers_per_virtual_pipeline_stage")
    if per_stage and num_layers:
        virtual = max(num_layers // (ranks * per_stage), 1)
    if not num_layers:
        return virtual, None
    return virtual, _uneven(get, ranks * virtual, num_layers)


def _uneven(get: Get, stages: int, num_layers: int) -> list[int] | None:
    """Return the layers of stages whose first or last one differs."""
    first = get("num_layers_in_first_pipeline_stage")
    last = get("num_layers_in_last_pipeline_stage")
    for_embedding = int(bool(get("account_for_embedding_in_pipeline_split")))
    for_loss = int(bool(get("account_for_loss_in_pipeline_split")))
    if for_embedding or for_loss:
        each = (num_layers + for_embedding + for_loss) // stages
        layers = [each] * stages
        layers[0] -= for_embedding
        layers[-1] -= for_loss
    elif first or last:
        between = stages - bool(first) - bool(last)
        left = num_layers - (first or 0) - (last or 0)
        if between < 1 or left % between:
            return None
        layers = [left // between] * stages
        layers[0], layers[-1] = first or layers[0], last or layers[-1]
    else:
        return None
    return layers if min(layers) > 0 and sum(layers) == num_layers else None


# --- reading ---


def settings_of_fields(get: Get) -> Settings:
    """Return the options that fields state."""
    tensor = get("tensor_model_parallel_size") or 1
    pipeline = get("pipeline_model_parallel_size") or 1
    found: Settings = {
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "context_parallel": get("context_parallel_size") or 1,
        "expert_parallel": get("expert_model_parallel_size") or 1,
        "zero_stage": _zero_stage(get),
        "recompute": "none",
        "precision": _precision(get),
        "optimizer": _optimizer(get),
        "expert_tensor_parallel": not (tensor > 1 and get("expert_tensor_parallel_size") == 1),
    }
    if tensor > 1:
        found["sequence_parallel"] = bool(get("sequence_parallel"))
    if pipeline > 1:
        virtual, layers = _stages(get, pipeline, get("num_layers"))
        found["virtual_stages"] = virtual
        found["pipeline_schedule"] = "interleaved_1f1b" if virtual > 1 else "1f1b"
        if layers is not None:
            found["layers"] = ",".join(map(str, layers))
    if found["context_parallel"] > 1:
        found["context_parallel_method"] = _context_method(get("cp_comm_type"))
    if get("optimizer_cpu_offload"):
        found["offload"] = "optimizer"
    if (replicas := get("num_distributed_optimizer_instances")) and found["zero_stage"]:
        found["dp_replicate"] = replicas
    if get("exp_avg_dtype") in ("bf16", "fp32"):
        found["optimizer_state_precision"] = get("exp_avg_dtype")
    if (in_fp32 := get("grad_reduce_in_fp32")) is not None:
        found["gradient_precision"] = "fp32" if in_fp32 else "bf16"
    if (kernel := get("attention_backend")) is not None:
        kernel = str(kernel).rsplit(".", 1)[-1]
        found["attention_kernel"] = OTHER_KERNELS.get(kernel, "flash")
    return found | _recompute(get)


def _zero_stage(get: Get) -> int:
    if get("use_torch_fsdp2"):
        return 2 if get("torch_fsdp2_no_reshard_after_forward") else 3
    if get("use_megatron_fsdp") or get("use_custom_fsdp"):
        strategy = get("data_parallel_sharding_strategy") or "no_shard"
        words = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        if strategy not in words:
            raise UnknownWord(f"data_parallel_sharding_strategy = {strategy!r} is not known")
        return words[strategy]
    return int(bool(get("use_distributed_optimizer")))


def _precision(get: Get) -> str:
    if get("fp8"):
        return "fp8"
    return "bf16" if get("bf16") else "fp16" if get("fp16") else "fp32"


def _optimizer(get: Get) -> str:
    word = str(get("optimizer") or "adam").lower()
    if word == "sgd":
        momentum = get("sgd_momentum")
        return "sgd" if momentum in (0, 0.0) else "sgd_momentum"
    names = {"adam": "adamw", "dist_muon": "muon", "muon": "muon"}
    if word not in names:
        raise UnknownWord(f"optimizer = {word[:60]!r} (known: adam, sgd, muon)")
    return names[word]


def _context_method(word: Any) -> str:
    words = {theirs: ours for ours, theirs in CONTEXT.items()} | {"allgather": "allgather"}
    word = word[0] if isinstance(word, list) and word else word
    if word is not None and word not in words:
        raise UnknownWord(f"cp_comm_type = {word!r} (known: {', '.join(words)}); priced as p2p")
    return words.get(word, "ring")


def _recompute(get: Get) -> Settings:
    granularity = get("recompute_granularity")
    if granularity is None and get("recompute_activations"):
        granularity = "selective"
    if granularity == "selective":
        modules = get("recompute_modules") or ["core_attn"]
        modules = modules if isinstance(modules, list) else str(modules).split()
        return {"recompute": read_setting(PREFIX + "+".join(map(str, modules)))}
    if granularity != "full":
        return {}
    number = get("recompute_num_layers")
    if get("recompute_method") == "block" and isinstance(number, int) and number:
        return {"recompute": "full", "recompute_layers": number}
    return {"recompute": "full"}


def notes_of_fields(get: Get) -> Iterator[str]:
    """Yield what fields state that is not priced."""
    number = get("recompute_num_layers")
    if get("recompute_method") == "uniform" and isinstance(number, int) and number > 1:
        yield (
            f"recompute_num_layers = {number} with recompute_method uniform: groups of layers are "
            "recomputed together; priced layer by layer"
        )
    if get("rampup_batch_size"):
        yield "rampup_batch_size: priced with the full global batch"
    if get("mtp_num_layers"):
        yield f"mtp_num_layers = {get('mtp_num_layers')}: multi-token prediction is not priced"
    if get("cpu_offloading_num_layers"):
        yield "cpu_offloading_num_layers: offloaded activations of some layers are not priced"
    if get("fine_grained_activation_offloading"):
        yield "fine_grained_activation_offloading is not priced"
