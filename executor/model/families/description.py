"""What distinguishes one family of models, and one layer, from another, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cost_models.model.spec import LayerKind
from executor.attention.core import Core
from executor.parallel.expert_parallel import ExpertAxis
from executor.parallel.tensor_parallel import TensorAxis

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

    name: str  # "": the layer itself holds its parts
    norm_before: str | None
    norm_after: str | None = None  # of what it adds to the hidden state
    norm_sum: str | None = None  # of the hidden state, once that is added (BERT)


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family's module keeps its parts, and how its layers run."""

    tokens: str
    layers: str
    norm: str | None  # in front of the head
    attention: AttentionForward
    feed_forward: FeedForward
    attention_block: Block = Block("self_attn", "input_layernorm")
    feed_forward_block: Block = Block("mlp", "post_attention_layernorm")
    experts: ExpertsForward | None = None  # of a mixture
    # a buffer of every mixture that is part of the model's state, one number an expert
    expert_buffer: str | None = None
    positions: str | None = None  # learned
    position_offset: int = 0  # rows of that table before the first position's
    token_types: str | None = None  # a table of which every token reads the first row (BERT)
    embedding_norm: str | None = None
    # modules that hold all parts of the embedding and of the head; None: the parts stand alone
    embedding: str | None = None
    head: str = "lm_head"
    projection: str = "lm_head"  # to the vocabulary
    head_bias: str | None = None  # where it is no part of the projection
    head_transform: str | None = None  # a module in front of the projection
    # predicts tokens that were hidden instead of the next one
    masked: bool = False
    # its samples are a source and a target: executor/model/encoder_decoder.py
    encoder_decoder: bool = False
    decoder_tokens: str = ""  # the copy of ``tokens`` where the decoder begins on a later stage
    rotary: str | None = None
    # which of its rotary tables a layer (its module) reads, None: no positions
    rotary_table: Callable[[Any], str | None] = lambda _: ""
    # of what the embedding puts out, and of the logits; from the config of transformers
    embedding_multiplier: Callable[[Any], float] = lambda _: 1.0
    logits_multiplier: Callable[[Any], float] = lambda _: 1.0
    softmax_in_fp32: bool = True
    norm_start: float = 1.0  # of the weights of norms
    small_starts: tuple[str, ...] = ()  # projections that start 1 / sqrt(2 layers) smaller

    @property
    def embedding_modules(self) -> list[str]:
        """Modules of the embedding; the first one's forward pass is the whole of it."""
        alone = (self.tokens, self.positions, self.token_types, self.embedding_norm)
        return [self.embedding] if self.embedding else [name for name in alone if name]

    @property
    def head_modules(self) -> list[str]:
        """Modules of the head."""
        return [name for name in (self.norm, self.head) if name]


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
    keeps_results: bool  # it is recomputed, but for its matrices, attention and collectives
    random: bool  # has dropout
    offload: bool  # what it saves goes to the host
