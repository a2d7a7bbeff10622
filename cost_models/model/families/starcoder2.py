"""StarCoder2: llama's attention with biases, layer norms and a plain MLP."""

from __future__ import annotations

from cost_models.model.families.blocks import check_rotary, ordinary_attention, read_sizes
from cost_models.model.families.llama_like import causal_lm, plain_layer
from cost_models.model.families.reader import MAX_POSITIONS, Config, decoder_defaults
from cost_models.model.spec import ModelSpec

STARCODER2 = decoder_defaults(
    (49152, 3072, 12288, 30, 24, 2, 4096),
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    sliding_window=None,
    residual_dropout=0.0,
    embedding_dropout=0.0,
    use_bias=True,
)


def starcoder2(config: Config) -> ModelSpec:
    """StarCoder2 (Lozhkov et al., arXiv:2402.19173)."""
    sizes = read_sizes(config)
    check_rotary(config, sizes.head_dim)
    attention = ordinary_attention(
        sizes, window=config.optional_size("sliding_window", MAX_POSITIONS)
    )
    biases = "use_bias", "use_bias"
    kind = plain_layer(config, attention, sizes.hidden_size, "mlp.c_fc", "mlp.c_proj", biases)
    return causal_lm(
        config,
        sizes,
        (kind,),
        norm_bias=True,
        hidden_dropout=config.dropout("residual_dropout"),
        embedding_dropout=config.dropout("embedding_dropout"),
    )
