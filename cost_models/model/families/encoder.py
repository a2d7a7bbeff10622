"""Encoders for masked-token prediction: BERT and RoBERTa."""

from __future__ import annotations

from cost_models.model.families.blocks import (
    TransformerSizes,
    Weights,
    assemble,
    embedding,
    linear,
    max_positions,
    norm,
    numbered,
    ordinary_attention,
    part,
    plain_mlp,
    positions,
    read_feed_forward,
    read_sizes,
)
from cost_models.model.families.reader import MAX_VOCAB, Config, Defaults
from cost_models.model.spec import LayerKind, ModelSpec, Weight

BERT = Defaults(
    {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
)
ROBERTA = Defaults({**BERT.values, "vocab_size": 50265, "pad_token_id": 1})


def bert(config: Config) -> ModelSpec:
    """BERT (Devlin et al., arXiv:1810.04805), with its masked-token head and without pooler."""
    head = _masked_token_head(
        config,
        transform="cls.predictions.transform.dense",
        transform_norm="cls.predictions.transform.LayerNorm",
        bias="cls.predictions.bias",
        decoder="cls.predictions.decoder",
    )
    return _encoder(config, "bert", head, max_positions(config))


def roberta(config: Config) -> ModelSpec:
    """RoBERTa (Liu et al., arXiv:1907.11692): positions start after the padding token's."""
    head = _masked_token_head(
        config,
        transform="lm_head.dense",
        transform_norm="lm_head.layer_norm",
        bias="lm_head.bias",
        decoder="lm_head.decoder",
    )
    padding = config.index("pad_token_id", MAX_VOCAB)
    usable = max_positions(config) - padding - 1
    if usable < 1:
        raise config.wrong(
            "max_position_embeddings", usable + padding + 1, f"more than {padding + 1:,}"
        )
    return _encoder(config, "roberta", head, usable)


def _encoder(config: Config, model: str, head: Weights, max_seq_len: int) -> ModelSpec:
    for key in ("is_decoder", "add_cross_attention"):
        if config.flag(key):
            raise config.wrong(key, True, "false: only encoders are supported")
    sizes = read_sizes(config, kv_heads=None, head_dim=None)
    hidden_size, table = sizes.hidden_size, f"{model}.embeddings"
    dropout = config.dropout("hidden_dropout_prob")
    return assemble(
        config,
        sizes,
        embedding=(
            *embedding(f"{table}.word_embeddings", sizes.vocab_size, hidden_size),
            *positions(f"{table}.position_embeddings", max_positions(config), hidden_size),
            *positions(
                f"{table}.token_type_embeddings",
                config.size("type_vocab_size", MAX_VOCAB),
                hidden_size,
            ),
            *norm(f"{table}.LayerNorm", hidden_size, bias=True),
        ),
        kinds=(_layer(config, sizes),),
        prefixes=numbered(f"{model}.encoder.layer", sizes.num_layers),
        head=head,
        max_seq_len=max_seq_len,
        max_seq_len_is_hard=True,
        hidden_dropout=dropout,
        attention_dropout="attention_probs_dropout_prob",
        embedding_dropout=dropout,
    )


def _layer(config: Config, sizes: TransformerSizes) -> LayerKind:
    hidden_size, feed_forward = sizes.hidden_size, read_feed_forward(config, gated=False)
    inner = feed_forward.ffn_hidden_size
    return LayerKind(
        name="layer",
        attention=ordinary_attention(sizes, rotary=False, causal=False, softmax_in_fp32=False),
        feed_forward=feed_forward,
        norm="layer",
        num_norms=2,
        norms_after=True,
        weights=(
            *part(
                "attention",
                *linear("attention.self.query", hidden_size, hidden_size, "column", bias=True),
                *linear("attention.self.key", hidden_size, hidden_size, "column", bias=True),
                *linear("attention.self.value", hidden_size, hidden_size, "column", bias=True),
                *linear("attention.output.dense", hidden_size, hidden_size, "row", bias=True),
            ),
            *norm("attention.output.LayerNorm", hidden_size, bias=True),
            *plain_mlp("intermediate.dense", "output.dense", hidden_size, inner, bias=True),
            *norm("output.LayerNorm", hidden_size, bias=True),
        ),
    )


def _masked_token_head(
    config: Config, *, transform: str, transform_norm: str, bias: str, decoder: str
) -> Weights:
    """Return a dense layer, a norm, the bias of the vocabulary, and an untied output projection."""
    sizes = read_sizes(config, kv_heads=None, head_dim=None)
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    untied: Weights = ()
    if not config.flag("tie_word_embeddings"):
        untied = linear(decoder, hidden_size, vocab_size, "vocab", bias=True)
    return part(
        "head",
        Weight(bias, (vocab_size,), "vector", "vocab"),
        *linear(transform, hidden_size, hidden_size, "replicate", bias=True),
        *norm(transform_norm, hidden_size, bias=True),
        *untied,
    )
