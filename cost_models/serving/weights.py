"""Bytes of the weights on one rank of a serving replica.

Symbols   N elements of a tensor   t tensor_parallel   k num_kv_heads   u share of keys and values
          ep expert_parallel   c compute_bytes   b, g bytes of an element and of a scale
Units     bytes; ``tensor_parallel`` and ``expert_parallel`` are numbers or columns.

Leaves out: padding that a kernel adds to a quantised tensor.
"""

from __future__ import annotations

import math

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.model.spec import Attention, LayerKind, ModelSpec, Weight
from cost_models.partition.stages import PipelineRank
from cost_models.serving.number_formats import WeightFormat
from hardware_profiles.software.serving_engine import ServingEngine

# words in the names of tensors of keys and values alone, and of fused queries, keys and values
KEYS_VALUES = frozenset({"k_proj", "v_proj", "k", "v", "key", "value", "k_norm"})
ALL_THREE = frozenset({"qkv_proj", "query_key_value", "c_attn"})


def key_value_part(weight: Weight, attention: Attention) -> float:
    """Return u, the share of a tensor that belongs to key and value heads.

    >>> weight = Weight("self_attn.qkv_proj.weight", (6144, 4096), "linear", "column")
    >>> round(key_value_part(weight, Attention(32, 8, 128, 128)), 3)
    0.333
    """
    words = set(weight.name.split("."))
    if attention.kv_lora_rank or weight.sharding == "replicate":
        return 0.0
    if words & KEYS_VALUES:
        return 1.0
    keys = attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
    queries = attention.num_heads * attention.head_dim
    return keys / (queries + keys) if words & ALL_THREE else 0.0


def rank_share(
    weight: Weight,
    attention: Attention | None,
    tensor_parallel: Count,
    expert_parallel: Count = 1,
    *,
    vocab_multiple: float = 1.0,
) -> Real:
    """Share of a tensor on one rank.

        1                                 replicated
        u / min(t, k) + (1 - u) / t       sharded; several ranks have the same key head if t > k
        padded V / (V t)                  along the vocabulary, padded to a multiple
        1 / ep, or 1 / t with ep = 1      routed experts: whole experts, or a shard of each

    Source: Shoeybi et al. (arXiv:1909.08053), sec. 3; vLLM, QKVParallelLinear and
    VocabParallelEmbedding.
    """
    ranks = np.multiply(1.0, tensor_parallel)
    cut: Real = np.ones_like(ranks) if weight.sharding == "replicate" else 1.0 / ranks
    if weight.is_routed_expert:
        return np.where(
            np.greater(expert_parallel, 1), 1.0 / np.multiply(1.0, expert_parallel), cut
        )
    if weight.sharding == "vocab":
        rows = vocab_multiple * math.ceil(weight.shape[0] / vocab_multiple)
        return rows / weight.shape[0] * cut
    if attention is None or weight.sharding == "replicate":
        return cut
    keys = key_value_part(weight, attention)
    return keys / np.minimum(ranks, attention.num_kv_heads) + (1.0 - keys) * cut


def tensor_bytes(
    weight: Weight,
    attention: Attention | None,
    tensor_parallel: Count,
    expert_parallel: Count,
    stored: WeightFormat,
    compute_bytes: float,
    vocab_multiple: float = 1.0,
) -> Real:
    """Bytes of one tensor on one rank.

        c N                    what stays in the compute precision
        b N + g N / group      groups of a row share a scale
        b N + g rows           a row (one output) has one scale; whole where the inputs are cut

    times the rank's share.

    Source: LLM.int8 (arXiv:2208.07339), sec. 2.1 (a scale a row); GPTQ (arXiv:2210.17323) and AWQ
    (arXiv:2306.00978), groups of a row.

    >>> int8 = WeightFormat("int8", 1.0, 4.0)
    >>> weight = Weight("up_proj.weight", (1024, 256), "linear", "column", "mlp")
    >>> float(tensor_bytes(weight, None, 2, 1, int8, 2.0))
    133120.0
    """
    share = rank_share(
        weight, attention, tensor_parallel, expert_parallel, vocab_multiple=vocab_multiple
    )
    if not stored.holds(weight):
        return compute_bytes * weight.numel * share
    if not stored.is_quantised:
        return stored.element * weight.numel * share
    inputs = weight.features[0]
    scales = weight.numel / (stored.group or inputs)
    whole = weight.sharding == "row" and not stored.group
    cut_only = share
    if whole:  # every rank scales all outputs of its experts
        ones = np.ones_like(share)
        shared_out = np.greater(expert_parallel, 1) & weight.is_routed_expert
        cut_only = np.where(shared_out, share, ones)
    return stored.element * weight.numel * share + stored.scale * scales * cut_only


def unpacked_latent_bytes(
    kind: LayerKind, tensor_parallel: Count, stored: WeightFormat, compute_bytes: float
) -> Real:
    """Bytes of the 16-bit copy of a quantised kv_b_proj: c N / t.

    Latent attention multiplies it into queries and outputs, for which no quantised kernel exists.

    Source: vllm/v1/attention/backends/mla/common.py, process_weights_after_loading.
    """
    copies = [w for w in kind.weights if "kv_b_proj" in w.name and w.role == "linear"]
    numel = sum(w.numel for w in copies if stored.is_quantised and stored.holds(w))
    return compute_bytes * float(numel) / np.multiply(1.0, tensor_parallel)


def position_table_bytes(model: ModelSpec, rank: PipelineRank, compute_bytes: float) -> float:
    """Bytes of the cosines and sines of every position, once for all layers with the same table.

        c (longest sequence) (rotated elements of a head)

    Source: vLLM, RotaryEmbedding (cos_sin_cache, max_position_embeddings x rotary_dim). It explains
    14.9888 GiB for Llama-3.1-8B and 14.96 GiB for Llama-3-8B (vllm-project/vllm/issues/10517,
    pull/10511).
    """
    present = [k for n, k in zip(rank.kind_counts, model.kinds, strict=True) if n]
    tables = {
        (a.rotary_table, a.rope_head_dim or a.rotary_dim or a.head_dim)
        for a in (kind.attention for kind in present)
        if a.rotary
    }
    return compute_bytes * (model.max_seq_len or 0) * sum(width for _, width in tables)


def rank_weight_bytes(
    model: ModelSpec,
    rank: PipelineRank,
    engine: ServingEngine,
    tensor_parallel: Count,
    expert_parallel: Count,
    stored: WeightFormat,
    compute_bytes: float,
) -> Real:
    """Bytes of all weights of one rank: layers, embedding, head and position tables.

    A tied projection is a second copy only if embedding and head are on different ranks. The
    tensors between encoder and decoder are on the first rank, as these models are not split into
    stages.
    """

    def sum_of(weights: tuple[Weight, ...], attention: Attention | None) -> Real:
        each = (
            tensor_bytes(
                weight,
                attention,
                tensor_parallel,
                expert_parallel,
                stored,
                compute_bytes,
                engine.memory.vocab_multiple,
            )
            for weight in weights
        )
        return sum(each, start=np.asarray(0.0))

    total: Real = np.asarray(position_table_bytes(model, rank, compute_bytes))
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        if count:
            one = sum_of(kind.weights, kind.attention)
            total = total + count * (
                one + unpacked_latent_bytes(kind, tensor_parallel, stored, compute_bytes)
            )
    if rank.first:
        total = total + sum_of((*model.embedding, *model.bridge), None)
    if rank.last:
        total = total + sum_of(model.head, None)
        if model.tie_embeddings and model.head_multiply and not rank.first:
            total = total + compute_bytes * model.head_multiply / np.multiply(1.0, tensor_parallel)
    return total
