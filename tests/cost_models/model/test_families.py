"""Specs against the modules of transformers: every tensor's name and shape, and the other sizes."""

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from cost_models.model.families import FAMILIES, builder_of, model_spec
from cost_models.model.families.reader import ACTIVATIONS
from cost_models.model.parameters import active_parameters, parameters_by_part
from cost_models.model.spec import LayerKind, ModelSpec
from hardware_profiles.errors import InputError
from tests.cost_models.model.real_modules import assert_same_tensors, real_layers
from tests.samples import examples

LLAMA_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# without token ids, whose defaults lie outside a tiny vocabulary
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LLAMA = LLAMA_SIZES | NO_TOKENS
GPT2 = {"vocab_size": 96, "n_positions": 40, "n_embd": 32, "n_layer": 3, "n_head": 4} | NO_TOKENS
NEOX = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
OPT = {k: v for k, v in NEOX.items() if k != "intermediate_size"} | {
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 40,
}
BLOOM = {"vocab_size": 96, "hidden_size": 32, "n_layer": 3, "n_head": 4} | NO_TOKENS
FALCON = {k: v for k, v in NEOX.items() if k != "intermediate_size"}
QWEN2_MOE = LLAMA | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = LLAMA | {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
QWEN3_NEXT = QWEN2_MOE | {
    "head_dim": 24,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "full_attention_interval": 2,
}
_EXPERTS = set(QWEN2_MOE) - set(LLAMA)
QWEN3_5 = {k: v for k, v in QWEN3_NEXT.items() if k not in _EXPERTS}
QWEN3_5_MOE = {k: v for k, v in QWEN3_NEXT.items() if k != "intermediate_size"}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
GLM4_MOE = LLAMA | {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
LLAMA4 = LLAMA | {
    "head_dim": 12,
    "intermediate_size_mlp": 56,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
BERT = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {
    "pad_token_id": 1,
    "max_position_embeddings": 40,
}
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 7,
}
SLIDING = ["sliding_attention", "full_attention", "full_attention"]

# family: a tiny config, and changes of it that switch optional features
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        LLAMA,
        [
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            {"head_dim": 10},
            {"num_key_value_heads": None},
            {"num_key_value_heads": 1},
        ],
    ),
    "mistral": (LLAMA, [{"sliding_window": None, "head_dim": 10}, {"tie_word_embeddings": True}]),
    "qwen2": (
        LLAMA,
        [
            {"tie_word_embeddings": True},
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDING},
        ],
    ),
    "qwen3": (LLAMA | {"head_dim": 10}, [{"attention_bias": True, "tie_word_embeddings": True}]),
    "olmoe": (
        LLAMA | {"num_experts": 4, "num_experts_per_tok": 2},
        [{"attention_bias": True}, {"num_key_value_heads": None, "tie_word_embeddings": True}],
    ),
    "olmo2": (LLAMA, [{"attention_bias": True}, {"tie_word_embeddings": True}]),
    "gemma": (LLAMA | {"head_dim": 10}, [{"attention_bias": True, "tie_word_embeddings": False}]),
    "gemma2": (LLAMA | {"head_dim": 10}, [{"attention_bias": True, "layer_types": SLIDING}]),
    "gemma3_text": (
        LLAMA | {"head_dim": 10, "sliding_window_pattern": 2},
        [{"layer_types": SLIDING}, {"tie_word_embeddings": False}],
    ),
    "phi": (
        NEOX,
        [
            {"num_key_value_heads": 2, "qk_layernorm": True},
            {"head_dim": 12, "partial_rotary_factor": 0.35},
            {"tie_word_embeddings": True},
        ],
    ),
    "phi3": (LLAMA, [{"sliding_window": 8, "tie_word_embeddings": True}]),
    "nemotron": (
        LLAMA | {"hidden_act": "relu2"},
        [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True, "head_dim": 12}],
    ),
    "starcoder2": (LLAMA, [{"use_bias": False}, {"tie_word_embeddings": False, "head_dim": 10}]),
    "granite": (LLAMA, [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 10}]),
    "glm4_moe": (
        GLM4_MOE,
        [{"use_qk_norm": True, "attention_bias": True}, {"first_k_dense_replace": 2}],
    ),
    "llama4_text": (
        LLAMA4,
        [
            {"interleave_moe_layer_step": 2, "use_qk_norm": False},
            {"moe_layers": [0], "attention_bias": True, "tie_word_embeddings": True},
            {"no_rope_layers": [1, 0, 1], "attention_chunk_size": 8},
        ],
    ),
    "glm4": (LLAMA | {"head_dim": 12}, [{"attention_bias": False, "tie_word_embeddings": True}]),
    "smollm3": (
        LLAMA,
        [
            {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [1, 0, 1]},
            {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2},
            {"tie_word_embeddings": False, "head_dim": 10},
        ],
    ),
    "cohere": (
        LLAMA,
        [{"use_qk_norm": True, "attention_bias": True}, {"tie_word_embeddings": False}],
    ),
    "gpt2": (GPT2, [{"n_inner": 50}, {"tie_word_embeddings": False}]),
    "gpt_neox": (NEOX, [{"attention_bias": False, "tie_word_embeddings": True}]),
    "opt": (
        OPT,
        [
            {"enable_bias": False},
            {"layer_norm_elementwise_affine": False},
            {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
            {"tie_word_embeddings": False, "word_embed_proj_dim": 16},
        ],
    ),
    "bloom": (BLOOM, [{"tie_word_embeddings": False}]),
    "falcon": (
        FALCON,
        [
            {"bias": True, "multi_query": False},
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
            {"parallel_attn": False, "alibi": True, "tie_word_embeddings": False},
            {"ffn_hidden_size": 50},
        ],
    ),
    "mixtral": (
        LLAMA | {"num_local_experts": 6},
        [{"head_dim": 10, "sliding_window": 8, "tie_word_embeddings": True}],
    ),
    "gpt_oss": (
        LLAMA | {"head_dim": 10, "num_local_experts": 6, "num_experts_per_tok": 2},
        [{"attention_bias": False}, {"layer_types": SLIDING, "tie_word_embeddings": True}],
    ),
    "qwen2_moe": (
        QWEN2_MOE,
        [
            {"decoder_sparse_step": 2, "qkv_bias": False},
            {"mlp_only_layers": [0, 2], "tie_word_embeddings": True},
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        ],
    ),
    "qwen3_moe": (
        QWEN3_MOE,
        [
            {"head_dim": 10, "attention_bias": True},
            {"mlp_only_layers": [1], "decoder_sparse_step": 1},
        ],
    ),
    "qwen3_next": (
        QWEN3_NEXT,
        [
            {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
            {"full_attention_interval": 1, "attention_bias": True, "mlp_only_layers": [1]},
            {"linear_num_key_heads": 6, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True},
        ],
    ),
    "qwen3_5_text": (
        QWEN3_5,
        [
            {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
            {"linear_num_key_heads": 6, "tie_word_embeddings": True, "attention_bias": True},
        ],
    ),
    "qwen3_5_moe_text": (
        QWEN3_5_MOE,
        [{"num_experts": 4, "linear_conv_kernel_dim": 3}, {"tie_word_embeddings": True}],
    ),
    "deepseek_v2": (
        DEEPSEEK,
        [{"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}],
    ),
    "deepseek_v3": (
        DEEPSEEK,
        [{"q_lora_rank": None}, {"attention_bias": True, "tie_word_embeddings": True}],
    ),
    "bert": (BERT, [{"tie_word_embeddings": False}, {"type_vocab_size": 1}]),
    "roberta": (BERT, [{"tie_word_embeddings": False}]),
    "t5": (
        T5,
        [
            {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
            {"num_decoder_layers": 2},
        ],
    ),
}
ALL_CASES = [
    pytest.param(
        {"model_type": family} | base | change, id=f"{family}-{'-'.join(change) or 'plain'}"
    )
    for family, (base, changes) in CASES.items()
    for change in ({}, *changes)
]


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return model_spec(config, name="test")


WITH_VISION = {  # and their text models
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family} | CASES[family][0] | changes


def test_activations_are_those_of_transformers_without_parameters() -> None:
    """Newer transformers may know more; none of ours may be unknown to it, or have weights."""
    from transformers.activations import ACT2FN

    for name in ACTIVATIONS:
        assert not list(ACT2FN[name].parameters()), name
    assert set(ACT2FN) - set(ACTIVATIONS) <= {"prelu", "xielu", "sqrtsoftplus"}


def test_every_family_is_tested() -> None:
    assert set(CASES) | set(WITH_VISION) == set(FAMILIES)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("config", ALL_CASES)
def test_tensors_are_those_of_the_real_module(config: dict[str, Any]) -> None:
    spec = spec_of(config)
    module = assert_same_tensors(config, spec)
    output = module.get_output_embeddings()
    assert spec.head_multiply == output.weight.numel()
    assert spec.tie_embeddings == (output.weight is module.get_input_embeddings().weight)
    for index, layer in zip(spec.pattern, real_layers(module, spec), strict=True):
        kind = spec.kinds[index]
        assert kind.num_norms == count_norms(layer, spec.hidden_size)
        assert kind.attention.window == window_of(layer)
        assert all(weight.part != "other" for weight in kind.weights)


def count_norms(layer: Any, hidden_size: int) -> int:
    """Norms of the hidden size; those inside the attention are of heads or latents."""
    inside = ("q_norm", "k_norm", "qk_norm", "q_a_layernorm", "kv_a_layernorm", "linear_attn.norm")
    return sum(
        "Norm" in type(module).__name__
        and not name.endswith(inside)
        and (getattr(module, "weight", None) is None or module.weight.shape == (hidden_size,))
        for name, module in layer.named_modules()
    )


def window_of(layer: Any) -> int | None:
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        return None
    config = getattr(attention, "config", None)
    default = getattr(config, "sliding_window", None)
    alternating = getattr(config, "layer_types", None) is not None
    if alternating and config.layer_types[attention.layer_idx] == "chunked_attention":
        return int(config.attention_chunk_size)
    return getattr(attention, "sliding_window", None if alternating else default)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WITH_VISION])
def test_defaults_are_those_of_the_config_class(family: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(CONFIG_MAPPING[family])}
    for key, ours in builder_of(family)[1].values.items():
        theirs = fields[key].default
        assert ours == (() if theirs is None and key == "mlp_only_layers" else theirs), key


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WITH_VISION])
def test_a_config_without_sizes_is_the_default_model(family: str) -> None:
    config: dict[str, Any] = {"model_type": family}
    if family == "deepseek_v2":  # the class has no usable default
        config["num_experts_per_tok"] = 6
    if family == "nemotron":  # the module does not take its class's default, None
        config["num_key_value_heads"] = 48
    if family == "glm4_moe":  # its 96 heads do not divide its hidden size
        config["head_dim"] = 128
    spec = spec_of(config)
    assert_same_tensors(config, spec)
    assert "taken from the defaults" in spec.assumptions[0]


@pytest.mark.parametrize(("family", "text_family"), WITH_VISION.items())
def test_a_model_with_vision_is_its_text_model(family: str, text_family: str) -> None:
    text = {k: v for k, v in tiny(text_family).items() if k != "model_type"}
    spec = spec_of({"model_type": family, "text_config": text, "vision_config": {}})
    assert any("vision_config is left out" in line for line in spec.assumptions)
    assert spec.family == text_family
    assert_same_tensors(tiny(text_family), spec)
    again = spec_of(dict(spec.config))  # what plan.json keeps
    assert again.num_parameters == spec.num_parameters


@pytest.mark.parametrize(("given", "family"), [("kimi_k2", "deepseek_v3"), ("mt5", "t5")])
def test_a_family_with_the_layers_of_another_is_read_as_it(given: str, family: str) -> None:
    config = tiny(family)
    spec = spec_of({**config, "model_type": given})
    assert spec.family == family
    assert spec.config["model_type"] == family
    assert spec.assumptions[0] == f"model_type {given} is read as {family}: the same layers"
    assert_same_tensors(config, spec)


# --- sizes beside the tensors -----------------------------------------------------------------


def only_kind(config: dict[str, Any]) -> LayerKind:
    (kind,) = spec_of(config).kinds
    return kind


def test_windows_by_layer() -> None:
    alternating = spec_of(tiny("gemma2", sliding_window=8))
    assert [alternating.kinds[i].attention.window for i in alternating.pattern] == [8, None, 8]
    late = spec_of(tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2))
    assert [late.kinds[i].attention.window for i in late.pattern] == [None, None, 8]
    every_third = spec_of(tiny("gemma3_text", sliding_window=8, sliding_window_pattern=3))
    assert [every_third.kinds[i].name for i in every_third.pattern] == [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]


def test_latent_attention_sizes() -> None:
    attention = spec_of(tiny("deepseek_v3")).kinds[0].attention
    assert (attention.head_dim, attention.value_head_dim, attention.rope_head_dim) == (16, 14, 6)
    assert (attention.q_lora_rank, attention.kv_lora_rank) == (12, 20)


def test_linear_and_full_attention_of_qwen3_next() -> None:
    spec = spec_of(tiny("qwen3_next"))
    assert [spec.kinds[i].name for i in spec.pattern] == ["moe_linear", "moe_full", "moe_linear"]
    linear, full = (kind.attention for kind in spec.kinds)
    assert linear.delta_rule is not None
    assert (linear.num_heads, linear.num_kv_heads, linear.conv_channels) == (6, 3, 144)
    assert not linear.rotary
    assert full.gated
    assert full.rotary_dim == 6  # a quarter of a head
    assert spec.has_linear_attention
    assert not spec_of(tiny("qwen3_moe")).has_linear_attention


def test_experts() -> None:
    spec = spec_of(tiny("deepseek_v3"))
    assert [spec.kinds[i].name for i in spec.pattern] == ["dense", "moe", "moe"]
    experts = spec.kinds[1].feed_forward
    assert (experts.num_experts, experts.experts_per_token) == (6, 2)
    assert (experts.ffn_hidden_size, experts.shared_ffn_hidden_size) == (24, 48)
    assert spec.kinds[0].feed_forward.ffn_hidden_size == 48


def test_falcon_key_value_heads() -> None:
    assert only_kind(tiny("falcon")).attention.num_kv_heads == 1
    assert only_kind(tiny("falcon", multi_query=False)).attention.num_kv_heads == 4
    grouped = tiny("falcon", new_decoder_architecture=True, num_kv_heads=2)
    assert only_kind(grouped).attention.num_kv_heads == 2
    assert only_kind(grouped).parallel_residual


def test_encoders_and_decoders() -> None:
    assert not only_kind(tiny("bert")).attention.causal
    names = [
        (k.name, k.attention.causal, bool(k.cross_attention)) for k in spec_of(tiny("t5")).kinds
    ]
    assert names == [
        ("encoder_first", False, False),
        ("encoder", False, False),
        ("decoder_first", True, True),
        ("decoder", True, True),
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny("gpt2"), (40, True)),
        (tiny("opt"), (40, True)),
        (tiny("roberta"), (38, True)),  # two rows before the first token's
        (tiny("llama"), (2048, False)),
        (tiny("bloom"), (None, False)),
        (tiny("t5"), (None, False)),
    ],
)
def test_longest_sequence(config: dict[str, Any], expected: tuple[int | None, bool]) -> None:
    spec = spec_of(config)
    assert (spec.max_seq_len, spec.max_seq_len_is_hard) == expected


def test_dropouts() -> None:
    spec = spec_of(tiny("gpt2", resid_pdrop=0.2, attn_pdrop=0.3, embd_pdrop=0.4))
    assert (spec.hidden_dropout, spec.attention_dropout, spec.embedding_dropout) == (0.2, 0.3, 0.4)
    assert spec_of(tiny("llama", attention_dropout=None)).attention_dropout == 0.0


@pytest.mark.parametrize("config", ALL_CASES)
def test_cuts(config: dict[str, Any]) -> None:
    """What is cut among tensor-parallel ranks comes in pairs, column then row; norms are whole."""
    for kind in spec_of(config).kinds:
        linears = [w for w in kind.weights if w.is_matrix]
        assert {"column", "row"} <= {w.sharding for w in linears}
        for weight in kind.weights:
            if weight.part in ("norm", "router"):
                over_heads = re.search(r"\.[qk]_norm\.", weight.name) is not None
                assert weight.sharding == "replicate" or (weight.sharding == "heads" and over_heads)
            if weight.name.endswith("bias"):
                assert weight.sharding in ("column", "replicate")


# --- what cannot be --------------------------------------------------------------------------


BAD = [
    (tiny("llama", hidden_size=0), "hidden_size = 0", "from 1 to 1,000,000"),
    (tiny("llama", hidden_size=-4096), "hidden_size = -4096", "from 1"),
    (tiny("llama", hidden_size="4096"), 'hidden_size = "4096"', "whole number"),
    (tiny("llama", hidden_size=32.5), "hidden_size = 32.5", "whole number"),
    (tiny("llama", hidden_size=float("nan")), "hidden_size = NaN", "whole number"),
    (tiny("llama", hidden_size=True), "hidden_size = true", "whole number"),
    (tiny("llama", hidden_size=None), "hidden_size = null", "whole number"),
    (tiny("llama", hidden_size=10**9), "hidden_size = 1000000000", "1,000,000"),
    (tiny("llama", num_hidden_layers=10**5), "num_hidden_layers", "10,000"),
    (tiny("llama", vocab_size=10**8), "vocab_size", "10,000,000"),
    (
        tiny("llama", num_attention_heads=5, num_key_value_heads=5),
        "num_attention_heads = 5",
        "divisor of hidden_size",
    ),
    (tiny("llama", num_key_value_heads=3), "num_key_value_heads = 3", "divisor"),
    (tiny("llama", num_key_value_heads=8), "num_key_value_heads = 8", "divisor"),
    (tiny("llama", head_dim=7), "head_dim = 7", "even"),
    (tiny("llama", tie_word_embeddings="yes"), 'tie_word_embeddings = "yes"', "true or false"),
    (tiny("llama", attention_dropout=2), "attention_dropout = 2", "from 0 to 1"),
    (tiny("llama", hidden_act=3), "hidden_act = 3", "string"),
    (tiny("llama", hidden_act="sillu"), 'hidden_act = "sillu"', "Did you mean silu?"),
    (tiny("gpt2", activation_function="x"), 'activation_function = "x"', "one of gelu, gelu_10,"),
    (tiny("gemma2", hidden_activation="x"), 'hidden_activation = "x"', "gelu_pytorch_tanh"),
    (tiny("mixtral", hidden_act="prelu"), 'hidden_act = "prelu"', "one of gelu"),
    (tiny("deepseek_v3", hidden_act="x"), 'hidden_act = "x"', "one of gelu"),
    (tiny("falcon", activation="x"), 'activation = "x"', "one of gelu"),
    (tiny("t5", feed_forward_proj="gated-x"), 'feed_forward_proj = "gated-x"', "of gelu, gelu_10,"),
    (tiny("qwen2", layer_types=["full_attention"]), "layer_types", "one a layer"),
    (tiny("qwen2", layer_types=[["x"]] * 3), "layer_types", "one a layer"),
    (tiny("phi3", partial_rotary_factor=0.4), "head_dim = 8", "even"),
    (tiny("phi3", rope_parameters={"partial_rotary_factor": 7}), "partial_rotary_factor", "to 1"),
    (tiny("gpt2", add_cross_attention=True), "add_cross_attention = true", "false"),
    (tiny("bert", is_decoder=True), "is_decoder = true", "false"),
    (tiny("roberta", max_position_embeddings=2), "max_position_embeddings = 2", "more than 2"),
    (tiny("mixtral", num_experts_per_tok=7), "num_experts_per_tok = 7", "at most"),
    (tiny("qwen2_moe", mlp_only_layers=["0"]), "mlp_only_layers", "list of whole numbers"),
    (tiny("qwen2_moe", decoder_sparse_step=0), "decoder_sparse_step = 0", "from 1"),
    (tiny("deepseek_v2", num_experts_per_tok=None), "num_experts_per_tok = null", "whole"),
    (tiny("deepseek_v3", moe_layer_freq=2), "moe_layer_freq = 2", "must be 1"),
    (tiny("deepseek_v3", qk_rope_head_dim=5), "qk_rope_head_dim = 5", "even"),
    (tiny("falcon", new_decoder_architecture=True, num_kv_heads=3), "num_kv_heads = 3", "divisor"),
    (tiny("qwen3_next", linear_num_key_heads=4), "linear_num_key_heads = 4", "divisor"),
    (tiny("qwen3_next", full_attention_interval=0), "full_attention_interval = 0", "from 1"),
    (tiny("qwen3_next", layer_types=["sliding_attention"] * 3), "layer_types", "linear_attention"),
    (tiny("qwen3_next", partial_rotary_factor=0.3), "head_dim = 24", "even"),
    (tiny("t5", feed_forward_proj="gated-"), 'feed_forward_proj = "gated-"', "activation"),
    ({"model_type": "gemma3"}, "text_config is missing", ""),
    ({"model_type": "lama"}, "model_type = 'lama'", "Did you mean llama or llama4?"),
    ({"model_type": 7}, "model_type = 7", "string"),
    ({"model_type": "x", "auto_map": {"AutoModel": "y"}}, "custom code is never run", "llama"),
    ({"architectures": ["Qwen2MoeForCausalLM"]}, "model_type is missing", '"qwen2_moe"'),
    ({"architectures": ["GPT2LMHeadModel"]}, "model_type is missing", '"gpt2"'),
    ({}, "model_type is missing", "one of bert"),
    ({"schema_version": 1, "model": {}, "plan": {}}, "model_type is missing", "it is a plan.json"),
]


@pytest.mark.parametrize(("config", "said", "allowed"), BAD)
def test_bad_values_are_refused_in_one_line(
    config: dict[str, Any], said: str, allowed: str
) -> None:
    with pytest.raises(InputError) as caught:
        model_spec(config, name="bad", where="some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    assert said in message
    assert allowed in message
    assert "\n" not in message


def test_custom_code_and_quantization_are_named_as_not_used() -> None:
    config = tiny("llama", auto_map={"AutoModel": "evil.Model"}, quantization_config={"bits": 4})
    spec = spec_of(config)
    assert any("custom code is not executed" in line for line in spec.assumptions)
    assert any("quantization" in line for line in spec.assumptions)


def test_second_names_of_keys() -> None:
    named = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 40} | named
    assert spec_of(config).num_parameters == spec_of(tiny("gpt2")).num_parameters


# --- properties --------------------------------------------------------------------------------

KEYS = sorted({key for family in FAMILIES for key in builder_of(family)[1].values})
JUNK_KEYS = ["layer_types", "rope_parameters", "text_config", "architectures", "auto_map", "foo"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 40)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["silu", "gated-gelu", "full_attention", *FAMILIES])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*KEYS, "partial_rotary_factor"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(400), deadline=None)
@given(
    family=st.sampled_from(FAMILIES) | JSON,
    junk=st.dictionaries(st.sampled_from([*KEYS, *JUNK_KEYS]), JSON, max_size=6),
)
def test_garbage_is_an_input_error(family: Any, junk: dict[str, Any]) -> None:
    try:
        spec = model_spec({"model_type": family, **junk}, name="garbage")
    except InputError:
        return
    assert spec.num_parameters > 0
    assert len(spec.pattern) == len(spec.layer_prefixes) == spec.num_layers


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(CASES)))
def test_garbage_in_one_key_of_a_good_config(data: st.DataObject, family: str) -> None:
    config = tiny(family)
    key = data.draw(st.sampled_from(sorted({*config, *builder_of(family)[1].values})))
    config[key] = data.draw(JSON)
    try:
        spec = spec_of(config)
    except InputError:
        return
    assert spec.num_parameters > 0
    assert math.isfinite(active_parameters(spec))


@settings(max_examples=examples(100), deadline=None)
@given(family=st.sampled_from(sorted(CASES)), layers=st.integers(1, 60))
def test_parameters_grow_with_layers_and_active_ones_are_fewer(family: str, layers: int) -> None:
    key = {"gpt2": "n_layer", "bloom": "n_layer", "t5": "num_layers"}.get(
        family, "num_hidden_layers"
    )
    spec = spec_of(tiny(family, **{key: layers}))
    larger = spec_of(tiny(family, **{key: layers + 1}))
    assert spec.num_parameters < larger.num_parameters
    assert 0 < active_parameters(spec) <= spec.num_parameters
    assert sum(parameters_by_part(spec).values()) == spec.num_parameters


@pytest.mark.parametrize("config", ALL_CASES)
def test_a_gated_mlp_has_one_matrix_more(config: dict[str, Any]) -> None:
    for kind in spec_of(config).kinds:
        mlp = [w for w in kind.weights if w.is_matrix]
        mlp = [w for w in mlp if w.part in ("mlp", "experts")]
        sizes = sum(w.numel for w in mlp) / (
            max(1, kind.feed_forward.num_experts) * kind.feed_forward.ffn_hidden_size
        )
        assert sizes == (3 if kind.feed_forward.gated else 2) * spec_of(config).hidden_size


@pytest.mark.parametrize(
    ("family", "key", "usual", "least"),
    [
        ("gemma3_text", "sliding_window_pattern", 6, 1),
        ("llama4_text", "no_rope_layer_interval", 4, 1),
        ("llama4_text", "interleave_moe_layer_step", 1, 1),
        ("qwen3_next", "full_attention_interval", 4, 1),
    ],
)
def test_a_pattern_of_layers_has_the_usual_interval_and_a_least_one(
    family: str, key: str, usual: int, least: int
) -> None:
    def layers(value: int | None) -> list[Any]:
        given = {} if value is None else {key: value}
        spec = model_spec({"model_type": family, **given}, name="pattern")
        return [spec.kinds[kind] for kind in spec.pattern]

    assert layers(None) == layers(usual) != layers(usual + 1)
    assert layers(least)
    with pytest.raises(InputError, match=key):
        layers(least - 1)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_assumed_not_to_be_trained(family: str) -> None:
    config = {"model_type": family} | ({"head_dim": 128} if family == "glm4_moe" else {})
    assumed = [
        model_spec(config | more, name="further").assumptions
        for more in ({}, {"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 1})
    ]
    assert assumed[0] == assumed[1]
    assert len(assumed[2]) == len(assumed[0]) + 1
