"""Data that distinguish one family of models, and one layer, from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from cost_models.model.spec import LayerKind
from cost_models.plan.recompute import modules_of
from executor.attention.core import AttentionCore
from executor.parallel.expert_parallel import ExpertAxis
from executor.parallel.tensor_parallel import TensorAxis

RotaryTables = tuple[Tensor, Tensor]  # cosine and sine of every position, (B or 1, S, head_dim)
# (module of the attention, layer, input (B, s, H), positions) -> (B, s, H)
AttentionForward = Callable[[Any, "Layer", Tensor, "RotaryTables | None"], Tensor]
# (module of the MLP, layer, input (B, s, H)) -> (B, s, H)
FeedForward = Callable[[Any, "Layer", Tensor], Tensor]
# (module of the experts, layer, rows sorted by expert, rows of each expert) -> (rows, H)
ExpertsForward = Callable[[Any, "Layer", Tensor, list[int]], Tensor]


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """Attention or MLP with its norms: names of modules in the layer, None: no norm."""

    name: str  # "": its parts are in the layer itself
    norm_before: str | None
    norm_after: str | None = None  # of its output, before the residual sum
    norm_sum: str | None = None  # of the hidden state, after the residual sum (BERT)


@dataclass(frozen=True, slots=True)
class Family:
    """Names of the parts in a family's module, and variants of its layers."""

    tokens: str
    layers: str
    norm: str | None  # in front of the head
    attention: AttentionForward
    feed_forward: FeedForward
    attention_block: ResidualBlock = ResidualBlock("self_attn", "input_layernorm")
    feed_forward_block: ResidualBlock = ResidualBlock("mlp", "post_attention_layernorm")
    experts: ExpertsForward | None = None  # of a mixture of experts
    # a persistent buffer of every mixture of experts, one number per expert
    expert_buffer: str | None = None
    positions: str | None = None  # learned
    position_offset: int = 0  # rows of that table before the first position
    token_types: str | None = None  # a table of which every token reads the first row (BERT)
    embedding_norm: str | None = None
    # modules that hold all parts of the embedding and of the head; None: separate parts
    embedding: str | None = None
    head: str = "lm_head"
    projection: str = "lm_head"  # to the vocabulary
    head_bias: str | None = None  # where it is separate from the projection
    head_transform: str | None = None  # a module in front of the projection
    # predicts masked tokens instead of the next one
    masked: bool = False
    # samples are a source and a target: executor/model/encoder_decoder.py
    encoder_decoder: bool = False
    decoder_tokens: str = ""  # copy of ``tokens`` on the decoder's first stage
    rotary: str | None = None
    # rotary table of a layer (its module), None: no positions
    rotary_table: Callable[[Any], str | None] = lambda _: ""
    # multipliers of the embedding's output and of the logits, from the transformers config
    embedding_multiplier: Callable[[Any], float] = lambda _: 1.0
    logits_multiplier: Callable[[Any], float] = lambda _: 1.0
    softmax_in_fp32: bool = True
    initial_norm: float = 1.0  # initial weight of norms
    # other initial values, by the end of a name: constants, and logarithms of uniform numbers
    initial_constants: Mapping[str, float] = field(default_factory=dict)
    log_uniform: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scaled_down_weights: tuple[str, ...] = ()  # projections initialised 1 / sqrt(2 layers) smaller

    @property
    def embedding_modules(self) -> list[str]:
        """Modules of the embedding; the first one's forward pass covers all of it."""
        alone = (self.tokens, self.positions, self.token_types, self.embedding_norm)
        return [self.embedding] if self.embedding else [name for name in alone if name]

    @property
    def head_modules(self) -> list[str]:
        """Modules of the head."""
        return [name for name in (self.norm, self.head) if name]


@dataclass(frozen=True, slots=True)
class Layer:
    """Description of one layer."""

    family: Family
    kind: LayerKind
    axis: TensorAxis
    experts: ExpertAxis
    core: AttentionCore
    dropout: float  # of the outputs of attention and MLP
    residual_multiplier: float  # of the same outputs
    recompute: str  # setting of recomputation, see cost_models/plan/recompute.py
    random: bool  # has dropout
    offload: bool  # saved activations go to the host

    def repeats(self, module: str) -> bool:
        """Return whether a module of the layer is computed again, the layer as a whole not."""
        return module in modules_of(self.recompute)

    def for_evaluation(self) -> Layer:
        """Return the layer without dropout and saved activations."""
        core = replace(self.core, dropout=0.0, recompute=False)
        return replace(self, core=core, dropout=0.0, recompute="none", offload=False)
