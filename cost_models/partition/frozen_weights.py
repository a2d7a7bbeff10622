"""Frozen weights on one pipeline rank, plain and quantised, and buffers of dequantisation.

Units: bytes, columns of a plan table.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cost_models.arrays import FP32, Count, Flag, Real
from cost_models.model.adapter_methods import METHODS
from cost_models.model.lora import (
    DEQUANTISED_AT_ONCE,
    STORED_BYTES,
    frozen_part,
    has_frozen,
    quantised_bytes,
)
from cost_models.model.parameters import shard_numel
from cost_models.model.spec import LayerKind, Weight
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.plan.recompute import FULL
from cost_models.plan.workload import QUANTISED


def frozen_bytes(view: RankView) -> Real:
    """Bytes of frozen weights: c P, w P, 4 P or quantised with scales; ZeRO-3 may shard them.

    nf4          0.5 + 4/64 bytes an element (4.5 bits)
    nf4_double   0.5 + 1/64 + 4/(64 · 256)    (4.127 bits)
    int8         1 byte, and 4 bytes for each output of a matrix
    int4         0.5 + 2.5/128                (4.156 bits)
    int2         0.25 + 2/64                  (2.25 bits)
    fp8, fp4     1 or 0.5, and its share of the scales: matrices of a base that is trained in few
                 bits, where the trainer stores them so

    Source: Dettmers et al., QLoRA (arXiv:2305.14314), sec. 3 (nf4, double quantisation); LLM.int8
    (arXiv:2208.07339), sec. 2.1; Frantar et al., GPTQ (arXiv:2210.17323), groups of 128 for int4.
    Scales that are no parameters stay whole on every rank (``whole_scale_bytes``).
    Leaves out: outlier columns that int8 keeps in 16 bits.
    """
    frozen = view.software.frozen
    each = view.workload.master_bytes if frozen.in_fp32 else view.compute_bytes
    if frozen.unquantised_in_fp32 and view.workload.adapter == "qlora":
        each = max(FP32, each)
    ranks = np.where(shards_frozen(view), np.multiply(1.0, view.table.shard_ranks), 1.0)
    scales = whole_scale_bytes(view)
    return (_whole_bytes(view, each) - scales) / ranks + scales


def whole_scale_bytes(view: RankView) -> Real:
    """Bytes of scales that are no parameters, which nothing shards, gathers or offloads.

    Source: bitsandbytes, nn/modules.py, Params4bit: only the packed elements are the parameter, its
    quant_state is an attribute (AnswerDotAI/fsdp_qlora: train.py, load_and_quantize). Leaves out:
    the 16 values of a code and a shape for each matrix.
    """
    each = quantised_bytes(view.workload.quantisation) - sharded_bytes(view)
    return each * _quantised_elements(view)


def sharded_bytes(view: RankView) -> float:
    """Bytes of a quantised element that sharding divides."""
    kind = view.workload.quantisation
    whole = view.software.frozen.whole_scales and kind in ("nf4", "nf4_double")
    return quantised_bytes(kind, scales=not whole)


def shards_frozen(view: RankView) -> Flag:
    """Whether ZeRO-3 shards frozen weights, and gathers them in every pass."""
    found: Flag = view.software.sharding.frozen_weights & (view.table.zero_stage >= 3)
    return found


def gathered_frozen_bytes(view: RankView) -> Real:
    """Bytes of frozen weights that ZeRO-3 gathers in a pass: c P, quantised ones as stored."""
    whole = _whole_bytes(view, view.compute_bytes) - whole_scale_bytes(view)
    return np.where(shards_frozen(view), whole, 0.0)


def _whole_bytes(view: RankView, each: float) -> Real:
    """Bytes of all frozen weights of a rank; ``each``: of an element of plain ones."""
    model, table = view.model, view.table
    if not has_frozen(model):
        return np.zeros(len(table))
    plain = rank_parameters(frozen_part(model, quantised=False), view.rank, table)
    element, row = STORED_BYTES[view.workload.quantisation]
    stored: Real = np.zeros(len(table))
    for count, weight in _quantised_weights(view):
        numel = shard_numel(weight, table.tensor_parallel)
        ranks = table.tensor_parallel if weight.sharding == "column" else 1
        rows = float(weight.features[1]) / ranks
        stored = stored + count * (element * numel + row * rows)
    whole = each * plain.total + stored
    for count, weight in _matrices_in_few_bits(view):
        few = QUANTISED[view.workload.precision] + view.software.fp8.scale_bytes
        few *= 2.0 if view.workload.precision == "fp4" else 1.0
        numel = shard_numel(weight, *table.cuts)
        whole = whole - count * (each - few) * numel
    return whole


def offloads_frozen(view: RankView) -> Flag:
    """Whether frozen weights leave the device: where ZeRO-3 shards them like all others."""
    found: Flag = view.table.offloads_weights & view.software.sharding.frozen_weights
    return found


def offloaded_frozen_bytes(view: RankView) -> Real:
    """Bytes of a rank's shards of frozen weights that lie off the device, which passes fetch."""
    return np.where(offloads_frozen(view), frozen_bytes(view) - whole_scale_bytes(view), 0.0)


def frozen_layer_bytes(view: RankView) -> Real:
    """Bytes of a rank's shard of the largest frozen layer, plain and quantised matrices."""
    model, table = view.model, view.table
    each = view.workload.master_bytes if view.software.frozen.in_fp32 else view.compute_bytes
    small = sharded_bytes(view)
    whole: Real = np.zeros(len(table))
    for quantised, size in ((False, each), (True, small)):
        part = rank_parameters(frozen_part(model, quantised=quantised), view.rank, table)
        whole = whole + size * part.largest_layer
    shard: Real = whole / np.maximum(1, table.shard_ranks)
    return shard


def dequantisation_buffers(view: RankView) -> tuple[Real, Real]:
    """Bytes of quantised matrices in compute precision during a layer's backward pass, and besides.

        c N_largest, and t min(N_largest, 2^22)    a kernel each way: a matrix, and for each element
                                                   dequantised at once half an int32 index, and the
                                                   fp32 value if the compute precision is less
        c N_layer, and (5 - c) N_largest           torch's operators: autograd keeps all of them,
                                                   and one is unpacked by way of int32 and int8

    Source: executor/ops/nf4.py; AutoGPTQ, qlinear_cuda_old.py, QuantLinear.forward. Leaves
    out: unpacked zero points.
    """
    composed = composed_buffers(view)[0]
    if not any(w.quantised for kind in view.model.kinds for w in kind.weights):
        return composed, np.zeros(len(view.table))
    compute, by_operators = view.compute_bytes, view.software.frozen.unpacks_by_operators
    largest: Real = np.zeros(len(view.table))
    for _, weight in _quantised_weights(view):
        largest = np.maximum(largest, shard_numel(weight, view.table.tensor_parallel))
    if by_operators:
        unpacked = compute * _quantised_layer(view)
        return composed + unpacked, max(0.0, 5.0 - compute) * largest
    temporary = 2.0 + (4.0 if compute < 4.0 else 0.0)
    return composed + compute * largest, temporary * np.minimum(largest, DEQUANTISED_AT_ONCE)


def kept_unpacked_bytes(view: RankView) -> Real:
    """Bytes of the unpacked matrices of all layers but one, which autograd keeps.

    None where a kernel unpacks them each way, or where layers are computed again. Matrices that
    adapters are composed to are kept in the same way.
    """
    composed = np.where(view.table.recompute == FULL, 0.0, composed_buffers(view)[1])
    if not view.software.frozen.unpacks_by_operators:
        return composed
    kept = view.compute_bytes * (_quantised_elements(view) - _quantised_layer(view))
    return composed + np.where(view.table.recompute == FULL, 0.0, kept)


def makes_matrices(view: RankView) -> bool:
    """Whether a pass unpacks frozen matrices, or makes matrices of adapters."""
    if view.software.rounding.weight_saved_bytes:
        return True
    weights = [w for kind in view.model.kinds for w in kind.weights]
    return any(w.quantised or (w.adapter and METHODS[w.adapter].temporary) for w in weights)


def composed_buffers(view: RankView) -> tuple[Real, Real]:
    """Bytes of matrices that adapters make: in a layer's passes, and kept by all other layers.

    kept        e N of every matrix to which a composed one is added, until its backward pass;
                rounded matrices
    temporary   e (k N + j i^2) of the largest: ``Method.temporary`` and ``Method.identity``

    Source: huggingface/peft 0.21, tuners/loha, tuners/lokr and tuners/lora/dora.py. Leaves out:
    matrices that a compiler makes anew in the backward pass.
    """
    few, table = view.compute_bytes, view.table
    each = max(FP32, few) if view.software.adapters.in_fp32 else few
    total, layer, largest = np.zeros(len(table)), np.zeros(len(table)), np.zeros(len(table))
    for layers in view.layers:
        own: Real = np.zeros(len(table))
        for weight in (w for w in layers.kind.weights if w.adapter):
            method, numel = METHODS[weight.adapter], shard_numel(weight, table.tensor_parallel)
            own = own + method.composed * numel
            square = float(weight.features[0]) ** 2
            made = method.temporary * numel + method.identity * square
            largest = np.maximum(largest, made)
        total, layer = total + layers.count * own, np.maximum(layer, own)
    now, kept = _rounded_buffers(view)
    return each * (layer + largest) + now, each * (total - layer) + kept


def rounded_elements(kind: LayerKind, tensor_parallel: Count) -> Real:
    """Elements on one rank of the matrices of a layer that quantisation-aware training rounds."""
    return sum((shard_numel(w, tensor_parallel) for w in _rounded(kind)), 0.0)


def _rounded(kind: LayerKind) -> list[Weight]:
    return [w for w in kind.weights if is_multiplied(w) and not w.is_adapter and len(w.shape) > 1]


def _rounded_buffers(view: RankView) -> tuple[Real, Real]:
    """Bytes of rounded matrices of a layer in its backward pass, and of those of other layers.

        r N_layer + t N_largest, and r N of all other layers

    r, t bytes of an element: r is c of frozen ones, of which the rounded matrix alone is kept.
    Source: pytorch/ao: torchao/quantization/qat/linear.py, FakeQuantizedLinear.
    """
    rounding, ranks = view.software.rounding, view.table.tensor_parallel
    total, layer, largest = (np.zeros(len(view.table)) for _ in range(3))
    if not rounding.weight_saved_bytes:
        return total, total
    for layers in view.layers:
        own: Real = np.zeros(len(view.table))
        for weight in _rounded(layers.kind):
            numel = shard_numel(weight, ranks)
            each = view.compute_bytes if weight.frozen else rounding.weight_saved_bytes
            own, largest = own + each * numel, np.maximum(largest, numel)
        total, layer = total + layers.count * own, np.maximum(layer, own)
    return layer + rounding.temporary_bytes * largest, total - layer


def _quantised_elements(view: RankView) -> Real:
    """Elements of all quantised matrices on the rank."""
    found, tensor = np.zeros(len(view.table)), view.table.tensor_parallel
    return sum((n * shard_numel(w, tensor) for n, w in _quantised_weights(view)), found)


def _quantised_layer(view: RankView) -> Real:
    """Elements of the quantised matrices of the layer with most of them."""
    most: Real = np.zeros(len(view.table))
    for layers in view.layers:
        small = [w for w in layers.kind.weights if w.quantised]
        numel = sum((shard_numel(w, view.table.tensor_parallel) for w in small), 0.0 * most)
        most = np.maximum(most, numel)
    return most


def is_multiplied(weight: Weight) -> bool:
    """Whether a weight is a matrix of a layer that matmuls in few bits take."""
    return weight.is_matrix and weight.part != "router"


def stored_in_few_bits(weight: Weight, view: RankView) -> bool:
    """Whether a frozen matrix has no copy in 16 bits.

    Source: NVIDIA/TransformerEngine: fp8_model_init; NeMo's fp8_params of LoRA (mlcommons/
    training_results_v4.0: NVIDIA/benchmarks/llama2_70b_lora, megatron_gpt_peft_tuning_config.yaml,
    with disable_parameter_transpose_cache: one copy, along the rows); in 4 bits, where scales are
    those of blocks, one along the columns as well (NVIDIA/TransformerEngine: NVFP4Quantizer).
    Leaves out: a transposed copy in 8 bits, where a trainer caches it.
    """
    few = view.software.fp8.stores_frozen and view.workload.precision in QUANTISED
    return few and weight.frozen and not weight.quantised and is_multiplied(weight)


def _matrices_in_few_bits(view: RankView) -> Iterator[tuple[int, Weight]]:
    """Yield the matrices of ``stored_in_few_bits`` of a layer of each kind, as quantised ones."""
    for layers in view.layers:
        yield from ((layers.count, w) for w in layers.kind.weights if stored_in_few_bits(w, view))


def _quantised_weights(view: RankView) -> Iterator[tuple[int, Weight]]:
    """Yield the quantised matrices of a layer of each kind on the rank, and the layer's number."""
    for layers in view.layers:
        yield from ((layers.count, w) for w in layers.kind.weights if w.quantised)
