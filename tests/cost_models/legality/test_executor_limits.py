"""Models, workloads and plans that the bundled executor refuses: one reason each, and no other."""

from typing import Any

import pytest

from cost_models.legality.executor_limits import (
    unsupported_field,
    untrained,
    untrained_recompute,
)
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from tests.samples import CONFIGS, LLAMA

OLMOE = LLAMA | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 64,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 512,
}
GPT2, MIXTRAL, T5 = CONFIGS["gpt2"], CONFIGS["mixtral"], CONFIGS["t5"]
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 8, "attn_logit_softcapping": 30.0}
QWEN3_NEXT = LLAMA | {
    "model_type": "qwen3_next",
    "head_dim": 8,
    "num_experts": 0,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mlp_only_layers": list(range(8)),
}
TRAINED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {}),
    (LLAMA, {"precision": "fp16"}),
    (LLAMA, {"precision": "fp8"}),
    (LLAMA, {"master_weights": False}),
    (OLMOE | {"clip_qkv": None}, {}),
    (MIXTRAL | {"router_jitter_noise": 0.0, "output_router_logits": False}, {}),
    (BERT, {}),
    (T5, {}),
    (T5 | {"pad_token_id": 0, "decoder_start_token_id": 0}, {"precision": "fp32"}),
    (OPT, {"precision": "fp16"}),
    (GEMMA2, {}),
    (GEMMA2 | {"attention_dropout": 0.1}, {"attention_kernel": "eager"}),
    (LLAMA | {"attention_dropout": 0.1}, {}),
    (GPT2 | {"reorder_and_upcast_attn": False}, {}),
    (QWEN3_NEXT, {"attention_kernel": "eager"}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"optimizer": "muon"}, "optimizer = muon (only adamw, sgd, sgd_momentum, adam, lion)"),
    (LLAMA, {"precision": "tf32"}, "precision = tf32 (only bf16, fp16, fp32, fp64, fp8)"),
    (LLAMA, {"gradient_precision": "bf16"}, "gradient_precision = bf16 (only auto)"),
    (
        LLAMA,
        {"precision": "fp32", "master_weights": False},
        "master_weights = false with precision fp32 (only with bf16)",
    ),
    (MIXTRAL, {"precision": "fp8"}, "num_experts = 4 with precision fp8 (only 0)"),
    (
        LLAMA,
        {"precision": "fp8", "adapter": "lora", "adapter_rank": 4},
        "adapter = lora with precision fp8 (only none)",
    ),
    (
        QWEN3_NEXT,
        {"precision": "fp8", "attention_kernel": "eager"},
        "model_type qwen3_next with precision fp8 (no linear attention)",
    ),
    (T5, {"precision": "fp8"}, "model_type t5 with precision fp8 (no encoder-decoder)"),
    (OLMOE | {"clip_qkv": 8.0}, {}, "clip_qkv = 8.0 (only null)"),
    (MIXTRAL | {"router_jitter_noise": 0.1}, {}, "router_jitter_noise = 0.1 (only 0)"),
    (
        MIXTRAL | {"output_router_logits": True},
        {},
        "output_router_logits = true adds the routers' auxiliary loss, which needs the "
        "routing of the whole batch at once (only false, Hugging Face's default)",
    ),
    (BERT | {"tie_word_embeddings": False}, {}, "tie_word_embeddings = false for bert (only true)"),
    (
        T5,
        {"precision": "fp16"},
        "precision fp16: t5 overflows in it (bf16, fp32, fp64)",
    ),
    (T5 | {"pad_token_id": 3}, {}, "pad_token_id = 3 for t5 (only 0)"),
    (T5 | {"decoder_start_token_id": 3}, {}, "decoder_start_token_id = 3 for t5 (only 0)"),
    (OPT | {"layerdrop": 0.1}, {}, "layerdrop = 0.1 for opt (only 0.0)"),
    (
        OPT | {"_remove_final_layer_norm": True},
        {},
        "_remove_final_layer_norm = True for opt (only False)",
    ),
    (
        OPT | {"do_layer_norm_before": False},
        {},
        "do_layer_norm_before = False for opt (only True)",
    ),
    (
        OPT | {"word_embed_proj_dim": 32},
        {},
        "word_embed_proj_dim = 32 for opt (only hidden_size)",
    ),
    (
        QWEN3_NEXT,
        {"attention_kernel": "flash"},
        "attention_kernel = flash with linear attention (only eager: the rule is written out in "
        "torch)",
    ),
    (
        QWEN3_NEXT,
        {"attention_kernel": "eager", "document_mask": True},
        "packing documents with linear attention (only concat or none)",
    ),
    (
        GEMMA2 | {"attention_dropout": 0.1},
        {},
        "attention_dropout = 0.1 with capped scores (attn_logit_softcapping) needs "
        "attention_kernel eager",
    ),
    (GPT2 | {"reorder_and_upcast_attn": True}, {}, "reorder_and_upcast_attn = true (only false)"),
]


def reasons(config: dict[str, Any], workload: dict[str, Any]) -> set[str]:
    asked = Workload(seq_len=64, global_batch_size=8, **workload)
    return set(untrained(adapted(model_spec(config, name="tiny"), asked), asked))


@pytest.mark.parametrize(("config", "workload"), TRAINED)
def test_no_reason_is_given_for_what_is_trained(
    config: dict[str, Any], workload: dict[str, Any]
) -> None:
    assert reasons(config, workload) == set()


@pytest.mark.parametrize(("config", "workload", "reason"), REFUSED)
def test_the_reason_names_the_option_its_value_and_the_trained_ones(
    config: dict[str, Any], workload: dict[str, Any], reason: str
) -> None:
    assert reasons(config, workload) == {reason}


def test_settings_of_recomputation_that_other_options_exclude() -> None:
    eight, half = Workload(64, 8, precision="fp8"), Workload(64, 8)
    for setting in ("none", "selective", "full", "selective_ops"):
        assert untrained_recompute(eight, Plan(recompute=setting)) is None
    for setting in ("modules:mlp", "ops:every-2nd-mm"):
        assert untrained_recompute(half, Plan(recompute=setting)) is None
        assert untrained_recompute(eight, Plan(recompute=setting)) == (
            f"recompute = {setting} with precision fp8 (only none, selective, full, selective_ops)"
        )
    for module in ("mla_up_proj", "layernorm", "moe_act"):
        plan = Plan(recompute=f"modules:{module}", offload="activations")
        assert f"recompute = modules:{module} with offload activations: the results of " in str(
            untrained_recompute(half, plan)
        )
        assert untrained_recompute(half, Plan(recompute=f"modules:{module}")) is None
    kept = Plan(recompute="modules:mlp", offload="activations")
    assert untrained_recompute(half, kept) is None


def test_a_field_that_the_executor_does_not_read_has_its_default() -> None:
    assert unsupported_field(Plan(2, 2, 2, zero_stage=1, offload="optimizer")) is None
    said = "quantised_weights = true (only false; other values are priced only)"
    assert unsupported_field(Plan(2, zero_stage=3, quantised_weights=True)) == said
