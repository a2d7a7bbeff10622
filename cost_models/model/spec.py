"""Structure of a transformer: every tensor of every block, and the sizes that formulas use.

A model is an embedding block, layers (each of one of a few *kinds*) and a head block. A block lists
its tensors under the names of the Hugging Face module, so that counts, shards and FLOPs all follow
from one table, which is compared tensor by tensor with the real module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# How tensor parallelism (Megatron: Shoeybi et al., arXiv:1909.08053, sec. 3) shards a tensor:
#   column: along the output features      row: along the input features
#   vocab:  along the vocabulary           experts: as the expert's own matrices (column then row)
#   heads:  along the first dimension, the heads (norms over all heads)
#   replicate: every rank has all of it
Sharding = Literal["column", "row", "vocab", "heads", "replicate"]
# Operation of the tensor in the forward pass: a matmul with every token, a matmul with the tokens
# that a router sent (experts), a table look-up, or element-wise (norms, biases, scalars).
Role = Literal["linear", "expert", "lookup", "vector"]
# Part of the model, for tables of parameters.
Part = Literal[
    "embedding", "attention", "mlp", "experts", "shared_experts", "router", "norm", "head", "other"
]


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor."""

    name: str  # inside its block, as in the Hugging Face state dict
    shape: tuple[int, ...]
    role: Role
    sharding: Sharding
    part: Part = "other"
    transposed: bool = False  # a matrix stored (in, out), not (out, in)
    # lengths along the sharded dimension that are sharded separately: q, k and v of one matrix
    parts: tuple[int, ...] = ()
    frozen: bool = False  # not trained: no gradient, no optimizer state
    quantised: bool = False  # frozen, in 4 bits
    is_adapter: bool = False  # a tensor added to a frozen matrix, see ``lora``
    adapter: str = ""  # the method that adapts this frozen matrix, see ``adapter_methods``
    # multiplied with the tokens that cross-attention reads, not with those of the layer itself
    reads_source: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied with it: all of them, or those that an expert gets."""
        return self.role in ("linear", "expert")

    @property
    def features(self) -> tuple[int, int]:
        """Inputs and outputs of a matrix, of one expert."""
        first, second = self.shape[-2:]
        return (first, second) if self.transposed else (second, first)

    @property
    def is_head_norm(self) -> bool:
        """Whether it is a norm of queries, keys or outputs that every head reads in full."""
        names = (".q_norm.", ".k_norm.", ".q_layernorm.", ".k_layernorm.", ".linear_attn.norm.")
        return self.sharding == "replicate" and any(name in f".{self.name}" for name in names)

    @property
    def gradient_is_partial_sum(self) -> bool:
        """Whether it is replicated over tensor-parallel ranks, whose gradients must be summed."""
        return self.is_head_norm or (self.is_adapter and self.sharding == "replicate")

    @property
    def is_routed_expert(self) -> bool:
        """Whether it has one slice for each routed expert (first dimension), biases included."""
        return self.part == "experts"


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Linear attention by the gated delta rule (Yang et al., arXiv:2412.06464).

    Each value head keeps a matrix of key by value features instead of keys and values. Queries,
    keys and values pass a causal convolution first; the output is normalised and gated.
    """

    conv_kernel: int  # tokens of the convolution
    chunk: int = 64  # tokens that are computed together


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of one attention; ``value_head_dim`` differs from ``head_dim`` only with MLA.

    Linear attention (``delta_rule``): value heads are num_heads, heads of queries and keys
    num_kv_heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    causal: bool = True
    window: int | None = None  # tokens of a sliding window, or of a chunk
    chunked: bool = False  # a token attends to the earlier ones of its own chunk (Llama 4)
    rotary: bool = True
    rotary_table: str = ""  # layers with other frequencies (Gemma 3) use other tables
    capped: bool = False  # scores are capped (Gemma 2): torch's fused kernels cannot do that
    rotary_dim: int = 0  # rotated elements of a head; 0: all
    sinks: bool = False  # a learned score for each head, without a value (gpt-oss)
    # eager: softmax in fp32, and a copy of it in compute precision; else in that alone (T5,
    # BERT, GPT-2)
    softmax_in_fp32: bool = True
    qk_norm: str = ""  # norms of q and k over each "head" or over "all" of them; "": none
    # multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1); 0: ordinary attention
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    gated: bool = False  # the output is multiplied by the sigmoid of a gate, projected with queries
    delta_rule: DeltaRule | None = None  # linear attention: no scores of pairs of tokens
    # tokens of a sequence of queries, and of the one that gives it keys and values, where they
    # differ: cross-attention in a model ``with_target_length``; 0: equal
    num_queries: int = 0
    num_keys: int = 0

    def keys_of(self, queries: Any) -> Any:
        """Tokens that give keys and values to sequences of so many queries."""
        return queries * self.num_keys / self.num_queries if self.num_queries else queries

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution in front of linear attention: queries, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim + self.num_heads * self.value_head_dim


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Sizes of one MLP or mixture of experts (``ffn_hidden_size`` is then one expert's)."""

    ffn_hidden_size: int
    gated: bool
    activation: str  # as in the config: silu, gelu_new, relu, ...
    num_experts: int = 0
    experts_per_token: int = 0
    shared_ffn_hidden_size: int = 0  # of all shared experts together
    inner_dropout: bool = False  # dropout between the matrices as well (T5)
    weighted_in_fp32: bool = False  # the router's weights are not cast back (Mixtral, DeepSeek)
    router_in_fp32: bool = False  # it reads a copy of its input in fp32 (DeepSeek)
    # a token's experts are of some of these groups of neighbours alone (DeepSeek)
    expert_groups: int = 1
    groups_per_token: int = 1
    balanced_by_bias: bool = False  # a bias of each expert spreads tokens (DeepSeek-V3), no loss


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
    # norms follow the outputs of attention and MLP (OLMo 2, Gemma 2) or the residual sum (BERT)
    norms_after: bool = False
    # frozen, as are all layers before it: it has no backward pass
    forward_only: bool = False
    # layers of one stack share the tables (look-ups) of its first kind; "": nothing is shared
    stack: str = ""

    def own_seq_len(self, seq_len: Any) -> Any:
        """Tokens of its own sequences, where the workload's have ``seq_len``."""
        across = self.cross_attention
        return across.num_queries if across is not None and across.num_queries else seq_len

    @property
    def token_share(self) -> float:
        """Tokens of its own sequences over those of the workload's: of a decoder's targets."""
        across = self.cross_attention
        if across is None or not across.num_queries:
            return 1.0
        return across.num_queries / across.num_keys

    def rows_of(self, weight: Weight, tokens: Any) -> Any:
        """Tokens that are multiplied with a matrix, where the layer itself has ``tokens``."""
        across = self.cross_attention
        return across.keys_of(tokens) if across is not None and weight.reads_source else tokens

    @property
    def shared_tables(self) -> tuple[Weight, ...]:
        """Tables that all layers of its stack read: relative position biases (T5)."""
        return tuple(w for w in self.weights if self.stack and w.role == "lookup")

    @property
    def trains_position_bias(self) -> bool:
        """Whether its scores give a gradient to a table of its stack; none with adapters."""
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
    embedding: tuple[Weight, ...]  # full names, e.g. model.embed_tokens.weight
    kinds: tuple[LayerKind, ...]
    pattern: tuple[int, ...]  # kind of each layer, in order
    layer_prefixes: tuple[str, ...]  # e.g. model.layers.0, one a layer
    head: tuple[Weight, ...]  # final norm and output projection; a tied projection is not listed
    head_multiply: int  # in_features x out_features of the output projection, tied or not (0: none)
    config: Mapping[str, Any] = field(repr=False, compare=False)
    assumptions: tuple[str, ...] = ()  # defaults taken, in words
    embedding_dropout: float = 0.0  # on the embedding block's output
    caps_logits: bool = False  # c tanh(x / c) of the logits (Gemma 2)
    # between encoder and decoder, where the decoder's tokens are looked up in the same embedding
    bridge: tuple[Weight, ...] = ()

    @property
    def outer(self) -> tuple[Weight, ...]:
        """Every tensor outside the layers."""
        return (*self.embedding, *self.bridge, *self.head)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder reads what an encoder has read."""
        return any(kind.cross_attention is not None for kind in self.kinds)

    @property
    def target_share(self) -> float:
        """Tokens that reach the head over those of the workload's sequences."""
        return self.kinds[self.pattern[-1]].token_share

    @property
    def bridge_layer(self) -> int | None:
        """The first layer after the bridge; None without a bridge."""
        across = (bool(self.kinds[kind].cross_attention) for kind in self.pattern)
        return list(across).index(True) if self.bridge else None

    def stage_kinds(self, first: int, last: int) -> list[int]:
        """Return the kinds of the layers [first, last) if these are a pipeline stage.

        The first layer of each stack in the stage has the stack's first kind: it owns the tables
        that the layers of the stack share, or a copy of them.
        """
        found, stacks = list(self.pattern[first:last]), [kind.stack for kind in self.kinds]
        for stack in filter(None, dict.fromkeys(stacks)):
            here = [i for i, kind in enumerate(found) if stacks[kind] == stack]
            if here:
                found[here[0]] = stacks.index(stack)
        return found

    @property
    def has_linear_attention(self) -> bool:
        """Whether some layer has linear attention."""
        return any(kind.attention.delta_rule is not None for kind in self.kinds)

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
        """Number of parameters; shared tensors count once."""
        blocks = sum(w.numel for kind in self.pattern for w in self.kinds[kind].weights)
        return blocks + sum(w.numel for w in self.outer)

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        layers = (w for kind in self.pattern for w in self.kinds[kind].weights)
        return sum(w.numel for w in (*layers, *self.outer) if not w.frozen)
