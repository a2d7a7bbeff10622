"""Seconds of a serving engine's matmuls: few rows or many, weights in any format.

Symbols   m rows (tokens of a step)   k, n inputs and outputs of the matrix on one rank
          c bytes of the computation   w bytes of the stored matrix, scales included
          R FLOP/s of matmuls   beta memory bandwidth [bytes/s]   s share of it for weights
          E experts on a rank   e of them chosen by some token
Units     seconds; every function broadcasts.

Source: Williams, Waterman, Patterson, Roofline (CACM 52, 2009); ``compute.matmul`` for many rows.
Leaves out: kernels of single libraries that reach other shares of the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cost_models.arrays import Count, Real
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.rates import Rates
from cost_models.model.spec import LayerKind, Weight
from cost_models.serving.number_formats import WeightFormat
from cost_models.serving.weights import rank_share, tensor_bytes

FEW_ROWS: Final = 64.0  # the smallest tile of a large matmul (``matmul.TILES``)
ROW_TILE: Final = 16.0  # rows of a tensor-core instruction (PTX, mma.m16n8k16)
# matrices that read the same input are fused in one product
TOGETHER: Final = (
    frozenset({"q_proj", "k_proj", "v_proj", "q", "k", "v", "query", "key", "value"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"wi_0", "wi_1"}),
)


def product_seconds(
    rows: Real,
    inputs: Real,
    outputs: Real,
    weight_bytes: Real,
    compute_bytes: float,
    rate: Rates,
    *,
    batch: Real = 1.0,
    stream_share: float = 1.0,
) -> Real:
    """Seconds of (m, k) x (k, n), ``batch`` times: a roofline.

        computing   m <= 64    2 · 16 ceil(m/16) k n / R       small tiles and split k: the work
                                                               uses every multiprocessor
                    otherwise  tiles in waves (``matmul``)
        moving      (w + c m (k + n)) / (s beta)

    The longer of the two. ``weight_bytes``: of all matrices of the batch that are read.

    >>> rate = Rates(1e12, 1e9, 0.0, False)
    >>> float(product_seconds(1.0, 1000.0, 1000.0, 2e6, 2.0, rate))
    0.002004
    """
    m, k, n = (np.multiply(1.0, size) for size in (rows, inputs, outputs))
    padded = ROW_TILE * np.ceil(m / ROW_TILE) if rate.units else m
    few = 2.0 * batch * padded * k * n / rate.matmul
    many = matmul_seconds(np.maximum(m, FEW_ROWS), k, n, 0.0, rate, batch=batch)
    computing = np.where(m <= FEW_ROWS, few, many)
    moved = weight_bytes + compute_bytes * batch * m * (k + n)
    longer: Real = np.where(
        m * k * n > 0.0, np.maximum(computing, moved / (stream_share * rate.memory)), 0.0
    )
    return longer


def experts_met(experts: Real, tokens: Real, per_token: float, of_all: float) -> Real:
    """Experts of a rank chosen by some token: E (1 - (1 - k/N)^T), of N experts in total.

    Each of T tokens chooses k of N at random: balanced routing.

    >>> float(experts_met(8.0, 1.0, 2.0, 8.0)), float(experts_met(8.0, 1000.0, 2.0, 8.0))
    (2.0, 8.0)
    """
    missed = (1.0 - per_token / of_all) ** np.multiply(1.0, tokens)
    return experts * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class LayerMatmul:
    """One matmul of a layer on one rank, or one of every expert."""

    name: str
    inputs: Real
    outputs: Real
    weight_bytes: Real
    in_format: bool = True  # stored in the weight format, not in the compute precision
    is_expert: bool = False
    reads_encoder: bool = False  # keys and values of cross attention

    def fused_with(self, other: LayerMatmul) -> LayerMatmul:
        """Return both fused into one product of the same input."""
        return replace(
            self,
            outputs=self.outputs + other.outputs,
            weight_bytes=self.weight_bytes + other.weight_bytes,
        )


def layer_products(
    kind: LayerKind,
    tensor_parallel: Count,
    expert_parallel: Count,
    stored: WeightFormat,
    compute_bytes: float,
) -> tuple[LayerMatmul, ...]:
    """Return the matmuls of a layer; matrices that read the same input are fused."""
    found: dict[tuple[str, int], LayerMatmul] = {}
    for weight in kind.weights:
        if not weight.is_matrix:
            continue
        product = _product(weight, kind, tensor_parallel, expert_parallel, stored, compute_bytes)
        key = _together(weight)
        found[key] = found[key].fused_with(product) if key in found else product
    return tuple(found.values())


def _together(weight: Weight) -> tuple[str, int]:
    """Return a key that the matrices of one fused product share."""
    words = weight.name.split(".")
    leaf = words[-2] if words[-1] in ("weight", "bias") and len(words) > 1 else words[-1]
    before = weight.name[: weight.name.rindex(leaf)]
    for group, names in enumerate(TOGETHER):
        if leaf in names:
            cross = _reads_encoder(weight)
            return before, 2 * group + int(cross)
    return weight.name, -1


def _reads_encoder(weight: Weight) -> bool:
    words = weight.name.split(".")
    return "EncDecAttention" in words and bool({"k", "v"} & set(words))


def _product(
    weight: Weight,
    kind: LayerKind,
    tensor_parallel: Count,
    expert_parallel: Count,
    stored: WeightFormat,
    compute_bytes: float,
) -> LayerMatmul:
    share = rank_share(weight, kind.attention, tensor_parallel, expert_parallel)
    lengths = [np.multiply(1.0, length) for length in weight.features]
    if weight.sharding != "replicate":
        along = 0 if weight.sharding == "row" else 1
        if weight.is_routed_expert:  # whole experts, or a part of each
            whole = np.greater(expert_parallel, 1)
            share = np.where(whole, 1.0, 1.0 / np.multiply(1.0, tensor_parallel))
        lengths[along] = lengths[along] * share
    inputs, outputs = lengths
    held = tensor_bytes(
        weight, kind.attention, tensor_parallel, expert_parallel, stored, compute_bytes
    )
    return LayerMatmul(
        weight.name,
        inputs,
        outputs,
        held,
        stored.holds(weight),
        weight.is_routed_expert,
        _reads_encoder(weight),
    )
