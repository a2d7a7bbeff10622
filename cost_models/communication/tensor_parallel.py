"""Collectives of one layer over the tensor-parallel ranks: gathered inputs and summed outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.communication.traffic import Traffic
from cost_models.model.spec import LayerKind, ModelSpec
from cost_models.partition.recomputed_layers import needs_output
from cost_models.plan.plan import PlanTable


@dataclass(frozen=True, slots=True)
class LayerCollectives:
    """Collectives of a layer's forward pass over tensor-parallel ranks, in features of a token."""

    column_inputs: Traffic  # inputs of column-parallel matrices
    kept_inputs: Traffic  # inputs that are gathered and saved
    row_sums: Traffic  # outputs summed over the ranks
    recomputed_row_sums: Traffic  # those that recomputation repeats
    token_splits: Traffic  # outputs that each rank computes for its tokens only

    @property
    def inputs(self) -> Traffic:
        """All gathered inputs."""
        return self.column_inputs + self.kept_inputs


def layer_collectives(
    model: ModelSpec, kind: LayerKind, table: PlanTable, *, by_matrix: bool = False
) -> LayerCollectives:
    """Return the collectives of one layer; columns of the table's length.

    ``by_matrix``: one gather for each column-parallel matrix, not for each shared input.
    """
    hidden, attention, mlp = float(model.hidden_size), kind.attention, kind.feed_forward
    zero = np.zeros(len(table))
    one = Traffic(1.0 + zero, hidden + zero)
    rows, wholes = one, one.times(zero)
    columns = one.times(_column_matrices(kind, "attention") if by_matrix else 1.0)
    if attention.kv_lora_rank:
        latents = (attention.q_lora_rank or hidden) + attention.kv_lora_rank
        columns = Traffic(2.0 + zero, latents + zero)
        wholes = Traffic(1.0 + zero, attention.rope_head_dim + zero)
    dense = float(kind.cross_attention is not None)
    dense += float(not mlp.num_experts or mlp.shared_ffn_hidden_size > 0)
    each = _column_matrices(kind, "mlp", "shared_experts") if by_matrix else dense
    columns, rows = columns + one.times(each), rows + one.times(dense)
    experts = float(mlp.num_experts > 0)
    cut = experts * np.where(table.expert_tensor_parallel, 1.0, 0.0)
    rows = rows + one.times(cut)
    needs_last = needs_output(kind, hidden_dropout=model.hidden_dropout > 0)
    left_out = 0.0 if needs_last else np.where(experts > 0, cut, 1.0)
    return LayerCollectives(
        column_inputs=columns,
        kept_inputs=wholes + one.times(cut),
        row_sums=rows,
        recomputed_row_sums=rows + one.times(-1.0 * left_out),
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
