"""StarCoder2: llama's attention with biases, layer norms and a plain MLP."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    check_rotary,
    ffn_size,
    norm,
    ordinary_attention,
    plain_mlp,
    read_sizes,
)
from cost_models.model.families.llama_like import attention_weights, causal_lm
from cost_models.model.families.reader import MAX_POSITIONS, Config, Defaults
from cost_models.model.spec import FeedForward, LayerKind, ModelSpec

STARCODER2 = Defaults(
    {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "use_bias": True,
        "tie_word_embeddings": True,
    }
)


def starcoder2(config: Config) -> ModelSpec:
    """StarCoder2 (Lozhkov et al., arXiv:2402.19173)."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    hidden_size, ffn_hidden_size = sizes.hidden_size, ffn_size(config)
    bias = config.flag("use_bias")
    attention = ordinary_attention(
        sizes, window=config.optional_size("sliding_window", MAX_POSITIONS)
    )
    kind = LayerKind(
        name="layer",
        attention=attention,
        feed_forward=FeedForward(
            ffn_hidden_size, gated=False, activation=config.activation("hidden_act")
        ),
        norm="layer",
        num_norms=2,
        weights=(
            *attention_weights(hidden_size, attention, bias=bias, output_bias=bias),
            *plain_mlp("mlp.c_fc", "mlp.c_proj", hidden_size, ffn_hidden_size, bias=bias),
            *norm("input_layernorm", hidden_size, bias=True),
            *norm("post_attention_layernorm", hidden_size, bias=True),
        ),
    )
    return causal_lm(
        config,
        sizes,
        (kind,),
        norm_bias=True,
        hidden_dropout=config.dropout("residual_dropout"),
        embedding_dropout=config.dropout("embedding_dropout"),
    )
