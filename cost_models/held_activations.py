"""Activations that a pipeline rank holds: its layers in flight, the head, the messages.

Units: bytes. Columns of a plan table whose rows share pipeline_parallel and virtual_stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cost_models.activations import (
    FULL,
    NONE,
    SELECTIVE,
    Regions,
    backward_working_bytes_per_token,
    layer_regions,
    logits_bytes_per_token,
    needs_window_mask,
    norm_bytes,
    saved_bytes_per_token,
)
from cost_models.arrays import Count, Real
from cost_models.model import LayerKind, ModelSpec
from cost_models.plan import SCHEDULES, PlanTable
from cost_models.stages import (
    PipelineRank,
    in_flight_1f1b,
    in_flight_gpipe,
    in_flight_interleaved,
)
from cost_models.workload import COMPUTE_BYTES, Workload
from hardware_profiles.software import SoftwareProfile

TOKEN_ID_BYTES: Final = 8.0  # int64 inputs and labels
GPIPE, ONE_F_ONE_B = SCHEDULES.index("gpipe"), SCHEDULES.index("1f1b")


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of activations of one pipeline rank."""

    in_flight: Real  # micro-batches, counted by the rank's layers
    saved: Real  # by layers and head of all micro-batches in flight, logits of finished heads too
    saved_later: Real  # one micro-batch less
    working: Real  # one layer on its way backward: gradients, and what is recomputed
    last_layer: Real  # the same, and what that layer saved: all that is left at the end
    logits_forward: Real  # of the micro-batch that is at the loss
    logits_backward: Real
    logits_later: Real  # at the loss of the next one, where the first's layers are already gone
    messages: Real  # between stages


def in_flight_stages(table: PlanTable, rank: int) -> Real:
    """Stage inputs whose activations a rank holds at its peak, in stages (1/v of its layers)."""
    microbatches, pipeline = table.num_microbatches, table.pipeline_parallel
    gpipe = in_flight_gpipe(microbatches) * table.virtual_stages
    one = in_flight_1f1b(microbatches, pipeline, rank)
    interleaved = in_flight_interleaved(microbatches, pipeline, table.virtual_stages, rank)
    # without a pipeline a micro-batch is walked back before the next one starts
    by_schedule = np.select(
        [
            table.pipeline_schedule == SCHEDULES.index("gpipe"),
            table.pipeline_schedule == SCHEDULES.index("1f1b"),
        ],
        [gpipe, one],
        interleaved,
    )
    return np.where(pipeline > 1, by_schedule, 1.0 * table.virtual_stages)


def held_activations(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    rank: PipelineRank,
) -> Held:
    """Return what a pipeline rank holds while it is fullest; sources: ``activations``."""
    tokens = 1.0 * workload.seq_len * table.micro_batch_size
    in_flight = in_flight_stages(table, rank.index) / table.virtual_stages
    layers, working, last_layer = _layers(model, workload, software, table, rank)
    ids = 2.0 * TOKEN_ID_BYTES
    tail, kept, forward, backward = _head(model, workload, software, table, rank)
    # at the head of a pipeline that runs all forward passes first, every micro-batch waits
    waiting = np.where(
        (table.pipeline_schedule == GPIPE) & (table.pipeline_parallel > 1), in_flight, 1.0
    )
    tables = _rotary_tables(model, workload) * in_flight * table.virtual_stages
    tables = tables + _window_masks(model, workload, software)
    saved = layers * in_flight + (tail + ids) * waiting + kept * (waiting - 1.0)
    one_less = np.maximum(in_flight - 1.0, 0.0)
    saved_later = layers * one_less + (tail + ids + kept) * np.maximum(waiting - 1.0, 0.0)
    return Held(
        in_flight=in_flight,
        saved=saved * tokens + tables,
        saved_later=saved_later * tokens + tables,
        working=working * tokens,
        last_layer=last_layer * tokens,
        logits_forward=forward * tokens,
        logits_backward=backward * tokens,
        logits_later=np.where(waiting > 1.0, (backward - kept) * tokens, 0.0),
        messages=_messages(model, workload, table, rank, in_flight) * tokens,
    )


def _rotary_tables(model: ModelSpec, workload: Workload) -> float:
    """Bytes of cosine and sine that each stage keeps for a micro-batch: 2 c s d a table."""
    attentions = [kind.attention for kind in model.kinds if kind.attention.rotary]
    if not attentions:
        return 0.0
    width = attentions[0].rope_head_dim or attentions[0].rotary_dim or attentions[0].head_dim
    tables = len({attention.rotary_table for attention in attentions})
    return 2.0 * COMPUTE_BYTES[workload.precision] * workload.seq_len * width * tables


def _window_masks(model: ModelSpec, workload: Workload, software: SoftwareProfile) -> float:
    """Bytes of the masks that all layers and micro-batches share: c s^2 for every window."""
    if workload.attention_kernel != "flash":
        return 0.0
    attentions = [kind.attention for kind in model.kinds]
    windows = {a.window for a in attentions if needs_window_mask(a, workload.seq_len, software)}
    return COMPUTE_BYTES[workload.precision] * float(workload.seq_len) ** 2 * len(windows)


def _layers(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    rank: PipelineRank,
) -> tuple[Real, Real, Real]:
    """Return bytes a token: saved by a rank's layers, added by one going backward, by it alone."""
    compute = COMPUTE_BYTES[workload.precision]
    saved: Real = np.zeros(len(table))
    working: Real = np.zeros(len(table))
    alone: Real = np.zeros(len(table))
    for count, kind in zip(rank.kind_counts, model.kinds, strict=True):
        if not count:
            continue
        regions = _regions(model, workload, software, kind)
        saved = saved + count * _saved(model, compute, software, table, regions, table.recompute)
        whole = _saved(model, compute, software, table, regions, NONE)
        if kind.norms_after:  # walked before the MLP is
            along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
            whole = whole - norm_bytes(kind, model.hidden_size, compute, software) / along
        walk = backward_working_bytes_per_token(
            kind, model.hidden_size, compute, table.tensor_parallel
        )
        # what was dropped is there again while its layer is walked backward
        kept = _saved(model, compute, software, table, regions, SELECTIVE)
        dropped = np.where(table.recompute == SELECTIVE, whole - kept, 0.0)
        again = np.where(table.recompute == FULL, whole, dropped)
        working = np.maximum(working, again + walk)
        alone = np.maximum(alone, whole + walk)
    return saved, working, alone


def _regions(
    model: ModelSpec, workload: Workload, software: SoftwareProfile, kind: LayerKind
) -> Regions:
    return layer_regions(
        kind,
        model.hidden_size,
        workload.seq_len,
        compute_bytes=COMPUTE_BYTES[workload.precision],
        kernel=workload.attention_kernel,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        software=software,
    )


def _saved(
    model: ModelSpec,
    compute_bytes: float,
    software: SoftwareProfile,
    table: PlanTable,
    regions: Regions,
    recompute: Count,
) -> Real:
    return saved_bytes_per_token(
        regions,
        model.hidden_size,
        compute_bytes=compute_bytes,
        tensor_parallel=table.tensor_parallel,
        sequence_parallel=table.sequence_parallel,
        recompute=recompute,
        keeps_gathered_inputs=software.keeps_gathered_inputs,
    )


def _head(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    rank: PipelineRank,
) -> tuple[Real, Real, Real, Real]:
    """Return bytes a token: saved by norm and projection; logits kept, at the loss, and back."""
    zeros: Real = np.zeros(len(table))
    if not rank.last:
        return zeros, zeros, zeros, zeros
    compute = COMPUTE_BYTES[workload.precision]
    kind = model.kinds[model.pattern[-1]]
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    inputs_over = 1.0 if software.keeps_gathered_inputs else along
    tail = norm_bytes(kind, model.hidden_size, compute, software) / along
    tail = tail + compute * model.hidden_size / inputs_over
    logits = logits_bytes_per_token(model.vocab_size, compute, table.tensor_parallel, software)
    return zeros + tail, zeros + logits.kept, zeros + logits.forward, zeros + logits.backward


def _messages(
    model: ModelSpec, workload: Workload, table: PlanTable, rank: PipelineRank, in_flight: Real
) -> Real:
    """Bytes a token of messages between stages: c h (/ t with sequence parallelism) each.

    A received input lives until its backward pass; where the first layer saves its input itself
    (layer norm, fp32, full recomputation) that is the same tensor. Beside them one output and one
    gradient are on their way.
    """
    compute = COMPUTE_BYTES[workload.precision]
    along = np.where(table.sequence_parallel, 1.0 * table.tensor_parallel, 1.0)
    one = compute * model.hidden_size / along
    kind = model.kinds[model.pattern[0]]
    saves_itself = kind.norm == "layer" or (compute >= 4.0 and kind.norm != "layer_in_fp32")
    if kind.norms_after and kind.num_norms == 2:  # no norm before: the matrices save it
        saves_itself = True
    apart = np.where((table.recompute == FULL) | saves_itself, 0.0, 1.0)
    received = float(not rank.first) * apart * in_flight * table.virtual_stages
    return np.where(table.pipeline_parallel > 1, (received + 2.0) * one, 0.0)
