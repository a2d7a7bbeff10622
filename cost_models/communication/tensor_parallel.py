"""Steps of one layer over the tensor-parallel ranks: what goes in, what is added up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.communication.traffic import Traffic
from cost_models.model.spec import LayerKind, ModelSpec
from cost_models.partition.recomputed_layers import needs_output
from cost_models.plan.plan import PlanTable


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """A layer's forward pass over the tensor-parallel ranks; sizes: features of a token."""

    columns: Traffic  # inputs of column-cut matrices
    wholes: Traffic  # inputs that are gathered and kept
    rows: Traffic  # sums over the ranks
    rows_again: Traffic  # of these, what recomputation repeats
    splits: Traffic  # outputs of which each rank computed its tokens only

    @property
    def inputs(self) -> Traffic:
        """All inputs that are gathered."""
        return self.columns + self.wholes


def layer_steps(
    model: ModelSpec, kind: LayerKind, table: PlanTable, *, by_matrix: bool = False
) -> LayerSteps:
    """Return the steps of one layer; columns of the table's length.

    ``by_matrix``: a column-cut step for each matrix, not for those that read the same.
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
    return LayerSteps(
        columns=columns,
        wholes=wholes + one.times(cut),
        rows=rows,
        rows_again=rows + one.times(-1.0 * left_out),
        splits=one.times(experts - cut),
    )


def _column_matrices(kind: LayerKind, *parts: str) -> float:
    """Return how many column-cut matrices of these parts a layer has, adapters apart."""
    return float(
        sum(
            w.part in parts and w.role == "linear" and w.cut == "column" and not w.is_adapter
            for w in kind.weights
        )
    )


def untrained_steps(kind: LayerKind) -> int:
    """Column-cut steps whose input no weight gradient asks for again: frozen, not adapted."""
    found = 0
    for part in ("attention", "mlp", "shared_experts"):
        weights = [w for w in kind.weights if w.part == part and w.role == "linear"]
        found += bool(weights) and all(w.frozen for w in weights)
    return found
