"""Bytes of the key-value cache: of one token, one layer, one sequence, on one rank.

Symbols   k num_kv_heads   d head_dim   e value_head_dim   r kv_lora_rank   q rope_head_dim
          t tensor_parallel   b bytes of an element   g bytes of a scale   w window [tokens]
          N sequences   s context_len [tokens of a sequence, prompt and answer]   B block [tokens]
Units     bytes, tokens; every argument is one number or one column, everything broadcasts.

Leaves out: caches of finished sequences, which an engine keeps for later prompts while there is
room.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import FP32, Count, Real
from cost_models.model.spec import Attention, LayerKind, ModelSpec
from cost_models.serving.number_formats import CacheFormat


def kv_heads_on_rank(num_kv_heads: Count, tensor_parallel: Count) -> Real:
    """Key and value heads of one tensor-parallel rank: ceil(k / t), at least one.

    If t exceeds k, several ranks have the same head.

    Source: Pope et al., arXiv:2211.05102, sec. 3.3 (multiquery attention replicates the one head);
    vLLM, ModelConfig.get_num_kv_heads.

    >>> float(kv_heads_on_rank(8, 4)), float(kv_heads_on_rank(8, 16))
    (2.0, 1.0)
    """
    return np.ceil(np.multiply(1.0, num_kv_heads) / tensor_parallel)


def token_bytes(attention: Attention, tensor_parallel: Count, stored: CacheFormat) -> Real:
    """Bytes of one token in the cache of one attention layer on one tensor-parallel rank.

        ceil(k / t) (b (d + e) + 2 g)        keys and values of every head
        b (r + q) + g                        latent attention: the latent and the rotated key,
                                             replicated on every rank

    Source: DeepSeek-V2 (arXiv:2405.04434), sec. 2.1.2: (d_c + d_h^R) l elements a token; vLLM,
    MLAAttentionSpec. Older versions of transformers cached keys and values of every head instead.

    >>> llama_2_7b = Attention(32, 32, 128, 128)
    >>> float(32 * token_bytes(llama_2_7b, 1, CacheFormat("fp16", 2.0))) / 2**20
    0.5
    """
    if attention.kv_lora_rank:
        width = attention.kv_lora_rank + attention.rope_head_dim
        one = stored.element * width + stored.scale
        return one * np.ones_like(np.multiply(1.0, tensor_parallel))
    width = attention.head_dim + attention.value_head_dim
    heads = kv_heads_on_rank(attention.num_kv_heads, tensor_parallel)
    return heads * (stored.element * width + 2.0 * stored.scale)


def whole_blocks(tokens: Count | Real, block: float) -> Real:
    """Tokens rounded up to whole blocks: B ceil(tokens / B).

    Source: Kwon et al., PagedAttention (arXiv:2309.06180), sec. 4.2.

    >>> float(whole_blocks(100, 16))
    112.0
    """
    return block * np.ceil(np.multiply(1.0, tokens) / block)


def cached_tokens(
    sequences: Count,
    context_len: Count,
    *,
    window: int | None = None,
    step_tokens: Count | Real = 0,
    block: float = 1.0,
) -> Real:
    """Token slots in the cache of one layer, for all sequences together.

        N B ceil(s / B)                                                without a window, or s <= w
        min(N B ceil(s / B), N B (ceil(w / B) + 1 [B > 1]) + step)     with one

    A window keeps its last w tokens, which may begin inside a block, and the tokens that one step
    adds.

    Source: vLLM, SlidingWindowSpec.max_memory_usage_bytes (v1/kv_cache_interface.py). vLLM reserves
    a whole step for every sequence; here all sequences share it. Leaves out: losses if layers of
    several kinds share one pool of blocks.

    >>> float(cached_tokens(2, 8192, window=4096)), float(cached_tokens(2, 100, block=16))
    (8192.0, 224.0)
    """
    everything = sequences * whole_blocks(context_len, block)
    if window is None:
        return everything
    begins_inside = block if block > 1 else 0.0
    within = sequences * (whole_blocks(window, block) + begins_inside) + step_tokens
    return np.where(np.less_equal(context_len, window), everything, np.minimum(everything, within))


def state_bytes(attention: Attention, tensor_parallel: Count, stored: CacheFormat) -> Real:
    """Bytes of one sequence's state in one layer of linear attention, whatever its length.

        (4 a d e + b K Q) / t     a matrix of d x e in fp32 of each value head; K inputs of the
                                  convolution over Q channels

    Source: transformers, LinearAttentionLayer (cache_utils.py).
    """
    rule = attention.delta_rule
    if rule is None:
        return np.zeros_like(np.multiply(1.0, tensor_parallel))
    state = FP32 * attention.num_heads * attention.head_dim * attention.value_head_dim
    inputs = stored.element * rule.conv_kernel * attention.conv_channels
    return (state + inputs) / np.multiply(1.0, tensor_parallel)


def layer_cache_bytes(
    kind: LayerKind,
    sequences: Count,
    context_len: Count,
    tensor_parallel: Count,
    stored: CacheFormat,
    *,
    step_tokens: Count | Real = 0,
    block: float = 1.0,
) -> Real:
    """Bytes of the cache of one layer on one tensor-parallel rank.

    Cached tokens x bytes of a token; linear attention: a state of each sequence. With cross
    attention also the keys and values of as many encoder tokens; none for an encoder's layers,
    which see every token at once.

    >>> kind = LayerKind("layer", Attention(8, 2, 64, 64), None, "rms", 2, ())  # type: ignore
    >>> float(layer_cache_bytes(kind, 4, 1000, 1, CacheFormat("bf16", 2.0)))
    2048000.0
    """
    total = np.zeros(np.broadcast(sequences, context_len, tensor_parallel, step_tokens).shape)
    if kind.attention.delta_rule is not None:
        total = total + sequences * state_bytes(kind.attention, tensor_parallel, stored)
    elif kind.attention.causal:
        tokens = cached_tokens(
            sequences,
            context_len,
            window=kind.attention.window,
            step_tokens=step_tokens,
            block=block,
        )
        total = total + tokens * token_bytes(kind.attention, tensor_parallel, stored)
    if kind.cross_attention is not None:
        tokens = cached_tokens(sequences, context_len, block=block)
        total = total + tokens * token_bytes(kind.cross_attention, tensor_parallel, stored)
    return total


def has_cache(model: ModelSpec) -> bool:
    """Whether some layer caches keys and values; false for encoders alone."""
    return any(kind.attention.causal or kind.cross_attention for kind in model.kinds)


def bytes_per_token(
    model: ModelSpec,
    stored: CacheFormat,
    tensor_parallel: Count = 1,
    *,
    beyond_windows: bool = False,
) -> Real:
    """Bytes that one more token of a sequence adds, over all layers, on one rank.

    ``beyond_windows``: for a sequence so long that layers with a window cache no more.
    """
    each = [layer_cache_bytes(kind, 1, 1, tensor_parallel, stored) for kind in model.kinds]
    kept = [
        index
        for index in model.pattern
        if model.kinds[index].attention.delta_rule is None
        and not (beyond_windows and model.kinds[index].attention.window)
    ]
    return sum((each[index] for index in kept), start=np.asarray(0.0))
