"""Activations outside the layers: embedding, head, and tables and masks shared by layers.

Symbols   c compute_bytes   h hidden_size   s seq_len   d head_dim   t tensor_parallel
Units     bytes a token of one micro-batch, unless a name says otherwise.

Source: tensors that autograd saves of the real modules of every family (``python -m
benchmarks.memory_truth``). Leaves out: token ids, and buffers that a forward pass frees.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.activations.frozen_layers import normalised_bytes
from cost_models.activations.layer_backward import norm_working_bytes
from cost_models.activations.logits import logits_bytes_per_token
from cost_models.activations.operators import activation_copies, needs_window_mask, norm_bytes
from cost_models.arrays import Real, holds
from cost_models.model.lora import embedding_is_frozen, projection_is_frozen
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.partition.rank_view import RankView
from cost_models.plan.recompute import FULL, repeats_module, repeats_modules
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import SoftwareProfile

# families whose code passed logits to the cross-entropy as they were (transformers 4.30,
# models/*/modeling_*.py, forward of the causal language model)
LOSS_IN_16_BITS: Final = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "opt"}
)


def embedding_bytes_per_token(view: RankView) -> Real:
    """Saved tensors of the embedding (first stage) and of dropout between encoder and decoder.

        mask h / (t if sp)    dropout: of the embedding, and of a decoder's and its encoder's output
        norm / (t if sp)      of the embedding (BERT, BLOOM)
        c in / (t if sp)      the input of its projection (OPT)

    A frozen embedding saves none of these. The result is then negative: the first trained layer's
    norm needs no gradient of its input, so it saves only the tensors that its weight needs.
    Source: Korthikanti et al. (arXiv:2205.05198), sec. 4.3: s b h of the embedding's dropout.
    """
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    along = view.sequence_shards
    kind, compute = model.kinds[model.pattern[0]], workload.compute_bytes
    if embedding_is_frozen(model):
        # the first norm's input needs no gradient; a recomputed norm saves nothing
        trained = [model.kinds[i] for i in model.pattern if not model.kinds[i].forward_only]
        kind = trained[0] if trained else kind
        opens = not (kind.norms_after and kind.num_norms == 2)  # with a norm: not BERT, OLMo 2
        # a layer norm that is trained needs its input for its weight too
        needed = kind.norm == "layer" and any(
            w.part == "norm" and not w.frozen for w in kind.weights
        )
        counts = opens and not needed and bool(trained)
        keeps = (table.recompute < FULL) | repeats_modules(table.recompute)
        keeps = keeps & ~repeats_module(table.recompute, "layernorm")
        saved = np.where(keeps, counts * (1.0 * rank.first), 0.0)
        return 0.0 - saved * _frozen_norm_bytes(model, kind, compute, software) / along
    dropped = (
        software.activations.dropout_mask_bytes * model.hidden_size * (model.embedding_dropout > 0)
    )
    norms = len(_norms(model.embedding)) * norm_bytes(kind, model.hidden_size, compute, software)
    inputs = compute * sum(w.shape[-1] for w in _matrices(model.embedding))
    between = (1.0 + model.target_share) * dropped if rank.bridge else 0.0
    found: Real = (rank.first * (dropped + norms + inputs) + between) / along
    return found


def head_bytes_per_token(view: RankView) -> tuple[Real, Real, Real, Real]:
    """Saved tensors of norm and projection; logits kept, at the loss, and in its backward pass.

    norm + c h            of the last norm and of the output projection, as far as trained
    c h (1 + activation)  a dense layer before the norm, and its activation (BERT)
    c h                   a projection behind the norm (OPT)
    mask h                dropout behind the last norm (T5)
    """
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    zeros: Real = np.zeros(len(table))
    if not holds(rank.last):
        return zeros, zeros, zeros, zeros
    compute = workload.compute_bytes
    kind = model.kinds[model.pattern[-1]]
    along = view.sequence_shards
    inputs_over = 1.0 if software.activations.keeps_gathered_inputs else along
    matrices, norms = _matrices(model.head), _norms(model.head)
    frozen = projection_is_frozen(model)
    saved = norm_bytes(kind, model.hidden_size, compute, software)
    passing = _frozen_norm_bytes(model, kind, compute, software)
    if all(w.frozen for w in norms):
        saved = passing
    if kind.norm != "layer" and all(model.kinds[i].forward_only for i in model.pattern):
        saved -= passing  # no layer below needs a gradient
    saved *= len(norms)
    for matrix in matrices:
        saved += compute * matrix.shape[-1]
        if norms and model.head.index(matrix) < model.head.index(norms[0]):
            copies = activation_copies(kind.feed_forward, software)
            saved += compute * copies * model.hidden_size
    if model.bridge and model.embedding_dropout:
        saved += software.activations.dropout_mask_bytes * model.hidden_size
    width = matrices[-1].shape[0] if matrices else model.hidden_size
    # only the functions of tensor parallelism save the input of a frozen projection
    reads = np.where(np.logical_or(not frozen, table.tensor_parallel > 1), 1.0, 0.0)
    total = saved / along + reads * compute * width / inputs_over
    logits = logits_bytes_per_token(
        model.vocab_size,
        compute,
        table.tensor_parallel,
        software,
        view.tokens,
        upcasts=not loss_in_compute_precision(view),
        caps=model.caps_logits,
    )
    here = zeros + rank.last
    return here * total, here * logits.kept, here * logits.forward, here * logits.backward


def loss_in_compute_precision(view: RankView) -> bool:
    """Whether a model's own code passes logits to the cross-entropy as they are."""
    software = view.software
    in_16_bits = software.loss.by_family and view.model.family in LOSS_IN_16_BITS
    return in_16_bits and not software.precision.autocasts_weights


def _frozen_norm_bytes(
    model: ModelSpec, kind: LayerKind, compute: float, software: SoftwareProfile
) -> float:
    whole = norm_bytes(kind, model.hidden_size, compute, software)
    return whole - normalised_bytes(kind, model.hidden_size, compute, software)


def _norms(weights: tuple[Weight, ...]) -> list[Weight]:
    return [w for w in weights if w.part == "norm" and w.name.endswith(".weight")]


def _matrices(weights: tuple[Weight, ...]) -> list[Weight]:
    """Return the replicated matrices; those of the vocabulary are sharded."""
    return [w for w in weights if w.role == "linear" and w.sharding == "replicate"]


def head_backward_bytes_per_token(view: RankView) -> Real:
    """Bytes of the projection's backward pass: the gradient of its input, c h.

    With sequence parallelism also that input, gathered: c h more.
    """
    model, workload, table = view.model, view.workload, view.table
    rank = view.rank
    whole = workload.compute_bytes * model.hidden_size * (1.0 * rank.last)
    return whole * np.where(table.sequence_parallel, 2.0, 1.0)


def head_norm_bytes_per_token(view: RankView) -> Real:
    """Bytes a token of the norm before the head, saved and in its backward pass."""
    model, workload, software = view.model, view.workload, view.software
    rank = view.rank
    along = view.sequence_shards
    kind = model.kinds[model.pattern[-1]]
    compute = workload.compute_bytes
    saved = norm_bytes(kind, model.hidden_size, compute, software)
    working = norm_working_bytes(kind, model.hidden_size, compute, software)
    residual = compute * model.hidden_size  # no residual connection around the last norm
    return rank.last * (saved + working - residual) / along


def head_gradient_bytes_per_token(view: RankView) -> Real:
    """Bytes a token of the gradient of the head's input: c h."""
    model, workload, rank = view.model, view.workload, view.rank
    along = view.sequence_shards
    trained = any(not model.kinds[i].forward_only for i in model.pattern)
    return workload.compute_bytes * model.hidden_size * (1.0 * rank.last * trained) / along


def rotary_table_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of the tables of cosines and sines of a stage and micro-batch: 2 c s d a table."""
    attentions = [kind.attention for kind in model.kinds if kind.attention.rotary]
    if not attentions:
        return 0.0
    width = attentions[0].rope_head_dim or attentions[0].rotary_dim or attentions[0].head_dim
    tables = len({attention.rotary_table for attention in attentions})
    return 2.0 * workload.compute_bytes * workload.seq_len * width * tables


def window_mask_bytes(model: ModelSpec, workload: Workload, software: SoftwareProfile) -> float:
    """Bytes of attention masks that all layers and micro-batches share, one for every window.

    c s^2 of a flash kernel; s^2 of eager attention that is causal.
    """
    attentions = [kind.attention for kind in model.kinds if kind.attention.delta_rule is None]
    if workload.document_mask or model.bridge:
        return 0.0
    if workload.attention_kernel == "eager":
        hidden = {min(a.window or np.inf, workload.seq_len) for a in attentions if a.causal}
        return float(workload.seq_len) ** 2 * len(hidden) * software.activations.window_needs_mask
    windows = {a.window for a in attentions if needs_window_mask(a, workload.seq_len, software)}
    return workload.compute_bytes * float(workload.seq_len) ** 2 * len(windows)
