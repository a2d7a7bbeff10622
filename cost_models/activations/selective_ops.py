"""Results that are kept operator by operator: of matmuls, attention and collectives.

Symbols   h hidden_size   a, k query and key/value heads   d head_dim   e value_head_dim
          t tensor_parallel   n context_parallel   c compute_bytes   r adapter rank
Units     bytes a token; columns of a plan table where they differ by plan.

Norms, activations, rotary embeddings, residual sums and the scores of eager attention are computed
again. Source: the save list of torch's selective checkpointing (torch.utils.checkpoint,
create_selective_checkpoint_contexts); with ``selective_ops`` the executor adds all collectives to
it and leaves out results that nothing reads (executor/ops/recompute.py). ``ops:every-2nd-mm`` keeps
what torchtitan's policy saves: results of every other matmul without a bias, whether read or not,
of fused attention, and of sums and exchanges over ranks; of grouped matmuls none.

Leaves out: policies of one's own other than these two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cost_models.activations.operators import SINK_FEATURES
from cost_models.arrays import FP32, Real
from cost_models.communication.context_parallel import ULYSSES, exchanged_key_heads, is_blockwise
from cost_models.model.spec import Attention, LayerKind, ModelSpec
from cost_models.partition.recomputed_layers import (
    exchanges_again,
    needs_output,
    repeated_matrices,
)
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import EVERY_SECOND_MM
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile


class Results(NamedTuple):
    """Bytes a token, before any division."""

    split: Real  # over the tensor-parallel ranks
    along: Real  # along the sequence, with sequence parallelism
    whole: Real  # on every rank
    unread: Real = 0.0  # of ``along``, until the layer is done: recomputation stops in front of it


def kept_results(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile,
    table: PlanTable,
    kind: LayerKind,
) -> Results:
    """Return the results of one layer that stay until its backward pass.

    ops:every-2nd-mm   of the matrices below, those that ``repeated_matrices`` leaves out

    column-cut matrices   c (out) / t                   their adapters: c r more
    attention, fused      c a e / t + 4 a / t           0 for an eager core
    row-cut matrices      c h (/ t if sp), the sum      read again where a norm follows, or the
                          over the ranks                MLP does; ops:every-2nd-mm: always
    ulysses               c (a d + k' (d + e)) / t + c a e / t   exchanged tensors
    experts               c E router, k c (2 F / t + h), 2 k c h more where rows travel,
                          unless they are exchanged again
    """
    compute, hidden = workload.compute_bytes, float(model.hidden_size)
    tensor = 1.0 * table.tensor_parallel
    split: Real = np.zeros(len(table))
    along: Real = np.zeros(len(table))
    whole: Real = np.zeros(len(table))
    unread: Real = np.zeros(len(table))
    drops = model.hidden_dropout > 0
    attention_read = kind.norms_after or not kind.parallel_residual
    second = np.equal(table.recompute, EVERY_SECOND_MM)
    again = {weight.name for weight in repeated_matrices(kind)}
    for weight in (w for w in kind.weights if w.role == "linear"):
        features = float(weight.features[1])
        outputs = np.where(second & (weight.name in again), 0.0, features)
        if weight.sharding == "column":
            split = split + compute * outputs
        elif weight.sharding == "row" and not weight.is_adapter:
            mixed = bool(kind.feed_forward.num_experts)
            read = attention_read if weight.part == "attention" else kind.norms_after or mixed
            summed = np.where(tensor > 1.0, features, outputs)  # sums over ranks always stay
            along = along + compute * np.where(second, summed, features * read)
            if weight.part == "mlp" and not needs_output(kind, hidden_dropout=drops):
                unread = unread + compute * np.where(second, summed, 0.0)
        elif weight.is_adapter and features == hidden and weight.sharding == "replicate":
            read = attention_read if weight.part == "attention" else kind.norms_after
            along = along + np.where(tensor > 1.0, 0.0, compute * outputs * (second | read))
        elif weight.is_adapter:
            whole = whole + compute * outputs
        elif weight.part != "router":
            along = along + compute * outputs
    for attention in (kind.attention, kind.cross_attention):
        if attention is not None:
            split = split + _attention_results(attention, workload, table)
    if kind.attention.qk_norm == "all":  # sums of squares, of queries and of keys
        whole = whole + np.where(tensor > 1.0, 2.0 * max(FP32, compute), 0.0)
    # gathered inputs run again
    gathers = table.sequence_parallel & (tensor > 1.0) & ~second
    whole = whole + np.where(gathers, compute * kind.attention.rope_head_dim, 0.0)
    mixture = _mixture_results(kind, hidden, compute, software, table)
    return Results(split + mixture.split, along + mixture.along, whole + mixture.whole, unread)


def _attention_results(attention: Attention, workload: Workload, table: PlanTable) -> Real:
    if attention.delta_rule is not None:  # no matmul of its own, nor torch's fused attention
        return np.zeros(len(table))
    compute = workload.compute_bytes
    # values are padded to the width of keys, and output as wide
    width = max(attention.head_dim, attention.value_head_dim) + SINK_FEATURES * attention.sinks
    output = attention.num_heads * attention.value_head_dim
    eager = workload.attention_kernel == "eager"
    fused = 0.0 if eager else attention.num_heads * (compute * width + FP32)
    blocks = compute * output + FP32 * attention.num_heads
    keys = exchanged_key_heads(attention, table) * table.tensor_parallel
    both = attention.head_dim + attention.value_head_dim
    travelled = attention.num_heads * attention.head_dim + keys * both + output
    ulysses = (table.context_parallel > 1) & (table.context_parallel_method == ULYSSES)
    more = np.where(ulysses, compute * travelled, 0.0)
    return np.where(is_blockwise(table), blocks, fused) + more


def _mixture_results(
    kind: LayerKind, hidden: float, compute: float, software: SoftwareProfile, table: PlanTable
) -> Results:
    """Results of routed experts: router, both projections, and exchanged rows."""
    experts, zero = kind.feed_forward, np.zeros(len(table))
    if not experts.num_experts:
        return Results(zero, zero, zero)
    tensor, cut = 1.0 * table.tensor_parallel, table.expert_tensor_parallel
    inner = (2.0 if experts.gated else 1.0) * experts.ffn_hidden_size
    share = table.expert_tensor / tensor  # of the tokens that a rank routes
    grouped = np.where(table.recompute == EVERY_SECOND_MM, 0.0, 1.0)  # results of grouped matmuls
    travels = (table.expert_parallel > 1) & ~exchanges_again(software, table)
    rows = np.where(travels, 2.0, 0.0) + grouped
    rows = rows * experts.experts_per_token * hidden
    whole = compute * share * (rows + grouped * experts.num_experts)
    parallel = tensor > 1.0
    gathered = parallel & np.where(cut, table.sequence_parallel, ~table.sequence_parallel)
    gathered = gathered & (grouped > 0.0)
    whole = whole + np.where(gathered, compute * hidden, 0.0)
    along = np.where(parallel & cut, compute * hidden, 0.0)
    return Results(grouped * compute * experts.experts_per_token * inner, along, whole)
