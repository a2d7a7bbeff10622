"""Models as fields of Megatron Core, and the config.json that such fields describe.

Left out: layers that Megatron Core's GPT model does not have (post-norms, parallel residuals,
cross-attention, linear attention, several kinds of attention).
"""

from __future__ import annotations

from typing import Any, Final

from cost_models.model.spec import ModelSpec
from hardware_profiles.errors import InputError
from planner.exchange.megatron_fields import Get
from planner.exchange.syntax.python_document import parse_python

# tokens that a tokenizer has, where its kind says so
VOCABULARIES: Final = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def unsupported_model(model: ModelSpec) -> str | None:
    """Return what Megatron Core's GPT model does not have; None: nothing."""
    kinds = model.kinds
    attention = kinds[0].attention
    reasons = {
        "cross-attention": model.is_encoder_decoder,
        "several kinds of attention": len({kind.attention for kind in kinds}) > 1,
        "attention to later tokens": not attention.causal,
        "linear attention": attention.delta_rule is not None,
        "chunked attention": attention.chunked,
        "capped scores": attention.capped,
        "gated attention": attention.gated,
        "a norm over all heads": attention.qk_norm == "all",
        "norms after the layers": any(kind.norms_after for kind in kinds),
        "parallel residuals": any(kind.parallel_residual for kind in kinds),
        "shared position biases": any(kind.stack and kind.shared_tables for kind in kinds),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def model_fields(model: ModelSpec) -> dict[str, Any]:
    """Return the fields that describe a model."""
    if (reason := unsupported_model(model)) is not None:
        raise InputError(f"{model.name}: Megatron Core's GPT model has no {reason}")
    kind = model.kinds[0]
    attention = kind.attention
    names = [weight.name for weight in kind.weights]
    dense = [k.feed_forward for k in model.kinds if not k.feed_forward.num_experts]
    sparse = [k.feed_forward for k in model.kinds if k.feed_forward.num_experts]
    ffn = (dense or sparse)[0]
    any_bias = any(n.endswith("bias") and "norm" not in n and "ln_" not in n for n in names)
    qkv_bias = any(n.endswith("bias") and _is_qkv(n) for n in names)
    mlp_bias = any(n.endswith("bias") and ("mlp" in n or "fc" in n) for n in names)
    config = model.config
    found: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": ffn.ffn_hidden_size,
        "num_attention_heads": attention.num_heads,
        "max_position_embeddings": config.get("max_position_embeddings") or model.max_seq_len,
        "position_embedding_type": "rope" if attention.rotary else "learned_absolute",
        "normalization": "RMSNorm" if kind.norm.startswith("rms") else "LayerNorm",
        "gated_linear_unit": ffn.gated,
        "activation": ffn.activation,
        "add_bias_linear": any_bias and (mlp_bias or not qkv_bias),
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": bool(attention.qk_norm),
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "vocab_size": model.vocab_size,
    }
    if attention.window is not None:
        found["window_size"] = [attention.window - 1, 0]
    if attention.rotary and attention.rotary_dim not in (0, attention.head_dim):
        found["rotary_percent"] = attention.rotary_dim / attention.head_dim
    if isinstance(theta := config.get("rope_theta"), (int, float)):
        found["rotary_base"] = int(theta)
    epsilon = config.get("rms_norm_eps", config.get("layer_norm_epsilon"))
    if isinstance(epsilon, float):
        found["layernorm_epsilon"] = epsilon
    if attention.kv_lora_rank:
        found |= {
            "multi_latent_attention": True,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.head_dim - attention.rope_head_dim,
            "qk_pos_emb_head_dim": attention.rope_head_dim,
            "v_head_dim": attention.value_head_dim,
            "q_lora_rank": attention.q_lora_rank or None,
        }
    else:
        found["kv_channels"] = attention.head_dim
        found["num_query_groups"] = attention.num_kv_heads
    return found | _experts_of(model)


def _is_qkv(name: str) -> bool:
    parts = ("q_proj", "k_proj", "v_proj", "c_attn", "query_key_value", "qkv")
    return any(part in name for part in parts)


def _experts_of(model: ModelSpec) -> dict[str, Any]:
    sparse = [kind.feed_forward for kind in model.kinds if kind.feed_forward.num_experts]
    if not sparse:
        return {}
    has_experts = [bool(model.kinds[kind].feed_forward.num_experts) for kind in model.pattern]
    first = sparse[0]
    return {
        "num_moe_experts": first.num_experts,
        "moe_router_topk": first.experts_per_token,
        "moe_ffn_hidden_size": first.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": first.shared_ffn_hidden_size or None,
        "moe_layer_freq": None if all(has_experts) else [int(has) for has in has_experts],
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def config_of_fields(get: Get) -> tuple[dict[str, Any] | None, str]:
    """Return the config.json of the model that fields describe, and a remark.

    None where they are not enough, or where no family of models has such layers; without
    vocab_size where the fields leave that to the tokenizer.
    """
    vocabulary = get("vocab_size") or get("padded_vocab_size")
    vocabulary = vocabulary or VOCABULARIES.get(str(get("tokenizer_type")))
    if isinstance(vocabulary, int):
        return _config_of_fields(get, vocabulary)
    config, remark = _config_of_fields(get, 1)
    if config is None:
        return None, remark
    del config["vocab_size"]
    return config, "the model's vocab_size is not in the file: name the model"


def _config_of_fields(get: Get, vocabulary: int) -> tuple[dict[str, Any] | None, str]:
    layers, hidden, heads = (get(n) for n in ("num_layers", "hidden_size", "num_attention_heads"))
    if not all(isinstance(value, int) and value > 0 for value in (layers, hidden, heads)):
        return None, ""
    gated = bool(get("gated_linear_unit"))
    ffn = get("ffn_hidden_size") or (int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden)
    shape = {
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": get("max_position_embeddings") or get("seq_length") or 2048,
        "tie_word_embeddings": not get("untie_embeddings_and_output_weights"),
    }
    rotary = get("position_embedding_type") in ("rope", "yarn")
    if not gated and not rotary:
        return _gpt2(shape), ""
    if not gated or not rotary:
        lacking = "rotary position embeddings" if gated else "a gated MLP"
        return None, f"no family of models has such layers without {lacking}: name the model"
    groups = get("num_query_groups")
    if get("group_query_attention") is False:
        groups = None
    shape["num_key_value_heads"] = groups or heads
    if isinstance(width := get("kv_channels"), int) and not get("multi_latent_attention"):
        shape["head_dim"] = width
    remark = ""
    if str(get("normalization") or "LayerNorm").lower() != "rmsnorm":
        remark = "layer norms are priced as RMS norms"
    family = _family(get, shape)
    if family is None:
        return None, "no family of models has these layers: name the model"
    return shape | family, remark


def _gpt2(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": shape["vocab_size"],
        "n_layer": shape["num_hidden_layers"],
        "n_embd": shape["hidden_size"],
        "n_head": shape["num_attention_heads"],
        "n_inner": shape["intermediate_size"],
        "n_positions": shape["max_position_embeddings"],
        "tie_word_embeddings": shape["tie_word_embeddings"],
    }


def _family(get: Get, shape: dict[str, Any]) -> dict[str, Any] | None:
    """Return the keys of the family with a gated MLP and rotary positions."""
    bias = get("add_bias_linear") is not False
    qkv_bias = bool(get("add_qkv_bias"))
    if not get("num_moe_experts"):
        if get("multi_latent_attention"):
            return None
        if get("qk_layernorm"):
            return {"model_type": "qwen3"}
        if qkv_bias and not bias:
            return {"model_type": "qwen2"}
        return {"model_type": "llama", "attention_bias": bias, "mlp_bias": bias}
    experts, width = (
        get("num_moe_experts"),
        get("moe_ffn_hidden_size") or shape["intermediate_size"],
    )
    per_token = get("moe_router_topk") or 2
    shared = get("moe_shared_expert_intermediate_size") or 0
    dense = _leading_dense(get("moe_layer_freq"), shape["num_hidden_layers"])
    if dense is None:
        return None
    if get("multi_latent_attention"):
        return {
            "model_type": "deepseek_v3",
            "moe_intermediate_size": width,
            "n_routed_experts": experts,
            "num_experts_per_tok": per_token,
            "n_shared_experts": max(shared // width, 1),
            "first_k_dense_replace": dense,
            "q_lora_rank": get("q_lora_rank"),
            "kv_lora_rank": get("kv_lora_rank") or 512,
            "qk_nope_head_dim": get("qk_head_dim") or 128,
            "qk_rope_head_dim": get("qk_pos_emb_head_dim") or 64,
            "v_head_dim": get("v_head_dim") or 128,
        }
    moe = {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "mlp_only_layers": list(range(dense)),
    }
    if get("qk_layernorm") and not shared:
        return {"model_type": "qwen3_moe", **moe}
    if shared and qkv_bias:
        return {"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared, **moe}
    if shared or dense:
        return None
    return {
        "model_type": "mixtral",
        "intermediate_size": width,
        "num_local_experts": experts,
        "num_experts_per_tok": per_token,
        "sliding_window": None,
    }


def _leading_dense(frequency: Any, num_layers: int) -> int | None:
    """Return the dense layers in front of those with experts; None: another pattern."""
    if frequency in (None, 1):
        return 0
    if isinstance(frequency, str):
        frequency = pattern_of_text(frequency)
    if not isinstance(frequency, list) or len(frequency) != num_layers:
        return None
    dense = frequency.index(1) if 1 in frequency else num_layers
    return dense if all(frequency[dense:]) and not any(frequency[:dense]) else None


def pattern_of_text(text: str) -> list[int] | None:
    """Return the layers of a pattern: products and sums of lists.

    >>> pattern_of_text("([0]*1+[1]*3)*2")
    [0, 1, 1, 1, 0, 1, 1, 1]
    """
    import ast

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return min(node.value, 10_000)
        if isinstance(node, ast.List):
            return [value(each) for each in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add)):
            left, right = value(node.left), value(node.right)
            found = left * right if isinstance(node.op, ast.Mult) else left + right
            return found[:10_000] if isinstance(found, list) else found
        raise ValueError("not a pattern")

    try:
        found = value(parse_python(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, list) else None
