"""What the executor can run; asked before anything starts, so it imports neither torch nor models.

The rules that hold for every trainer are ``cost_models.legality``; these are the executor's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cost_models.legality import require_legal
from cost_models.plan_file import PlanFile
from cost_models.rule import Question
from cost_models.supported import untrained_in_fp8, untrained_value
from hardware_profiles.errors import InputError, did_you_mean

FAMILIES: Final = (
    "bert",
    "cohere",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
    "t5",
)

_OPT: Final = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layerdrop": 0.0}
MASKED_FAMILIES: Final = ("bert",)  # predict tokens that were hidden
SPAN_FAMILIES: Final = ("t5",)  # predict spans of tokens that were taken out


def question_of_file(file: PlanFile) -> Question:
    """Return what the rules ask of a plan.json, on as many ranks as its plan has."""
    return Question(
        file.model,
        file.workload,
        file.plan.world_size,
        layer_ranges=file.layer_ranges,
        stage_recompute_layers=file.stage_recompute_layers,
    )


def check_supported(file: PlanFile) -> None:
    """Raise an InputError that names the option which stands against running a plan."""
    require_legal(question_of_file(file), file.plan)
    for problem in _problems(file):
        raise InputError(f"the executor cannot run this plan: {problem}")


def _problems(file: PlanFile) -> Iterator[str]:
    model, plan = file.model, file.plan
    if untrained := untrained_value(file.workload):
        yield untrained
    if eight := untrained_in_fp8(model, file.workload):
        yield eight
    if model.family not in FAMILIES:
        yield (
            f"model_type {model.family} (it trains {', '.join(FAMILIES)}). "
            f"{did_you_mean(model.family, FAMILIES)}"
        ).rstrip()
    if plan.is_zero_plus_plus:
        yield (
            "secondary_ranks, quantised_weights and quantised_gradients (ZeRO++) are priced only "
            "(1, off and off)"
        )
    if plan.offloads_weights:
        yield f"offload {plan.offload} (only none, optimizer, activations, optimizer+activations)"
    if plan.offload_device != "cpu":
        yield f"offload_device {plan.offload_device} (only cpu)"
    # every tensor-parallel rank holds ceil(vocabulary / ranks) rows; the last must not be empty
    rows = -(-model.vocab_size // plan.tensor_parallel)
    if rows * (plan.tensor_parallel - 1) >= model.vocab_size:
        yield (
            f"tensor_parallel {plan.tensor_parallel} leaves a rank without any of the "
            f"{model.vocab_size} words of the vocabulary (vocab_size)"
        )
    if model.config.get("clip_qkv") is not None:
        yield f"clip_qkv = {model.config['clip_qkv']} (only null)"
    if model.config.get("router_jitter_noise"):
        yield f"router_jitter_noise = {model.config['router_jitter_noise']} (only 0)"
    if model.config.get("output_router_logits"):
        yield (
            "output_router_logits = true asks for the routers' auxiliary loss, which needs the "
            "routing of the whole batch at once (only false)"
        )
    if model.family == "bert" and not model.tie_embeddings:
        yield "tie_word_embeddings = false for bert (only true)"
    if model.family == "t5":
        yield from _problems_of_t5(file)
    if model.family == "opt":
        for key, allowed in _OPT.items():
            if model.config.get(key, allowed) != allowed:
                yield f"{key} = {model.config[key]} for opt (only {allowed})"
        width = model.config.get("word_embed_proj_dim") or model.hidden_size
        if width != model.hidden_size:
            yield f"word_embed_proj_dim = {width} for opt (only hidden_size)"
    for kind in model.kinds:
        attention = kind.attention
        if not attention.causal and model.config.get("use_bidirectional_attention"):
            yield "use_bidirectional_attention = true (only false)"
        if (
            attention.capped
            and model.attention_dropout
            and file.workload.attention_kernel != "eager"
        ):
            yield (
                f"attention_dropout = {model.attention_dropout:g} with capped scores "
                "(attn_logit_softcapping) needs attention_kernel eager"
            )
    if model.config.get("reorder_and_upcast_attn"):
        yield "reorder_and_upcast_attn = true (only false)"


def _problems_of_t5(file: PlanFile) -> Iterator[str]:
    workload = file.workload
    if workload.precision == "fp16":
        yield "precision fp16: t5 overflows in it (bf16, fp32, fp64)"
    for key in ("pad_token_id", "decoder_start_token_id"):
        if file.model.config.get(key):
            yield f"{key} = {file.model.config[key]} for t5 (only 0)"
