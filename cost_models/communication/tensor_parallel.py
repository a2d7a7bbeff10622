"""Traffic over the tensor-parallel ranks: gathered inputs and summed outputs.

Symbols: as in ``volumes``. Units: features a token inside, bytes in ``tensor_traffic``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from cost_models.arrays import FP32, Real, holds
from cost_models.communication.traffic import EXECUTOR_OPTIONS, Traffic, TrafficOptions, no_traffic
from cost_models.model.lora import embedding_is_frozen, projection_is_frozen
from cost_models.model.spec import LayerKind
from cost_models.partition.rank_view import RankView
from cost_models.partition.recomputed_layers import needs_output
from cost_models.plan.recompute import EVERY_SECOND_MM, FULL, repeats_module


class LayerCollectives(Struct, frozen=True):
    """Collectives of a layer's forward pass over tensor-parallel ranks, in features of a token."""

    column_inputs: Traffic  # inputs of column-parallel matrices
    kept_inputs: Traffic  # inputs that are gathered and saved
    row_sums: Traffic  # outputs summed over the ranks
    inputs_again: Traffic  # of ``inputs``, those that recomputation repeats
    row_sums_again: Traffic  # of ``row_sums``, the same
    token_splits: Traffic  # outputs that each rank computes for its tokens only

    @property
    def inputs(self) -> Traffic:
        """All gathered inputs."""
        return self.column_inputs + self.kept_inputs


class _Layers(NamedTuple):
    """The layers of one kind on a rank: their collectives, and passes of each micro-batch."""

    kind: LayerKind
    collectives: LayerCollectives
    forward: int
    backward: int
    again: Real  # recomputed


def tensor_traffic(
    view: RankView, *, options: TrafficOptions = EXECUTOR_OPTIONS
) -> dict[tuple[str, str], Traffic]:
    """Hidden states over the tensor-parallel ranks, c b s h each; per micro-batch:

                            without sequence parallelism     with it
        column-cut matrices all_reduce backward              all_gather forward;
                                                             backward all_gather, reduce_scatter
        row-cut matrix      all_reduce forward               reduce_scatter forward, all_gather back
        experts cut         both of the above, but for the second gathering of their input
        experts whole       all_gather forward, backward     nothing
        full recomputation  the forward collectives again, of the layers that are recomputed
        embedding           all_reduce forward               reduce_scatter forward, all_gather back
        head                all_reduce backward              all_gather forward;
                                                             backward all_gather, reduce_scatter
        encoder's output    all_reduce backward              all_gather forward, reduce_scatter
                            of each stage whose layers read it   back
        loss                all_reduce x b s and 2 x b s     the same
                            (``gathers_logits``: all_gather c b s V instead, both)
        norms over all      all_reduce 2 x b s forward,      the same
        heads (OLMo 2)      backward, recomputed

    A layer has a column-parallel and a row-parallel step for each attention, MLP and shared expert;
    latent attention has two column-parallel steps, as wide as its latents, and one more gathered
    input: the keys with positions. The backward pass gathers the input of a column-parallel matrix
    again, or has saved it (``options``). Recomputation stops at the last tensor that is needed: it
    skips the layer's last collective, unless a norm or a dropout follows it. A module that is
    computed again repeats its own forward collectives, without a last sum; ``ops:every-2nd-mm``
    gathers inputs again. Forward-only (frozen) layers have the forward part alone. If a layer casts
    before it gathers (fp8), elements of the embedding's and the head's collectives still have c
    bytes.

    Source: Shoeybi et al. (arXiv:1909.08053), fig. 4; Korthikanti et al. (arXiv:2205.05198), sec.
    4.2.2; the loss: Shoeybi et al., sec. 3. Leaves out: gradients summed once a step
    (``shared_gradient_traffic``).
    """  # noqa: D400
    table, rank = view.table, view.rank
    if not holds(table.tensor_parallel > 1):
        kinds = "all_reduce", "all_gather", "reduce_scatter"
        return {("tensor", kind): no_traffic(len(table)) for kind in kinds}
    layers = [
        _Layers(
            one.kind,
            _layer_collectives(view, one.kind, by_matrix=options.gathers_per_matrix),
            one.count,
            one.trained,
            one.run_again,
        )
        for one in view.layers
    ]
    m, along = 1.0 * table.num_microbatches, np.where(table.sequence_parallel, 1.0, 0.0)
    active = np.where(table.tensor_parallel > 1, 1.0, 0.0)

    def moved(features: Traffic, repeats: Real) -> Traffic:
        """Convert features a token to bytes a step."""
        size = features.size * view.compute_bytes * view.tokens
        return Traffic(features.count, size).times(m * repeats * active)

    statistics = _loss_statistics(view, options) + _norm_statistics(view, layers)
    sums = _summed_outputs(view, layers)
    gathers = _gathered_inputs(view, layers, options)
    splits = _total(
        view, (x.collectives.token_splits.times(x.forward + x.backward) for x in layers)
    )
    logits = 1.0 * rank.last * options.gathers_logits * np.ones(len(table))
    return {
        ("tensor", "all_reduce"): statistics.times(active) + moved(sums, 1.0 - along),
        ("tensor", "all_gather"): moved(gathers, along)
        + moved(splits, 1.0 - along)
        + moved(Traffic(logits, logits * view.model.target_share * view.model.vocab_size), 1.0),
        ("tensor", "reduce_scatter"): moved(sums, along),
    }


def _total(view: RankView, terms: Iterable[Traffic]) -> Traffic:
    return sum(terms, start=no_traffic(len(view.table)))


def _hidden_states(view: RankView, of_inputs: Real, of_targets: Real = 0.0) -> Traffic:
    """So many hidden states of the inputs, and of a decoder's targets."""
    ones = np.ones(len(view.table))
    tokens = of_inputs + view.model.target_share * of_targets
    return Traffic((of_inputs + of_targets) * ones, view.model.hidden_size * ones * tokens)


def _summed_outputs(view: RankView, layers: Sequence[_Layers]) -> Traffic:
    """Outputs and gradients of inputs that are summed over the ranks."""
    forward = _total(view, (x.collectives.row_sums.times(x.forward) for x in layers))
    backward = _total(view, (x.collectives.inputs.times(x.backward) for x in layers))
    again = _total(view, (x.collectives.row_sums_again.times(x.again) for x in layers))
    rank = view.rank
    of_inputs = rank.decoder_stages + 1.0 * rank.first
    of_targets = float(bool(rank.bridge)) + 1.0 * rank.last
    return forward + backward + again + _hidden_states(view, of_inputs, of_targets)


def _gathered_inputs(view: RankView, layers: Sequence[_Layers], options: TrafficOptions) -> Traffic:
    """Gathered inputs and gradients of outputs, in the precision of c bytes."""
    forward = _total(view, (x.collectives.inputs.times(x.forward) for x in layers))
    forward += _total(view, (x.collectives.inputs_again.times(x.again) for x in layers))
    backward = _total(view, (x.collectives.row_sums.times(x.backward) for x in layers))
    found = forward + backward + _hidden_states(view, view.rank.decoder_stages)
    if options.regathers_inputs:
        found += _inputs_of_weight_gradients(view, layers)
    share = (options.gather_bytes or view.compute_bytes) / view.compute_bytes
    return Traffic(found.count, share * found.size) + _gathered_outside(view, options)


def _inputs_of_weight_gradients(view: RankView, layers: Sequence[_Layers]) -> Traffic:
    """Inputs of column-parallel matrices that the backward pass gathers again."""
    every = _total(view, (x.collectives.column_inputs.times(x.backward) for x in layers))
    unread = [0.0, 0.0]  # of inputs, and of a decoder's targets
    for x in layers:
        unread[x.kind.cross_attention is not None] -= x.backward * frozen_column_inputs(x.kind)
    return every + _hidden_states(view, *unread)


def _gathered_outside(view: RankView, options: TrafficOptions) -> Traffic:
    """Gradients of looked-up embeddings, and inputs of the head.

    A frozen embedding needs no gradient, a frozen projection does not need its input again.
    """
    trains = 0.0 if embedding_is_frozen(view.model) else 1.0
    twice = options.regathers_inputs and not projection_is_frozen(view.model)
    heads = 1.0 * view.rank.last * (2.0 if twice else 1.0)
    return _hidden_states(view, trains * view.rank.first, trains * bool(view.rank.bridge) + heads)


def _loss_statistics(view: RankView, options: TrafficOptions) -> Traffic:
    """Bytes a step of the maximum, the sum and the target's logit of each token."""
    m = 1.0 * view.table.num_microbatches
    numbers = 1.0 * view.rank.last * (not options.gathers_logits)
    wide = max(FP32, view.compute_bytes)
    return Traffic(2.0 * m * numbers, 3.0 * wide * view.at_head.tokens * m * numbers)


def _norm_statistics(view: RankView, layers: Sequence[_Layers]) -> Traffic:
    """Bytes a step of the norms over all query and key heads: two sums of each token."""
    full = np.where(view.table.recompute == FULL, 1.0, 0.0)
    norms = sum(
        x.forward + x.backward + full * x.again for x in layers if x.kind.attention.qk_norm == "all"
    )
    count = view.table.num_microbatches * norms
    return Traffic(count, count * 2.0 * max(FP32, view.compute_bytes) * view.tokens)


def _layer_collectives(view: RankView, kind: LayerKind, *, by_matrix: bool) -> LayerCollectives:
    """Return the collectives of one layer; columns of the table's length.

    ``by_matrix``: one gather for each column-parallel matrix, not for each shared input.
    """
    model, table = view.model, view.table
    hidden, attention, mlp = kind.token_share * model.hidden_size, kind.attention, kind.feed_forward

    def again(*modules: str) -> Real:
        found = reduce(or_, (repeats_module(table.recompute, module) for module in modules))
        return np.where(found, 1.0, 0.0)

    zero = np.zeros(len(table))
    one = Traffic(1.0 + zero, hidden + zero)
    rows, wholes = one, one.times(zero)
    columns = one.times(_column_matrices(kind, "attention") if by_matrix else 1.0)
    if attention.kv_lora_rank:
        latents = (attention.q_lora_rank or hidden) + attention.kv_lora_rank
        columns = Traffic(2.0 + zero, latents + zero)
        wholes = Traffic(1.0 + zero, attention.rope_head_dim + zero)
        attended = (columns + wholes).times(again("mla_up_proj"))
    else:
        attended = columns.times(again("attn"))
    dense = float(kind.cross_attention is not None)
    dense += float(not mlp.num_experts or mlp.shared_ffn_hidden_size > 0)
    each = _column_matrices(kind, "mlp", "shared_experts") if by_matrix else dense
    columns, rows = columns + one.times(each), rows + one.times(dense)
    experts = float(mlp.num_experts > 0)
    cut = experts * np.where(table.expert_tensor_parallel, 1.0, 0.0)
    rows, inputs = rows + one.times(cut), columns + wholes + one.times(cut)
    needs_last = needs_output(kind, hidden_dropout=model.hidden_dropout > 0)
    left_out = 0.0 if needs_last else np.where(experts > 0, cut, 1.0)
    full = np.where(table.recompute == FULL, 1.0, 0.0)
    gathers = np.where((table.recompute == FULL) | (table.recompute == EVERY_SECOND_MM), 1.0, 0.0)
    # of a mixture the sum of the routed experts comes last, of a module by itself its only one
    block = again("moe") if experts else again("mlp")
    shared = again("moe", "shared_experts") * experts * each
    return LayerCollectives(
        column_inputs=columns,
        kept_inputs=wholes + one.times(cut),
        row_sums=rows,
        inputs_again=inputs.times(gathers)
        + attended
        + one.times(shared if experts else block * each)
        + one.times(block * cut),
        row_sums_again=rows.times(full)
        + one.times(-1.0 * left_out * full)
        + one.times(again("moe") * experts * dense + again("attn")),
        token_splits=one.times(experts - cut),
    )


def _column_matrices(kind: LayerKind, *parts: str) -> float:
    """Return the number of column-parallel matrices of these parts in a layer, without adapters."""
    return float(
        sum(
            w.part in parts and w.role == "linear" and w.sharding == "column" and not w.is_adapter
            for w in kind.weights
        )
    )


def frozen_column_inputs(kind: LayerKind) -> int:
    """Number of column-parallel inputs that no weight gradient needs: frozen and not adapted."""
    found = 0
    for part in ("attention", "mlp", "shared_experts"):
        weights = [w for w in kind.weights if w.part == part and w.role == "linear"]
        found += bool(weights) and all(w.frozen for w in weights)
    return found
