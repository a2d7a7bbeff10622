"""Activations outside the layers of encoder-decoder models: encoder output, position biases.

Symbols  c compute_bytes   h hidden_size   a num_heads   t tensor_parallel   b micro_batch_size
         s seq_len of the layer's own sequences; an encoder's, where a function has no layer
         r tokens of the targets over those of the inputs
Units    bytes a token of one micro-batch.

Source: tensors that autograd saves of transformers' T5 (``python -m benchmarks.memory_truth``).
Leaves out: packed sequences, and encoders that are not T5's.
"""

from __future__ import annotations

import numpy as np

from cost_models.activations.operators import norm_bytes
from cost_models.arrays import Real
from cost_models.model.spec import LayerKind
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import NONE
from cost_models.plan.workload import Workload


def shared_bytes_per_token(view: RankView) -> Real:
    """Bytes a token that layers of a rank's stages share.

        the norm behind the encoder, and c h / (t if sp)    where the decoder begins
        c h                                                 with sp, a stage that reads the
                                                            encoder's output: gathered
        c a s / t                                           position bias of an encoder's scores
        r^2 c a s / t / b                                   of a decoder's

    Without sequence parallelism a stage reads the encoder's output as it was received. The
    decoder's bias is one table for all sequences, the encoder's one for each sequence, since it
    includes the padding mask. Eager attention saves neither, unless it is recomputed.
    """
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    if not model.bridge:
        return np.zeros(len(table))
    compute = workload.compute_bytes
    kind = model.kinds[model.pattern[0]]
    along = view.sequence_shards
    norm = norm_bytes(kind, model.hidden_size, compute, software) + compute * model.hidden_size
    gathered = np.where(table.sequence_parallel, compute * model.hidden_size, 0.0)
    keeps = (workload.attention_kernel != "eager") | (table.recompute != NONE)
    of_decoder = model.target_share**2 * rank.decoder_stages / table.micro_batch_size
    tables = rank.position_tables - rank.decoder_stages + of_decoder
    scores = np.where(keeps, tables, 0.0) * _scores(kind, workload, table)
    bridge = float(bool(rank.bridge)) * norm / along
    shared: Real = bridge + rank.decoder_stages * gathered + scores
    return shared


def position_bias_backward_bytes_per_token(
    kind: LayerKind,
    hidden_size: int,
    workload: Workload,
    table: PlanTable,
    working: Real,
    freed: float,
) -> Real:
    """Working memory of one layer's backward pass, with the gradient of trained position biases.

        working + c a s / t                          the MLP, and the gradient of the bias
        (2 eager, 1 flash) c a s / t + that + 3 c h  the attention: gradients of weights and scores

    ``working``: of the backward pass without biases; ``freed``: bytes a token that the MLP saved,
    freed before the attention's backward pass.
    """
    if not kind.trains_position_bias:
        return working
    scores = _scores(kind, workload, table)
    own = 2.0 if workload.attention_kernel == "eager" else 1.0
    attention = (1.0 + own) * scores + 3.0 * workload.compute_bytes * hidden_size
    return np.maximum(working + scores, attention - freed / table.tensor_parallel)


def positions_gradient_bytes(kind: LayerKind, workload: Workload, table: PlanTable) -> Real:
    """Bytes a token of the gradient of a stack's position bias, once one layer has added its own.

    c a s / t in an encoder, whose bias differs by sequence; a decoder's is one for all: / b.
    """
    if not kind.trains_position_bias:
        return np.zeros(len(table))
    sequences = 1.0 if kind.cross_attention is None else 1.0 * table.micro_batch_size
    return _scores(kind, workload, table) / sequences


def _scores(kind: LayerKind, workload: Workload, table: PlanTable) -> Real:
    heads = workload.compute_bytes * kind.attention.num_heads / table.tensor_parallel
    return heads * workload.seq_len
