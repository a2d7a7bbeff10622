"""Seconds of one forward pass of a pipeline stage in serving: rooflines, kernel by kernel.

A pass computes *rows*: the tokens of prompts (prefill), or one token of every sequence (decode).
Weights are read once a pass, the cache of a sequence once for its token.

Symbols   T rows of a pass   N sequences   s cached tokens of a sequence   t, ep parallel
          c bytes of the computation   h hidden_size   V vocab_size   L layers
          R FLOP/s of matmuls   beta memory bandwidth [bytes/s]
Units     seconds on one accelerator; every number of a ``Rows`` or a point may be a column.

Leaves out: passes that mix prompts and single tokens (continuous batching).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.attention import CoreWork, attention_core_seconds
from cost_models.compute.elementwise import ElementwiseWork, elementwise_bytes_per_token
from cost_models.compute.flops import mean_keys
from cost_models.compute.kernel_launch import host_wait
from cost_models.compute.rates import Rates
from cost_models.model.spec import Attention, LayerKind, ModelSpec
from cost_models.partition.stages import PipelineRank
from cost_models.serving.communication import ReplicaLinks
from cost_models.serving.kv_cache import state_bytes, token_bytes
from cost_models.serving.matmul import experts_met, layer_products, product_seconds
from cost_models.serving.memory import Replica, ServingPoint
from cost_models.serving.number_formats import CACHE_FORMATS, WEIGHT_FORMATS
from hardware_profiles.software.serving_engine import ServingEngine


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of matmuls (in the weights' precision) and of everything else, and links."""

    matrices: Rates
    rest: Rates
    links: ReplicaLinks


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
                6 N a d e / t                      linear: the state is read, and written, once
                2 N s a (2 r + q) / t              latent: scores on latents and rotated keys,
                                               values on latents (weights absorbed)

    Source: Pope et al., arXiv:2211.05102, sec. 3.3; DeepSeek-V2 (arXiv:2405.04434), sec. 2.1.2.
    """
    if attention.delta_rule is not None:
        state = attention.num_heads * attention.head_dim * attention.value_head_dim
        flops = 6.0 * np.multiply(1.0, sequences) * state / tensor_parallel
        moved = 2.0 * np.multiply(1.0, sequences) * cached_bytes
        return np.maximum(flops / rate.of_core.matmul, moved / rate.memory)
    width = attention.head_dim + attention.value_head_dim
    if attention.kv_lora_rank:
        width = 2 * attention.kv_lora_rank + attention.rope_head_dim
    flops = 2.0 * sequences * keys * attention.num_heads * width / tensor_parallel
    moved = np.multiply(1.0, sequences) * keys * cached_bytes
    return np.maximum(flops / rate.of_core.matmul, moved / rate.memory)


@dataclass(frozen=True)
class StagePass:
    """One forward pass through the layers of one pipeline rank of a replica.

    ``replica`` gives the layout; the counts of sequences and tokens come from ``rows``.
    """

    replica: Replica
    machine: Machine
    rank: PipelineRank
    rows: Rows

    @property
    def point(self) -> ServingPoint:
        """The layout."""
        return self.replica.point

    @property
    def engine(self) -> ServingEngine:
        """The serving engine."""
        return self.replica.engine

    @property
    def compute_bytes(self) -> float:
        """Bytes of an element in the precision of the computation (c)."""
        return self.replica.compute_bytes

    @property
    def has_head(self) -> bool:
        """Whether the rank computes logits."""
        return bool(self.rank.last and self.replica.model.head_multiply)

    @cached_property
    def zeros(self) -> Real:
        """Zero of every row."""
        return np.zeros(np.broadcast(self.rows.tokens, self.rows.keys, *_cuts(self.point)).shape)

    @cached_property
    def layers(self) -> list[tuple[int, LayerKind, Real]]:
        """Number of layers of each kind that compute, and their rows."""
        kinds = self.replica.layers_of(self.rank)
        computed = (
            (n, kind, _layer_tokens(kind, self.replica.model, self.rows)) for n, kind in kinds
        )
        return [(n, kind, tokens) for n, kind, tokens in computed if tokens is not None]

    def hidden_bytes(self, tokens: Real) -> Real:
        """Bytes of the hidden states of some tokens."""
        return self.compute_bytes * self.replica.model.hidden_size * np.multiply(1.0, tokens)


def stage_seconds(stage: StagePass) -> PassTime:
    """Seconds of one pass through the layers of one pipeline rank."""
    matrices, attention = _matrix_seconds(stage), _attention_seconds(stage)
    memory, kernels = _memory_seconds(stage), _kernel_seconds(stage)
    communication = _communication_seconds(stage)
    device = matrices + attention + memory + kernels + communication
    host = _host_seconds(stage, device)
    return PassTime(matrices, attention, memory, kernels, communication, host, _send_seconds(stage))


def _matrix_seconds(stage: StagePass) -> Real:
    """Seconds of matmuls of layers, and of the output projection of one token a sequence."""
    found = stage.zeros
    for count, kind, tokens in stage.layers:
        found = found + count * _layer_matrices(stage, kind, tokens)
    if not stage.has_head:
        return found
    model, compute = stage.replica.model, stage.compute_bytes
    outputs = np.multiply(1.0, model.vocab_size) / stage.point.tensor_parallel
    inputs = model.head_multiply / model.vocab_size
    return found + product_seconds(
        stage.rows.sequences,
        inputs,
        outputs,
        compute * inputs * outputs,
        compute,
        stage.machine.rest,
        stream_share=stage.engine.kernels.stream_share,
    )


def _attention_seconds(stage: StagePass) -> Real:
    """Seconds of attention of all layers."""
    found = stage.zeros
    for count, kind, tokens in stage.layers:
        found = found + count * _layer_attention(stage, kind, tokens)
    return found


def _memory_seconds(stage: StagePass) -> Real:
    """Seconds of norms, residuals and activations, of the embedding and of sampling."""
    model, bandwidth, found = stage.replica.model, stage.machine.rest.memory, stage.zeros
    for count, kind, tokens in stage.layers:
        moved = sum(
            elementwise_bytes_per_token(
                ElementwiseWork(
                    kind,
                    model.hidden_size,
                    stage.compute_bytes,
                    stage.point.tensor_parallel,
                    False,
                    stage.engine,
                )
            )
        )
        found = found + count * moved * tokens / bandwidth
    if stage.rank.first:
        found = found + 2.0 * stage.hidden_bytes(stage.rows.tokens) / bandwidth
    if stage.has_head:
        found = found + stage.engine.kernels.sampled_bytes_per_logit * _logits(stage) / bandwidth
    return found


def _logits(stage: StagePass) -> Real:
    """Logits of one token of every sequence."""
    return np.multiply(1.0, stage.rows.sequences) * stage.replica.model.vocab_size


def _communication_seconds(stage: StagePass) -> Real:
    """Seconds of collectives of layers, of the embedding and of the logits."""
    links, tensor, found = stage.machine.links, stage.point.tensor_parallel, stage.zeros
    for count, kind, tokens in stage.layers:
        found = found + count * _layer_traffic(stage, kind, tokens)
    if stage.rank.first:
        hidden = stage.hidden_bytes(stage.rows.tokens)
        found = found + links.collective("all_reduce", hidden, tensor)
    if stage.has_head:
        logits = stage.compute_bytes * _logits(stage)
        found = found + links.collective("all_gather", logits, tensor)
    return found


def _kernel_seconds(stage: StagePass) -> Real:
    """Seconds of starts and ends of kernels."""
    if stage.machine.rest.host_is_device:
        return stage.zeros
    engine = stage.engine
    counts = (
        count * (_sublayers(kind) * engine.kernels.per_layer + _more_kernels(kind, engine))
        for count, kind, _ in stage.layers
    )
    return (sum(counts, start=stage.zeros) + engine.kernels.per_step) * engine.kernels.seconds


def _host_seconds(stage: StagePass, device: Real) -> Real:
    """Seconds that the device waits for the host; none where a graph is launched."""
    rest, engine = stage.machine.rest, stage.engine
    counts = (n * _sublayers(kind) * engine.host.layer_operators for n, kind, _ in stage.layers)
    started = (sum(counts, start=stage.zeros) + engine.host.step_operators) * rest.operator
    # a pass repeats one layer's short kernels: only its end is uneven
    host = np.asarray(host_wait(started, device, rest, overlap=np.inf))
    if rest.host_is_device or not stage.replica.workload.cuda_graphs:
        return host
    rows = stage.rows
    graphed = np.less_equal(rows.tokens, engine.scheduler.graph_sequences) & rows.decode
    return np.where(graphed, 0.0, host)


def _send_seconds(stage: StagePass) -> Real:
    """Seconds of sending hidden states to the next stage."""
    if stage.rank.last:
        return stage.zeros
    point = stage.point
    distance = np.multiply(point.tensor_parallel, point.data_parallel)
    sent = stage.hidden_bytes(stage.rows.tokens)
    return stage.zeros + stage.machine.links.send(sent, distance, point.pipeline_parallel)


def _sublayers(kind: LayerKind) -> float:
    """Operators of a layer over those of one attention and one MLP."""
    return 1 + (kind.cross_attention is not None) * 0.5


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
    if is_encoder and model.is_encoder_decoder:
        return None if rows.decode else rows.encoder_tokens
    return rows.tokens


def _layer_matrices(stage: StagePass, kind: LayerKind, tokens: Real) -> Real:
    """Seconds of the matmuls of one layer."""
    machine, point, rows = stage.machine, stage.point, stage.rows
    compute = stage.compute_bytes
    stored = WEIGHT_FORMATS[stage.replica.workload.weight_precision]
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
            stream_share=stage.engine.kernels.stream_share,
        )
    return total


def _layer_attention(stage: StagePass, kind: LayerKind, tokens: Real) -> Real:
    """Seconds of attention of one layer, and of writing its cache."""
    machine, rows, workload = stage.machine, stage.rows, stage.replica.workload
    ranks, stored = stage.point.tensor_parallel, CACHE_FORMATS[workload.kv_precision]
    total: Real = np.asarray(0.0)
    if rows.decode:
        for attention in (kind.attention, kind.cross_attention):
            if attention is not None:
                total = total + decode_attention_seconds(
                    attention,
                    rows.sequences,
                    mean_keys(
                        rows.keys_before, rows.keys, attention.window, chunked=attention.chunked
                    ),
                    ranks,
                    token_bytes(attention, ranks, stored)
                    if attention.delta_rule is None
                    else state_bytes(attention, ranks, stored),
                    machine.rest,
                )
        return total
    core = CoreWork(
        kind.attention,
        np.multiply(1.0, tokens),
        rows.keys,
        ranks,
        workload.attention_kernel,
        stage.compute_bytes,
        machine.rest,
        stage.engine,
    )
    total = attention_core_seconds(core)
    # keys and values are written to the cache
    if kind.attention.causal and kind.attention.delta_rule is None:
        total = total + tokens * token_bytes(kind.attention, ranks, stored) / machine.rest.memory
    return total


def _layer_traffic(stage: StagePass, kind: LayerKind, tokens: Real) -> Real:
    """Seconds of all-reduces after attention and MLP (one if they read one input), and experts'.

    With whole experts over several replicas, tokens are sent to them and back: k hidden states
    each, which the tensor-parallel ranks send in parts.
    """
    point, machine, size = stage.point, stage.machine, stage.hidden_bytes(tokens)
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
