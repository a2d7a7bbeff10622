"""Memory of serving a model: weights, cache, one forward pass, logits, runtime.

A replica has the model once, sharded over tensor-parallel ranks and pipeline stages; replicas
(data_parallel) serve different sequences. The peak is the largest of these points of a step:

    attention     a step's tokens inside attention
    feed_forward  the same tokens between the matrices of an MLP or of the experts
    sampling      the logits of one token of every sequence

Units: bytes on one accelerator. Every number of a ``ServingPoint`` may be a column; its rows share
the pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, reduce
from typing import Any, Final

import numpy as np

from cost_models.arrays import Count, Real, pick
from cost_models.model.spec import LayerKind, ModelSpec
from cost_models.partition.stages import PipelineRank
from cost_models.plan.workload import COMPUTE_BYTES, AttentionKernel
from cost_models.serving.activations import (
    attention_token_bytes,
    feed_forward_token_bytes,
    hidden_bytes,
    latent_workspace_bytes,
    masked_logits_bytes,
    sampled_logits_bytes,
    score_bytes,
)
from cost_models.serving.kv_cache import has_cache, layer_cache_bytes
from cost_models.serving.number_formats import (
    CACHE_FORMATS,
    WEIGHT_FORMATS,
    KVPrecision,
    ServingPrecision,
    WeightPrecision,
)
from cost_models.serving.weights import rank_weight_bytes
from hardware_profiles.software.serving_engine import ServingEngine

SERVING_MOMENTS: Final = ("attention", "feed_forward", "sampling")


@dataclass(frozen=True, slots=True)
class ServingWorkload:
    """Requests and number formats of a serving scenario."""

    concurrency: int  # concurrent sequences of all replicas
    context_len: int  # tokens of a sequence: prompt and answer
    prefill_chunk: int  # tokens of prompts that a replica computes in one step
    precision: ServingPrecision = "bf16"  # of the computation
    weight_precision: WeightPrecision = "bf16"
    kv_precision: KVPrecision = "bf16"
    attention_kernel: AttentionKernel = "flash"
    prompt_len: int = 0  # tokens of the prompt; 0: half of the sequence
    cuda_graphs: bool = True  # decode steps are launched as one graph

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt: ``prompt_len``, at most the whole sequence; by default half of it."""
        return min(self.prompt_len or max(1, self.context_len // 2), self.context_len)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"kind": "inference", **asdict(self), "prompt_len": self.prompt_tokens}


@dataclass(frozen=True, slots=True)
class ServingPoint:
    """Layout and load of a replica: each field one number or one column."""

    sequences: Count  # concurrent, of one replica
    context_len: Count
    prefill_chunk: Count
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    data_parallel: Count = 1
    expert_parallel: Count = 1  # 1: experts are sharded like other matrices

    def step_tokens(self, *, whole_sequences: bool) -> Real:
        """Tokens of one step of a replica: a chunk of prompts, or one token of every sequence.

        min(max(chunk, N), N s); encoders see a whole sequence at once: at least s.
        """
        least = np.maximum(self.prefill_chunk, self.sequences)
        if whole_sequences:
            least = np.maximum(least, self.context_len)
        return np.minimum(
            np.multiply(1.0, least), self.sequences * np.multiply(1.0, self.context_len)
        )


@dataclass(frozen=True)
class Replica:
    """A served model under the layouts and loads of a point: the argument of most formulas.

    ``workload`` gives formats and kernel; the counts come from ``point``.
    """

    model: ModelSpec
    workload: ServingWorkload
    engine: ServingEngine
    point: ServingPoint

    @property
    def compute_bytes(self) -> float:
        """Bytes of an element in the precision of the computation (c)."""
        return COMPUTE_BYTES[self.workload.precision]

    @cached_property
    def tokens(self) -> Real:
        """Tokens of one step."""
        whole = any(not kind.attention.causal for kind in self.model.kinds)
        return self.point.step_tokens(whole_sequences=whole)

    @cached_property
    def zeros(self) -> Real:
        """Zero of every layout and load."""
        point = self.point
        return np.zeros(np.broadcast(*(getattr(point, f.name) for f in fields(point))).shape)

    def layers_of(self, rank: PipelineRank) -> list[tuple[int, LayerKind]]:
        """Return the number of layers of each kind on a rank, without kinds that have none."""
        counts = zip(rank.kind_counts, self.model.kinds, strict=True)
        return [(count, kind) for count, kind in counts if count]


@dataclass(frozen=True, slots=True)
class ServingParts:
    """Bytes on one accelerator at its peak, by category."""

    weights: Real
    kv_cache: Real
    activations: Real
    logits: Real
    buffers: Real
    runtime: Real

    @property
    def exact(self) -> Real:
        """Bytes that follow from shapes alone: weights and cache."""
        return self.weights + self.kv_cache

    @property
    def rest(self) -> Real:
        """Bytes that depend on the engine's kernels."""
        return self.activations + self.logits + self.buffers + self.runtime

    @property
    def peak(self) -> Real:
        """Bytes in use as the device reports them."""
        return self.exact + self.rest


def rank_serving_memory(
    replica: Replica, rank: PipelineRank, *, on_gpu: bool
) -> tuple[ServingParts, Real]:
    """Return the parts at the peak of one pipeline rank, and the index of the peak's point."""
    activations, logits, moment = _at_peak(replica, rank)
    passed = np.where(
        np.greater(replica.point.pipeline_parallel, 1), 2.0 * replica.compute_bytes, 0.0
    )
    buffers = replica.zeros + passed * replica.model.hidden_size * replica.tokens
    parts = ServingParts(
        weights=replica.zeros + _weights(replica, rank),
        kv_cache=_cache(replica, rank),
        activations=activations,
        logits=logits,
        buffers=buffers,
        runtime=_runtime(replica, activations + logits + buffers) if on_gpu else replica.zeros,
    )
    return parts, moment


def _weights(replica: Replica, rank: PipelineRank) -> Real:
    """Bytes of the weights."""
    return rank_weight_bytes(
        replica.model,
        rank,
        replica.engine,
        replica.point.tensor_parallel,
        replica.point.expert_parallel,
        WEIGHT_FORMATS[replica.workload.weight_precision],
        replica.compute_bytes,
    )


def _cache(replica: Replica, rank: PipelineRank) -> Real:
    """Bytes of keys and values of all sequences."""
    point, cache = replica.point, replica.zeros
    for count, kind in replica.layers_of(rank):
        cache = cache + count * layer_cache_bytes(
            kind,
            point.sequences,
            point.context_len,
            point.tensor_parallel,
            CACHE_FORMATS[replica.workload.kv_precision],
            step_tokens=replica.tokens,
            block=replica.engine.scheduler.block_tokens,
        )
    return cache


def _at_peak(replica: Replica, rank: PipelineRank) -> tuple[Real, Real, Real]:
    """Return activations and logits at the point of a step with the most, and its index."""
    zeros, kinds = replica.zeros, [kind for _, kind in replica.layers_of(rank)]
    hidden_size = replica.model.hidden_size
    hidden = zeros + (
        hidden_bytes(hidden_size, replica.engine, replica.compute_bytes) * replica.tokens
    )
    attention = reduce(np.maximum, (_attention(replica, kind) for kind in kinds), zeros)
    between = reduce(np.maximum, (_feed_forward(replica, kind) for kind in kinds), zeros)
    logits = zeros + _logits(replica, rank)
    moments = ((hidden + attention, zeros), (hidden + between, zeros), (hidden, logits))
    moment = np.argmax(np.stack([a + b for a, b in moments]), axis=0)
    return pick([a for a, _ in moments], moment), pick([b for _, b in moments], moment), moment


def _attention(replica: Replica, kind: LayerKind) -> Real:
    """Bytes inside the attention of one layer, of a step's tokens."""
    point, tokens, compute = replica.point, replica.tokens, replica.compute_bytes
    tensor, kernel = point.tensor_parallel, replica.workload.attention_kernel
    inside = tokens * attention_token_bytes(
        kind.attention, replica.model.hidden_size, tensor, compute
    )
    scores = score_bytes(kind, kernel, tokens, point.context_len, tensor, compute)
    # if a prompt does not fit in one step, earlier chunks are read back
    earlier = np.where(
        np.greater(point.context_len, point.prefill_chunk),
        point.sequences * np.multiply(1.0, point.context_len),
        0.0,
    )
    unpacked = latent_workspace_bytes(kind.attention, replica.engine, earlier, tensor, compute)
    return inside + scores + unpacked


def _feed_forward(replica: Replica, kind: LayerKind) -> Real:
    """Bytes between the matrices of one layer's MLP or experts, of a step's tokens."""
    point = replica.point
    per_token = feed_forward_token_bytes(
        kind.feed_forward,
        replica.model.hidden_size,
        point.tensor_parallel,
        point.expert_parallel,
        point.data_parallel,
        replica.compute_bytes,
    )
    return per_token * replica.tokens


def _logits(replica: Replica, rank: PipelineRank) -> Real:
    """Bytes of logits: of one token of every sequence, or of all tokens of an encoder."""
    model, point = replica.model, replica.point
    if not (rank.last and model.head_multiply):
        return 0.0
    if has_cache(model):
        return sampled_logits_bytes(model.vocab_size, point.sequences, replica.engine)
    return masked_logits_bytes(
        model.vocab_size, replica.tokens, point.tensor_parallel, replica.compute_bytes
    )


def _runtime(replica: Replica, transient: Real) -> Real:
    """Bytes of context, graphs and communication, and those that the allocator cannot use."""
    point, memory = replica.point, replica.engine.memory
    ranks = np.multiply(point.tensor_parallel, point.pipeline_parallel)
    several = np.greater(ranks, 1) | np.greater(point.expert_parallel, 1)
    fixed = replica.zeros + memory.context_bytes + memory.graph_bytes
    communication = np.where(several, memory.communication_bytes, 0.0)
    return fixed + communication + memory.allocator_slack * transient


def price_serving(
    replica: Replica, ranks: Sequence[PipelineRank], *, on_gpu: bool
) -> tuple[ServingParts, Real, Real]:
    """Return the parts of the rank with the highest peak, its index, and the peak's point."""
    priced = [rank_serving_memory(replica, rank, on_gpu=on_gpu) for rank in ranks]
    fullest = np.argmax(np.stack([parts.peak for parts, _ in priced]), axis=0)
    chosen = {
        f.name: pick([getattr(parts, f.name) for parts, _ in priced], fullest)
        for f in fields(ServingParts)
    }
    moment = pick([moment for _, moment in priced], fullest)
    index = np.array([rank.index for rank in ranks])[fullest]
    return ServingParts(**chosen), index, moment
