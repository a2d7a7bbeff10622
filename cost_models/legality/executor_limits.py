"""Models, workloads and plan fields that the bundled executor does not train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan
from cost_models.plan.recompute import modules_of
from cost_models.plan.workload import Workload

# values of a workload that the executor trains; others can only be priced
TRAINED: Final[dict[str, tuple[Any, ...]]] = {
    "precision": ("bf16", "fp16", "fp32", "fp64", "fp8"),
    "optimizer": ("adamw", "sgd", "sgd_momentum", "adam", "lion"),
    "optimizer_state_precision": ("auto",),
    "gradient_precision": ("auto",),
    "quantisation": ("nf4",),
    "adapter_method": ("lora",),
}
RECOMPUTED_IN_FP8: Final = ("none", "selective", "full", "selective_ops")
# modules whose results are freed as well
DISCARDED: Final = ("mla_up_proj", "layernorm", "moe_act")
# fields of a plan that the executor reads; it runs every other field at its default only
SUPPORTED_FIELDS: Final = frozenset(
    (
        "data_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "virtual_stages",
        "pipeline_schedule",
        "zero_stage",
        "sequence_parallel",
        "recompute",
        "micro_batch_size",
        "num_microbatches",
        "dp_replicate",
        "context_parallel",
        "context_parallel_method",
        "expert_parallel",
        "expert_tensor_parallel",
        "offload",
        "recompute_layers",
        "recompute_every",
    )
)
_OPT: Final = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layerdrop": 0.0}


def untrained(model: ModelSpec, workload: Workload) -> Iterator[str]:
    """Yield the reasons as text: each names an option or a key of the config, and its value."""
    if value := _value(workload):
        yield value
    if eight := untrained_in_fp8(model, workload):
        yield eight
    yield from _of_config(model, workload)


def unsupported_field(plan: Plan) -> str | None:
    """Return the first field of a plan that the executor does not read, as text; else None.

    Fields at their default pass: a field that is new in ``Plan`` is refused until the executor
    supports it.
    """
    default = type(plan)()
    for field in fields(plan):
        value, only = getattr(plan, field.name), getattr(default, field.name)
        if field.name not in SUPPORTED_FIELDS and value != only:
            return (
                f"{field.name} = {str(value).lower()} (only {str(only).lower()}; other values are "
                "priced only)"
            )
    return None


def untrained_recompute(workload: Workload, plan: Plan) -> str | None:
    """Return a setting of recomputation that another option excludes, as text.

    Results that are computed again for later operators are not offloaded; in fp8 only whole
    layers, attention cores and ``selective_ops`` are tested.
    """
    setting = plan.recompute
    if workload.precision == "fp8" and setting not in RECOMPUTED_IN_FP8:
        return f"recompute = {setting} with precision fp8 (only {', '.join(RECOMPUTED_IN_FP8)})"
    if plan.offloads_activations and set(modules_of(setting)) & set(DISCARDED):
        return (
            f"recompute = {setting} with offload {plan.offload}: the results of "
            f"{', '.join(DISCARDED)} cannot leave the device (only core_attn, mlp, moe and "
            "shared_experts)"
        )
    return None


def _value(workload: Workload) -> str | None:
    """Return the first option of a workload that the executor does not train, as text.

    Not trained: factors of a matrix (Adafactor) and products of whole matrices (Muon), which differ
    on shards; 8-bit and paged states, which are bitsandbytes'.
    """
    for name, known in TRAINED.items():
        value = getattr(workload, name)
        if value not in known:
            return (
                f"{name} = {str(value).lower()} (only {', '.join(str(k).lower() for k in known)})"
            )
    if not workload.master_weights and workload.precision != "bf16":
        return f"master_weights = false with precision {workload.precision} (only with bf16)"
    return None


def untrained_in_fp8(model: ModelSpec, workload: Workload) -> str | None:
    """Return the part of a model that is not trained in fp8, as text; plans: ``fp8_rules``."""
    if workload.precision != "fp8":
        return None
    if experts := max(kind.feed_forward.num_experts for kind in model.kinds):
        return f"num_experts = {experts} with precision fp8 (only 0)"
    if workload.adapter != "none":
        return f"adapter = {workload.adapter} with precision fp8 (only none)"
    if model.has_linear_attention:
        return f"model_type {model.family} with precision fp8 (no linear attention)"
    if model.bridge:
        return f"model_type {model.family} with precision fp8 (no encoder-decoder)"
    return None


def _of_config(model: ModelSpec, workload: Workload) -> Iterator[str]:
    """Yield the options of a config that the executor's forward pass does not support."""
    if model.config.get("clip_qkv") is not None:
        yield f"clip_qkv = {model.config['clip_qkv']} (only null)"
    if model.config.get("router_jitter_noise"):
        yield f"router_jitter_noise = {model.config['router_jitter_noise']} (only 0)"
    if model.config.get("output_router_logits"):
        yield (
            "output_router_logits = true adds the routers' auxiliary loss, which needs the "
            "routing of the whole batch at once (only false, Hugging Face's default)"
        )
    if model.family == "bert" and not model.tie_embeddings:
        yield "tie_word_embeddings = false for bert (only true)"
    if model.family == "t5":
        yield from _of_t5(model, workload)
    if model.family == "opt":
        for key, allowed in _OPT.items():
            if model.config.get(key, allowed) != allowed:
                yield f"{key} = {model.config[key]} for opt (only {allowed})"
        width = model.config.get("word_embed_proj_dim") or model.hidden_size
        if width != model.hidden_size:
            yield f"word_embed_proj_dim = {width} for opt (only hidden_size)"
    if model.has_linear_attention and workload.attention_kernel != "eager":
        yield (
            f"attention_kernel = {workload.attention_kernel} with linear attention (only eager: "
            "the rule is written out in torch)"
        )
    if model.has_linear_attention and workload.document_mask:
        yield "packing documents with linear attention (only concat or none)"
    for kind in model.kinds:
        attention = kind.attention
        if not attention.causal and model.config.get("use_bidirectional_attention"):
            yield "use_bidirectional_attention = true (only false)"
        if attention.capped and model.attention_dropout and workload.attention_kernel != "eager":
            yield (
                f"attention_dropout = {model.attention_dropout:g} with capped scores "
                "(attn_logit_softcapping) needs attention_kernel eager"
            )
    if model.config.get("reorder_and_upcast_attn"):
        yield "reorder_and_upcast_attn = true (only false)"


def _of_t5(model: ModelSpec, workload: Workload) -> Iterator[str]:
    if workload.precision == "fp16":
        yield "precision fp16: t5 overflows in it (bf16, fp32, fp64)"
    for key in ("pad_token_id", "decoder_start_token_id"):
        if model.config.get(key):
            yield f"{key} = {model.config[key]} for t5 (only 0)"
