"""Building blocks of the families: linears, norms, stacks of layers, complete models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from msgspec import Struct

from cost_models.model.families.reader import (
    MAX_FFN,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    Config,
    Defaults,
)
from cost_models.model.spec import (
    Attention,
    FeedForward,
    LayerKind,
    ModelSpec,
    Part,
    Sharding,
    Weight,
)

Key = TypeVar("Key", bound=Hashable)
Weights = tuple[Weight, ...]


class TransformerSizes(Struct, frozen=True):
    """Sizes common to all transformers."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


def read_sizes(
    config: Config,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    kv_heads: str | None = "num_key_value_heads",
    head_dim: str | None = "head_dim",
) -> TransformerSizes:
    """Read the sizes; head_dim and the number of key-value heads default as in transformers."""
    hidden_size = config.size(hidden)
    num_heads = config.size(heads, MAX_HEADS)
    num_kv_heads = config.optional_size(kv_heads, MAX_HEADS) if kv_heads else None
    if kv_heads and num_kv_heads is not None:
        config.must_divide(kv_heads, num_kv_heads, heads, num_heads)
    width = config.optional_size(head_dim) if head_dim else None
    if width is None:
        config.must_divide(heads, num_heads, hidden, hidden_size)
        width = hidden_size // num_heads
    return TransformerSizes(
        hidden_size=hidden_size,
        vocab_size=config.size("vocab_size", MAX_VOCAB),
        num_layers=config.size(layers, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=width,
    )


def rotary_dim(
    config: Config, head_dim: int, default: float, key: str = "partial_rotary_factor"
) -> int:
    """Return the rotated elements of each head, from any of the places a config may give it."""
    rope, fraction = config.values.get("rope_parameters"), default
    if isinstance(rope, Mapping) and rope.get("partial_rotary_factor") is not None:
        rope_config = Config(rope, f"{config.where}: rope_parameters", config.family, Defaults({}))
        fraction = rope_config.fraction("partial_rotary_factor")
    elif config.has(key):
        fraction = config.fraction(key)
    return check_rotary(config, head_dim, int(head_dim * fraction))


def check_rotary(config: Config, head_dim: int, rotated: int | None = None) -> int:
    """Return the rotated elements of a head, all by default; they are even (rotated in pairs)."""
    rotated = head_dim if rotated is None else rotated
    if rotated % 2:
        raise config.wrong(
            "head_dim", head_dim, f"such that the {rotated} rotated elements of a head are even"
        )
    return rotated


def max_positions(config: Config, key: str = "max_position_embeddings") -> int:
    """Return the maximum sequence length of the config."""
    return config.size(key, MAX_POSITIONS)


def ffn_size(config: Config, key: str = "intermediate_size") -> int:
    """Return the width of the MLP."""
    return config.size(key, MAX_FFN)


def read_feed_forward(
    config: Config, *, gated: bool, width: str = "intermediate_size", activation: str = "hidden_act"
) -> FeedForward:
    """Read an MLP without experts; ``width``, ``activation``: their keys."""
    return FeedForward(
        ffn_size(config, width), gated=gated, activation=config.activation(activation)
    )


def ordinary_attention(sizes: TransformerSizes, **others: Any) -> Attention:
    """Multi-head, grouped-query or multi-query attention; ``others``: its other fields."""
    width = sizes.head_dim
    return Attention(sizes.num_heads, sizes.num_kv_heads, width, width, **others)


def linear(
    name: str,
    in_features: int,
    out_features: int,
    sharding: Sharding,
    *,
    bias: bool = False,
    transposed: bool = False,
    parts: tuple[int, ...] = (),
) -> Weights:
    """Return a linear layer: weight (out, in), GPT-2's Conv1D ``transposed`` (in, out), and bias.

    A bias is sharded with the outputs (column, vocabulary) and replicated if the inputs are sharded
    (row). ``parts``: output sizes of the matrices fused in one.
    """
    shape = (in_features, out_features) if transposed else (out_features, in_features)
    matrix = Weight(f"{name}.weight", shape, "linear", sharding, transposed=transposed, parts=parts)
    if not bias:
        return (matrix,)
    bias_sharding: Sharding = sharding if sharding in ("column", "vocab") else "replicate"
    return (matrix, Weight(f"{name}.bias", (out_features,), "vector", bias_sharding, parts=parts))


def norm(
    name: str,
    *shape: int,
    bias: bool = False,
    sharding: Literal["replicate", "heads"] = "replicate",
) -> Weights:
    """Return an RMS norm, or a layer norm with ``bias``."""
    weights: Weights = (Weight(f"{name}.weight", shape, "vector", sharding, "norm"),)
    if bias:
        weights += (Weight(f"{name}.bias", shape, "vector", sharding, "norm"),)
    return weights


def embedding(name: str, vocab_size: int, width: int) -> Weights:
    """Return a table of token embeddings, sharded along the vocabulary."""
    return (Weight(f"{name}.weight", (vocab_size, width), "lookup", "vocab", "embedding"),)


def positions(name: str, length: int, width: int) -> Weights:
    """Return a table of learned positions (or token types), replicated on every rank."""
    return (Weight(f"{name}.weight", (length, width), "lookup", "replicate", "embedding"),)


def part(name: Part, *weights: Weight) -> Weights:
    """Assign a part to the tensors that have none."""
    return tuple(w if w.part != "other" else replace(w, part=name) for w in weights)


def plain_mlp(up: str, down: str, hidden_size: int, ffn_hidden_size: int, *, bias: bool) -> Weights:
    """Return the up and down projections of an MLP without a gate."""
    return part(
        "mlp",
        *linear(up, hidden_size, ffn_hidden_size, "column", bias=bias),
        *linear(down, ffn_hidden_size, hidden_size, "row", bias=bias),
    )


def output_projection(config: Config, width: int, vocab_size: int) -> Weights:
    """Return the output projection; nothing if it is tied to the embedding."""
    if config.flag("tie_word_embeddings"):
        return ()
    return part("head", *linear("lm_head", width, vocab_size, "vocab"))


def norm_and_projection(
    config: Config, sizes: TransformerSizes, name: str, *, bias: bool
) -> Weights:
    """Return the final norm, under a name, and the output projection."""
    return (
        *norm(name, sizes.hidden_size, bias=bias),
        *output_projection(config, sizes.hidden_size, sizes.vocab_size),
    )


def stack(
    keys: Sequence[Key], build: Callable[[Key], LayerKind]
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Build one kind for each distinct key; return the kinds and the kind of each layer."""
    distinct = list(dict.fromkeys(keys))
    index = {key: position for position, key in enumerate(distinct)}
    return tuple(build(key) for key in distinct), tuple(index[key] for key in keys)


def assemble(
    config: Config,
    sizes: TransformerSizes,
    *,
    pattern: tuple[int, ...] = (),
    prefixes: Sequence[str],
    tied: bool | None = None,
    max_seq_len_is_hard: bool = False,
    head_multiply: int = 0,
    hidden_dropout: float = 0.0,
    attention_dropout: str = "attention_dropout",
    **others: Any,
) -> ModelSpec:
    """Assemble the blocks; ``others``: the other fields of a model.

    ``pattern``: by default all layers are of one kind. ``tied``: by default as in the config.
    ``head_multiply``: by default hidden size times vocabulary. ``attention_dropout``: its key.
    """
    return ModelSpec(
        name="",
        family=config.family,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        max_seq_len_is_hard=max_seq_len_is_hard,
        tie_embeddings=config.flag("tie_word_embeddings") if tied is None else tied,
        hidden_dropout=hidden_dropout,
        attention_dropout=config.dropout(attention_dropout),
        pattern=pattern or (0,) * sizes.num_layers,
        layer_prefixes=tuple(prefixes),
        head_multiply=head_multiply or sizes.hidden_size * sizes.vocab_size,
        config=config.values,
        **others,
    )


def text_model(
    config: Config, family: str, defaults: Defaults, read: Callable[[Config], ModelSpec]
) -> ModelSpec:
    """Read the ``text_config`` of a model with vision as ``family``; the rest is left out."""
    values = {**config.read("text_config", dict[str, Any]), "model_type": family}
    text = Config(values, f"{config.where}: text_config", family, defaults)
    spec = read(text)
    config.defaulted.update(text.defaulted)
    vision = "vision_config is left out: only the text model is counted"
    return replace(spec, assumptions=(vision, *spec.assumptions))


def numbered(prefix: str, count: int) -> list[str]:
    """Return ``prefix.0`` to ``prefix.(count - 1)``."""
    return [f"{prefix}.{i}" for i in range(count)]
