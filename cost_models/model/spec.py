"""What a transformer is made of: every tensor of every block, and the numbers the formulas need.

A model is an embedding block, layers (each of one of a few *kinds*) and a head block. A block lists
its tensors under the names of the Hugging Face module, so that counts, shards and FLOPs all come
from one table that is compared, tensor by tensor, with the real module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# How tensor parallelism (Megatron: Shoeybi et al., arXiv:1909.08053, sec. 3) cuts a tensor:
#   column: along the output features      row: along the input features
#   vocab:  along the vocabulary           experts: as the expert's own matrices (column then row)
#   heads:  along the first dimension, the heads (norms over all heads)
#   replicate: every rank holds all of it
Cut = Literal["column", "row", "vocab", "heads", "replicate"]
# What the tensor does in the forward pass: a matmul with every token, a matmul with the tokens that
# a router sent (experts), a table look-up, or anything element-wise (norms, biases, scalars).
Role = Literal["linear", "expert", "lookup", "vector"]
# What the tensor belongs to, for tables of parameters.
Part = Literal[
    "embedding", "attention", "mlp", "experts", "shared_experts", "router", "norm", "head", "other"
]


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor."""

    name: str  # inside its block, as in the Hugging Face state dict
    shape: tuple[int, ...]
    role: Role
    cut: Cut
    part: Part = "other"
    transposed: bool = False  # a matrix stored (in, out), not (out, in)
    # lengths along the cut that are each cut for themselves: q, k and v of one matrix
    parts: tuple[int, ...] = ()
    frozen: bool = False  # not trained: no gradient, no optimizer state
    quantised: bool = False  # frozen, in 4 bits
    is_adapter: bool = False  # beside a frozen matrix, see ``adapters``

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_head_norm(self) -> bool:
        """Whether every head reads all of it: a norm of queries or keys."""
        names = (".q_norm.", ".k_norm.", ".q_layernorm.", ".k_layernorm.")
        return self.cut == "replicate" and any(name in f".{self.name}" for name in names)

    @property
    def gradient_is_summand(self) -> bool:
        """Whether it is whole on every tensor-parallel rank, which each give it a summand."""
        return self.is_head_norm or (self.is_adapter and self.cut == "replicate")

    @property
    def is_routed_expert(self) -> bool:
        """Whether it holds one slice per routed expert (its first dimension), biases included."""
        return self.part == "experts"


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of one attention; ``value_head_dim`` differs from ``head_dim`` only with MLA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    causal: bool = True
    window: int | None = None  # sliding window in tokens
    rotary: bool = True
    rotary_table: str = ""  # layers with other frequencies (Gemma 3) read other tables
    capped: bool = False  # scores are capped (Gemma 2): torch's fused kernels cannot do that
    rotary_dim: int = 0  # elements of a head that positions turn; 0: all
    sinks: bool = False  # a learned score a head to which no value belongs (gpt-oss)
    # eager: softmax in fp32, and a copy of it in compute precision; else in that alone (T5,
    # BERT, GPT-2)
    softmax_in_fp32: bool = True
    qk_norm: str = ""  # norms of q and k over each "head" or over "all" of them; "": none
    # multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1); 0: ordinary attention
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Sizes of one MLP or mixture of experts (``ffn_hidden_size`` is then one expert's)."""

    ffn_hidden_size: int
    gated: bool
    activation: str  # as in the config: silu, gelu_new, relu, ...
    num_experts: int = 0
    experts_per_token: int = 0
    shared_ffn_hidden_size: int = 0  # of all shared experts together
    inner_dropout: bool = False  # between the matrices too (T5)
    weighted_in_fp32: bool = False  # the router's weights are not cast back (Mixtral, DeepSeek)
    router_in_fp32: bool = False  # it reads a copy of its input in fp32 (DeepSeek)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer: its sizes and its tensors."""

    name: str
    attention: Attention
    feed_forward: FeedForward
    # *_in_fp32: the weights multiply before the result is cast back (OLMo 2, Gemma, Cohere)
    # rms_mixed: written out it multiplies its input itself, not the fp32 copy (T5)
    norm: Literal["rms", "rms_mixed", "layer", "rms_in_fp32", "layer_in_fp32"]
    num_norms: int  # of the hidden size, in this layer
    weights: tuple[Weight, ...]
    cross_attention: Attention | None = None
    parallel_residual: bool = False  # attention and MLP read the same input (GPT-NeoX, Falcon)
    # norms of what attention and MLP add to the hidden state (OLMo 2, Gemma 2) or of the sum (BERT)
    norms_after: bool = False
    # frozen, as is all below it: no backward pass reaches it
    idle: bool = False
    # layers of one stack share the tables (look-ups) of its first kind; "": nothing is shared
    stack: str = ""

    @property
    def shared(self) -> tuple[Weight, ...]:
        """What the layers of its stack read too: tables of relative positions (T5)."""
        return tuple(w for w in self.weights if self.stack and w.role == "lookup")

    @property
    def trains_positions(self) -> bool:
        """Whether its scores give a gradient to a table of its stack; beside adapters none does."""
        return bool(self.stack) and any(not (w.frozen or w.is_adapter) for w in self.weights)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model."""

    name: str  # what the user typed
    family: str  # model_type of the config
    hidden_size: int
    vocab_size: int
    max_seq_len: int | None  # longest trained or possible sequence; None: no limit
    max_seq_len_is_hard: bool  # learned positions: longer sequences cannot run
    tie_embeddings: bool
    hidden_dropout: float
    attention_dropout: float
    embedding: tuple[Weight, ...]  # names in full, e.g. model.embed_tokens.weight
    kinds: tuple[LayerKind, ...]
    pattern: tuple[int, ...]  # kind of each layer, in order
    layer_prefixes: tuple[str, ...]  # e.g. model.layers.0, one a layer
    head: tuple[Weight, ...]  # final norm and output projection; a tied projection is not listed
    head_multiply: int  # in_features x out_features of the output projection, tied or not (0: none)
    config: Mapping[str, Any] = field(repr=False, compare=False)
    assumptions: tuple[str, ...] = ()  # defaults taken, in words
    embedding_dropout: float = 0.0  # of what the embedding block puts out
    # between encoder and decoder, where the decoder's tokens are looked up in the same embedding
    bridge: tuple[Weight, ...] = ()

    @property
    def outer(self) -> tuple[Weight, ...]:
        """Every tensor outside the layers."""
        return (*self.embedding, *self.bridge, *self.head)

    @property
    def bridge_layer(self) -> int | None:
        """The first layer behind the bridge; None without a bridge."""
        across = (bool(self.kinds[kind].cross_attention) for kind in self.pattern)
        return list(across).index(True) if self.bridge else None

    def stage_kinds(self, first: int, last: int) -> list[int]:
        """Return the kinds of the layers [first, last) where these are a stage.

        The first of each stack is there of the stack's first kind: it holds what the layers of the
        stack share, or a copy of it.
        """
        found, stacks = list(self.pattern[first:last]), [kind.stack for kind in self.kinds]
        for stack in dict.fromkeys(stacks):
            here = [i for i, kind in enumerate(found) if stack and stacks[kind] == stack]
            if here:
                found[here[0]] = stacks.index(stack)
        return found

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(kind.feed_forward.num_experts > 0 for kind in self.kinds)

    @property
    def num_layers(self) -> int:
        """Number of layers (encoder and decoder together)."""
        return len(self.pattern)

    @property
    def num_parameters(self) -> int:
        """Every parameter once."""
        blocks = sum(w.numel for kind in self.pattern for w in self.kinds[kind].weights)
        return blocks + sum(w.numel for w in self.outer)

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        layers = (w for kind in self.pattern for w in self.kinds[kind].weights)
        return sum(w.numel for w in (*layers, *self.outer) if not w.frozen)
