"""Seconds of one forward pass of a pipeline stage in serving: rooflines, kernel by kernel.

A pass computes *rows*: the tokens of prompts (prefill), or one token of every sequence (decode).
Weights are read once a pass, the cache of a sequence once for its token.

Symbols   T rows of a pass   N sequences   s cached tokens of a sequence   t, ep parallel
          c bytes of the computation   h hidden_size   V vocab_size   L layers
          R FLOP/s of matmuls   beta memory bandwidth [bytes/s]
Units     seconds on one accelerator; every number of a ``Rows`` or a point may be a column.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.flops import mean_keys
from cost_models.compute.kernel_launch import host_wait
from cost_models.compute.layer import attention_core_seconds, elementwise_bytes_per_token
from cost_models.compute.rates import Rates
from cost_models.model.spec import Attention, LayerKind, ModelSpec
from cost_models.partition.stages import PipelineRank
from cost_models.plan.workload import COMPUTE_BYTES
from cost_models.serving.communication import ReplicaLinks
from cost_models.serving.kv_cache import token_bytes
from cost_models.serving.matmul import experts_met, layer_products, product_seconds
from cost_models.serving.memory import ServingPoint, ServingWorkload
from cost_models.serving.number_formats import CACHE_FORMATS, WEIGHT_FORMATS
from hardware_profiles.software.serving_engine import ServingEngine


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of matmuls (in the weights' precision) and of everything else, links and engine."""

    matrices: Rates
    rest: Rates
    links: ReplicaLinks
    engine: ServingEngine


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows, sequences and cached tokens of one pass."""

    tokens: Real  # rows of every matmul of a decoder, or of an encoder-only model
    sequences: Real  # sequences of which one token gets logits
    keys: Real  # keys of a prompt's last row; in a decode, cached tokens at its end
    decode: bool  # one token of every sequence, the cache read
    keys_before: Real = 0.0  # in a decode, cached tokens at its beginning
    encoder_tokens: Real = 0.0  # of an encoder before the decoder, in a prefill


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one pass of one stage, by cause."""

    matrices: Real
    attention: Real
    memory: Real  # norms, residuals, activations, embedding, logits
    kernels: Real  # added by the start and end of kernels
    communication: Real  # between the ranks of the stage, exposed
    host: Real  # in which the device waits for the host
    send: Real  # to the next stage

    @property
    def total(self) -> Real:
        """Sum of all parts, which do not overlap."""
        return sum((getattr(self, f.name) for f in fields(self)), start=np.asarray(0.0))


def decode_attention_seconds(
    attention: Attention,
    sequences: Real,
    keys: Real,
    tensor_parallel: Count,
    cached_bytes: Real,
    rate: Rates,
) -> Real:
    """Attention of one token of every sequence over its cache: max(bytes / beta, FLOP / R).

        max(N s (bytes of a token) / beta, FLOP / R)
        FLOP    2 N s a (d + e) / t                ordinary attention
                2 N s a (2 r + q) / t              latent: scores on latents and rotated keys,
                                               values on latents (weights absorbed)

    Source: Pope et al., arXiv:2211.05102, sec. 3.3; DeepSeek-V2 (arXiv:2405.04434), sec. 2.1.2.
    """
    width = attention.head_dim + attention.value_head_dim
    if attention.kv_lora_rank:
        width = 2 * attention.kv_lora_rank + attention.rope_head_dim
    flops = 2.0 * sequences * keys * attention.num_heads * width / tensor_parallel
    moved = np.multiply(1.0, sequences) * keys * cached_bytes
    return np.maximum(flops / rate.of_core.matmul, moved / rate.memory)


def stage_pass(
    model: ModelSpec,
    workload: ServingWorkload,
    machine: Machine,
    rank: PipelineRank,
    point: ServingPoint,
    rows: Rows,
) -> PassTime:
    """Seconds of one pass through the layers of one pipeline rank.

    ``point`` gives the layout of a replica; the counts of sequences and tokens come from ``rows``.
    """
    engine, compute = machine.engine, COMPUTE_BYTES[workload.precision]
    shape = np.broadcast(rows.tokens, rows.keys, *_cuts(point)).shape
    matrices, attention, memory, communication, kernels, operators = (
        np.zeros(shape) for _ in range(6)
    )
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        tokens = _layer_tokens(kind, model, rows)
        if not count or tokens is None:
            continue
        matrices = matrices + count * _layer_matrices(kind, workload, machine, point, rows, tokens)
        attention = attention + count * _layer_attention(
            kind, workload, machine, point, rows, tokens
        )
        moved = elementwise_bytes_per_token(
            kind, model.hidden_size, compute, point.tensor_parallel, False, engine
        )
        memory = memory + count * moved * tokens / machine.rest.memory
        communication = communication + count * _layer_traffic(
            kind, model, machine, point, tokens, compute
        )
        several = 1 + (kind.cross_attention is not None) * 0.5
        kernels = kernels + count * (
            several * engine.kernels.per_layer + _more_kernels(kind, engine)
        )
        operators = operators + count * several * engine.host.layer_operators
    if rank.first:
        memory = memory + 2.0 * compute * model.hidden_size * rows.tokens / machine.rest.memory
        communication = communication + machine.links.collective(
            "all_reduce", compute * model.hidden_size * rows.tokens, point.tensor_parallel
        )
    if rank.last:
        head, moved, gathered = _head(model, machine, point, rows, compute)
        matrices, memory = matrices + head, memory + moved
        communication = communication + gathered
    kernels = (kernels + engine.kernels.per_step) * engine.kernels.seconds
    started = (operators + engine.host.step_operators) * machine.rest.operator
    if machine.rest.host_is_device:
        kernels = np.zeros(shape)
    device = matrices + attention + memory + kernels + communication
    # a pass repeats one layer's short kernels: only its end is uneven
    host = np.asarray(host_wait(started, device, machine.rest, overlap=np.inf))
    if not machine.rest.host_is_device and workload.cuda_graphs:
        graphed = np.less_equal(rows.tokens, engine.scheduler.graph_sequences) & rows.decode
        host = np.where(graphed, 0.0, host)
    stages = point.pipeline_parallel
    sent = compute * model.hidden_size * np.multiply(1.0, rows.tokens)
    distance = np.multiply(point.tensor_parallel, point.data_parallel)
    send = 0.0 * matrices
    if not rank.last:
        send = send + machine.links.send(sent, distance, stages)
    return PassTime(matrices, attention, memory, kernels, communication, host, send)


def _more_kernels(kind: LayerKind, engine: ServingEngine) -> float:
    """Kernels of a layer in addition to those of ordinary attention and an MLP."""
    feed_forward = kind.feed_forward
    more = engine.kernels.per_latent_attention * bool(kind.attention.kv_lora_rank)
    if feed_forward.num_experts:
        shared = bool(feed_forward.shared_ffn_hidden_size)
        more += engine.kernels.per_expert_layer + engine.kernels.per_shared_expert_layer * shared
    return more


def _cuts(point: ServingPoint) -> tuple[Count, ...]:
    return (
        point.tensor_parallel,
        point.pipeline_parallel,
        point.data_parallel,
        point.expert_parallel,
    )


def _layer_tokens(kind: LayerKind, model: ModelSpec, rows: Rows) -> Real | None:
    """Rows of a layer; an encoder before a decoder processes the prompts, once."""
    is_encoder = not kind.attention.causal and kind.cross_attention is None
    if is_encoder and any(k.cross_attention for k in model.kinds):
        return None if rows.decode else rows.encoder_tokens
    return rows.tokens


def _layer_matrices(
    kind: LayerKind,
    workload: ServingWorkload,
    machine: Machine,
    point: ServingPoint,
    rows: Rows,
    tokens: Real,
) -> Real:
    engine, compute = machine.engine, COMPUTE_BYTES[workload.precision]
    stored = WEIGHT_FORMATS[workload.weight_precision]
    products = layer_products(kind, point.tensor_parallel, point.expert_parallel, stored, compute)
    total: Real = np.asarray(0.0)
    row_count: Real
    batch: Real
    for product in products:
        row_count, batch, held = tokens, np.asarray(1.0), product.weight_bytes
        if product.reads_encoder:
            if rows.decode:  # cached
                continue
            row_count = rows.encoder_tokens
        if product.is_expert:
            every = float(kind.feed_forward.num_experts)
            chosen = float(kind.feed_forward.experts_per_token)
            apart = np.greater(point.expert_parallel, 1)
            routed = tokens * np.where(apart, np.multiply(1.0, point.data_parallel), 1.0)
            here = every / np.multiply(1.0, point.expert_parallel)
            batch = experts_met(here, routed, chosen, every)
            held = held * batch / here
            row_count = routed * chosen / every * here / batch
        rate = machine.matrices if product.in_format else machine.rest
        total = total + product_seconds(
            row_count,
            product.inputs,
            product.outputs,
            held,
            compute,
            rate,
            batch=batch,
            stream_share=engine.kernels.stream_share,
        )
    return total


def _layer_attention(
    kind: LayerKind,
    workload: ServingWorkload,
    machine: Machine,
    point: ServingPoint,
    rows: Rows,
    tokens: Real,
) -> Real:
    compute, ranks = COMPUTE_BYTES[workload.precision], point.tensor_parallel
    stored = CACHE_FORMATS[workload.kv_precision]
    total: Real = np.asarray(0.0)
    if rows.decode:
        for attention in (kind.attention, kind.cross_attention):
            if attention is not None:
                total = total + decode_attention_seconds(
                    attention,
                    rows.sequences,
                    mean_keys(rows.keys_before, rows.keys, attention.window),
                    ranks,
                    token_bytes(attention, ranks, stored),
                    machine.rest,
                )
        return total
    total = attention_core_seconds(
        kind.attention,
        np.multiply(1.0, tokens),
        rows.keys,
        ranks,
        workload.attention_kernel,
        compute,
        machine.rest,
        machine.engine,
    )
    if kind.attention.causal:  # keys and values are written to the cache
        total = total + tokens * token_bytes(kind.attention, ranks, stored) / machine.rest.memory
    return total


def _layer_traffic(
    kind: LayerKind,
    model: ModelSpec,
    machine: Machine,
    point: ServingPoint,
    tokens: Real,
    compute: float,
) -> Real:
    """Seconds of all-reduces after attention and MLP (one if they read one input), and experts'.

    With whole experts over several replicas, tokens are sent to them and back: k hidden states
    each, which the tensor-parallel ranks send in parts.
    """
    size = compute * model.hidden_size * np.multiply(1.0, tokens)
    sums = 1.0 if kind.parallel_residual else 2.0 + (kind.cross_attention is not None)
    reduced = machine.links.collective("all_reduce", size, point.tensor_parallel)
    total = sums * reduced
    if kind.feed_forward.num_experts:
        apart = np.greater(point.expert_parallel, point.tensor_parallel)
        routed = (
            size * kind.feed_forward.experts_per_token / np.multiply(1.0, point.tensor_parallel)
        )
        both = 2.0 * machine.links.collective("all_to_all", routed, point.expert_parallel)
        total = np.where(apart, total - reduced + both, total)
    return total


def _head(
    model: ModelSpec, machine: Machine, point: ServingPoint, rows: Rows, compute: float
) -> tuple[Real, Real, Real]:
    """Output projection of the last tokens, sampling of the next ones, gathered logits."""
    zero = np.zeros(np.broadcast(rows.sequences, *_cuts(point)).shape)
    if not model.head_multiply:
        return zero, zero, zero
    engine, rate = machine.engine, machine.rest
    outputs = np.multiply(1.0, model.vocab_size) / point.tensor_parallel
    inputs = model.head_multiply / model.vocab_size
    seconds = product_seconds(
        rows.sequences,
        inputs,
        outputs,
        compute * inputs * outputs,
        compute,
        rate,
        stream_share=engine.kernels.stream_share,
    )
    drawn = np.multiply(1.0, rows.sequences) * model.vocab_size
    moved = engine.kernels.sampled_bytes_per_logit * drawn / rate.memory
    gathered = machine.links.collective("all_gather", compute * drawn, point.tensor_parallel)
    return zero + seconds, zero + moved, zero + gathered
