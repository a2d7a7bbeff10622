"""What distinguishes one family of models, and one layer, from another, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cost_models.model import LayerKind
from executor.attention import Core
from executor.expert_parallel import ExpertAxis
from executor.tensor_parallel import TensorAxis

Rotary = tuple[Tensor, Tensor]  # cosine and sine of every position, (B or 1, S, head_dim)
# (module of the attention, layer, input (B, s, H), positions) -> (B, s, H)
AttentionForward = Callable[[Any, "Layer", Tensor, "Rotary | None"], Tensor]
# (module of the MLP, layer, input (B, s, H)) -> (B, s, H)
FeedForward = Callable[[Any, "Layer", Tensor], Tensor]
# (module of the experts, layer, rows sorted by expert, rows of each expert) -> (rows, H)
ExpertsForward = Callable[[Any, "Layer", Tensor, list[int]], Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """Attention or MLP with the norms around it: names of modules in the layer, None: no norm."""

    name: str
    norm_before: str | None
    norm_after: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family's module keeps its parts, and how its layers run."""

    tokens: str
    layers: str
    norm: str
    attention: AttentionForward
    feed_forward: FeedForward
    attention_block: Block = Block("self_attn", "input_layernorm")
    feed_forward_block: Block = Block("mlp", "post_attention_layernorm")
    experts: ExpertsForward | None = None  # of a mixture
    # a buffer of every mixture that is part of the model's state, one number an expert
    expert_buffer: str | None = None
    positions: str | None = None  # learned
    rotary: str | None = None
    # which of its rotary tables a layer (its module) reads, None: no positions
    rotary_table: Callable[[Any], str | None] = lambda _: ""
    # of what the embedding puts out, and of the logits; from the config of transformers
    embedding_multiplier: Callable[[Any], float] = lambda _: 1.0
    logits_multiplier: Callable[[Any], float] = lambda _: 1.0
    softmax_in_fp32: bool = True
    norm_start: float = 1.0  # of the weights of norms
    small_starts: tuple[str, ...] = ()  # projections that start 1 / sqrt(2 layers) smaller


@dataclass(frozen=True, slots=True)
class Layer:
    """How one layer runs."""

    family: Family
    kind: LayerKind
    axis: TensorAxis
    experts: ExpertAxis
    core: Core
    dropout: float  # of what attention and MLP add to the hidden state
    residual_multiplier: float  # of the same
    recompute: bool  # the whole layer
    random: bool  # has dropout
