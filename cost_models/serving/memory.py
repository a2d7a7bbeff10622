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
from typing import Any, Final, Literal, get_args

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
from cost_models.serving.number_formats import CACHE_FORMATS, WEIGHT_FORMATS
from cost_models.serving.weights import rank_weight_bytes
from hardware_profiles.software.serving_engine import ServingEngine

ServingPrecision = Literal["bf16", "fp16", "fp32"]
WeightPrecision = Literal["bf16", "fp16", "fp32", "fp8", "int8", "int4", "mxfp4"]
KVPrecision = Literal["bf16", "fp16", "fp32", "fp8", "int8", "int4"]
SERVING_PRECISIONS: Final[tuple[str, ...]] = get_args(ServingPrecision)
WEIGHT_PRECISIONS: Final[tuple[str, ...]] = get_args(WeightPrecision)
KV_PRECISIONS: Final[tuple[str, ...]] = get_args(KVPrecision)
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
    model: ModelSpec,
    workload: ServingWorkload,
    engine: ServingEngine,
    rank: PipelineRank,
    point: ServingPoint,
    *,
    on_gpu: bool,
) -> tuple[ServingParts, Real]:
    """Return the parts at the peak of one pipeline rank, and the index of the peak's point.

    ``workload`` gives formats and kernel; the counts come from ``point``.
    """
    compute = COMPUTE_BYTES[workload.precision]
    whole = any(not kind.attention.causal for kind in model.kinds)
    tokens = point.step_tokens(whole_sequences=whole)
    shape = np.broadcast(*(getattr(point, f.name) for f in fields(point))).shape
    zeros = np.zeros(shape)
    weights = zeros + rank_weight_bytes(
        model,
        rank,
        engine,
        point.tensor_parallel,
        point.expert_parallel,
        WEIGHT_FORMATS[workload.weight_precision],
        compute,
    )
    stored = CACHE_FORMATS[workload.kv_precision]
    cache: Real = zeros
    attention: Real = zeros
    between: Real = zeros
    hidden: Real = zeros + hidden_bytes(model.hidden_size, engine, compute) * tokens
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        if not count:
            continue
        cache = cache + count * layer_cache_bytes(
            kind,
            point.sequences,
            point.context_len,
            point.tensor_parallel,
            stored,
            step_tokens=tokens,
            block=engine.scheduler.block_tokens,
        )
        attention = np.maximum(
            attention, _attention(model, workload, engine, kind, point, tokens, compute)
        )
        per_token = feed_forward_token_bytes(
            kind.feed_forward,
            model.hidden_size,
            point.tensor_parallel,
            point.expert_parallel,
            point.data_parallel,
            compute,
        )
        between = np.maximum(between, per_token * tokens)
    logits: Real = zeros
    if rank.last and model.head_multiply:
        if has_cache(model):
            logits = logits + sampled_logits_bytes(model.vocab_size, point.sequences, engine)
        else:
            logits = logits + masked_logits_bytes(
                model.vocab_size, tokens, point.tensor_parallel, compute
            )
    moments = ((hidden + attention, zeros), (hidden + between, zeros), (hidden, logits))
    moment = np.argmax(np.stack([a + b for a, b in moments]), axis=0)
    activations = pick([a for a, _ in moments], moment)
    logits = pick([b for _, b in moments], moment)
    passed = np.where(np.greater(point.pipeline_parallel, 1), 2.0 * compute, 0.0)
    buffers = zeros + passed * model.hidden_size * tokens
    runtime: Real = zeros
    if on_gpu:
        several = np.greater(
            np.multiply(point.tensor_parallel, point.pipeline_parallel), 1
        ) | np.greater(point.expert_parallel, 1)
        runtime = zeros + engine.memory.context_bytes + engine.memory.graph_bytes
        runtime = runtime + np.where(several, engine.memory.communication_bytes, 0.0)
        runtime = runtime + engine.memory.allocator_slack * (activations + logits + buffers)
    return ServingParts(weights, cache, activations, logits, buffers, runtime), moment


def _attention(
    model: ModelSpec,
    workload: ServingWorkload,
    engine: ServingEngine,
    kind: LayerKind,
    point: ServingPoint,
    tokens: Real,
    compute: float,
) -> Real:
    """Bytes inside the attention of one layer, of a step's tokens."""
    inside = tokens * attention_token_bytes(
        kind.attention, model.hidden_size, point.tensor_parallel, compute
    )
    scores = score_bytes(
        kind, workload.attention_kernel, tokens, point.context_len, point.tensor_parallel, compute
    )
    # if a prompt does not fit in one step, earlier chunks are read back
    earlier = np.where(
        np.greater(point.context_len, point.prefill_chunk),
        point.sequences * np.multiply(1.0, point.context_len),
        0.0,
    )
    unpacked = latent_workspace_bytes(
        kind.attention, engine, earlier, point.tensor_parallel, compute
    )
    return inside + scores + unpacked


def price_serving(
    model: ModelSpec,
    workload: ServingWorkload,
    engine: ServingEngine,
    ranks: Sequence[PipelineRank],
    point: ServingPoint,
    *,
    on_gpu: bool,
) -> tuple[ServingParts, Real, Real]:
    """Return the parts of the rank with the highest peak, its index, and the peak's point."""
    priced = [
        rank_serving_memory(model, workload, engine, rank, point, on_gpu=on_gpu) for rank in ranks
    ]
    fullest = np.argmax(np.stack([parts.peak for parts, _ in priced]), axis=0)
    chosen = {
        f.name: pick([getattr(parts, f.name) for parts, _ in priced], fullest)
        for f in fields(ServingParts)
    }
    moment = pick([moment for _, moment in priced], fullest)
    index = np.array([rank.index for rank in ranks])[fullest]
    return ServingParts(**chosen), index, moment
