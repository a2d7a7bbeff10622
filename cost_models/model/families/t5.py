"""T5: encoder and decoder with cross attention, relative position biases, tied embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    assemble,
    embedding,
    ffn_size,
    linear,
    norm,
    numbered,
    ordinary_attention,
    part,
    read_sizes,
    stack,
)
from cost_models.model.families.reader import (
    ACTIVATIONS,
    MAX_LAYERS,
    MAX_POSITIONS,
    Config,
    Defaults,
)
from cost_models.model.spec import Attention, FeedForward, LayerKind, ModelSpec, Weight

T5 = Defaults(
    {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": None,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "dropout_rate": 0.1,
        "feed_forward_proj": "relu",
    },
    synonyms={
        "d_model": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "num_layers": ("num_hidden_layers",),
        "d_kv": ("head_dim",),
    },
)
ENCODER: Final = "encoder"
DECODER: Final = "decoder"
LENGTHS: Final = (
    "seq_len is the length of the encoder's sequences, and of the decoder's without a "
    "target_seq_len; shorter ones are padded to it"
)


def t5(config: Config) -> ModelSpec:
    """T5 1.0 and 1.1 (Raffel et al., arXiv:1910.10683), for conditional generation."""
    sizes = read_sizes(
        config,
        hidden="d_model",
        layers="num_layers",
        heads="num_heads",
        kv_heads=None,
        head_dim="d_kv",
    )
    num_decoder = config.optional_size("num_decoder_layers", MAX_LAYERS) or sizes.num_layers
    keys = [(ENCODER, i == 0) for i in range(sizes.num_layers)]
    keys += [(DECODER, i == 0) for i in range(num_decoder)]
    feed_forward = _feed_forward(config)
    buckets = config.size("relative_attention_num_buckets", MAX_POSITIONS)
    kinds, pattern = stack(
        keys, lambda key: _block(sizes, feed_forward, key[0], buckets if key[1] else 0)
    )
    dropout = config.dropout("dropout_rate")
    untied = not config.read("tie_word_embeddings", bool, True)
    assumptions = [LENGTHS]
    if untied:
        assumptions.append("transformers ties T5's embeddings regardless of the config")
    return assemble(
        config,
        sizes,
        embedding=embedding("shared", sizes.vocab_size, sizes.hidden_size),
        kinds=kinds,
        pattern=pattern,
        prefixes=[
            *numbered("encoder.block", sizes.num_layers),
            *numbered("decoder.block", num_decoder),
        ],
        bridge=norm("encoder.final_layer_norm", sizes.hidden_size),
        head=norm("decoder.final_layer_norm", sizes.hidden_size),
        tied=True,
        max_seq_len=None,
        hidden_dropout=dropout,
        attention_dropout="dropout_rate",
        embedding_dropout=dropout,
        assumptions=tuple(assumptions),
    )


def _feed_forward(config: Config) -> FeedForward:
    """Read ``relu`` or ``gated-gelu``; the latter means the tanh approximation."""
    written = config.text("feed_forward_proj")
    gate, dash, activation = written.rpartition("-")
    if activation not in ACTIVATIONS or gate not in ("", "gated") or (dash and not gate):
        known = f"an activation, or gated-(activation), of {', '.join(ACTIVATIONS)}"
        raise config.wrong("feed_forward_proj", written, known)
    name = "gelu_new" if written == "gated-gelu" else activation
    return FeedForward(
        ffn_size(config, "d_ff"), gated=bool(gate), activation=name, inner_dropout=True
    )


def _block(
    sizes: TransformerSizes, feed_forward: FeedForward, stack_name: str, buckets: int
) -> LayerKind:
    """Build one block; the first of each stack has the position biases (``buckets`` > 0)."""
    hidden_size, is_decoder = sizes.hidden_size, stack_name == DECODER
    mlp = 2 if is_decoder else 1
    cross = (
        (
            *_attention("layer.1.EncDecAttention", sizes, reads_source=True),
            *norm("layer.1.layer_norm", hidden_size),
        )
        if is_decoder
        else ()
    )
    return LayerKind(
        name=f"{stack_name}_first" if buckets else stack_name,
        attention=_attends(sizes, causal=is_decoder),
        feed_forward=feed_forward,
        norm="rms_mixed",
        num_norms=mlp + 1,
        weights=(
            *_attention("layer.0.SelfAttention", sizes, buckets),
            *norm("layer.0.layer_norm", hidden_size),
            *cross,
            *_mlp(f"layer.{mlp}.DenseReluDense", hidden_size, feed_forward),
            *norm(f"layer.{mlp}.layer_norm", hidden_size),
        ),
        cross_attention=_attends(sizes, causal=False) if is_decoder else None,
        stack=stack_name,
    )


def _attends(sizes: TransformerSizes, *, causal: bool) -> Attention:
    return ordinary_attention(sizes, rotary=False, causal=causal, softmax_in_fp32=False)


def _attention(
    name: str, sizes: TransformerSizes, buckets: int = 0, *, reads_source: bool = False
) -> Weights:
    inner = sizes.query_size
    keys = (
        *linear(f"{name}.k", sizes.hidden_size, inner, "column"),
        *linear(f"{name}.v", sizes.hidden_size, inner, "column"),
    )
    bias = Weight(
        f"{name}.relative_attention_bias.weight", (buckets, sizes.num_heads), "lookup", "column"
    )
    return part(
        "attention",
        *linear(f"{name}.q", sizes.hidden_size, inner, "column"),
        *(replace(weight, reads_source=reads_source) for weight in keys),
        *linear(f"{name}.o", inner, sizes.hidden_size, "row"),
        *((bias,) if buckets else ()),
    )


def _mlp(name: str, hidden_size: int, feed_forward: FeedForward) -> Weights:
    inner = feed_forward.ffn_hidden_size
    ups = ("wi_0", "wi_1") if feed_forward.gated else ("wi",)
    return part(
        "mlp",
        *(w for up in ups for w in linear(f"{name}.{up}", hidden_size, inner, "column")),
        *linear(f"{name}.wo", inner, hidden_size, "row"),
    )
