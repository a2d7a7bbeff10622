"""Training with matmuls in fp8 or fp4: the precision of saved and stored tensors.

Symbols   h hidden_size   F ffn_hidden_size   a query heads, e value_head_dim   c compute_bytes (2)
          k experts of a token
          q bytes of an element in few bits: 1 or 1/2, and its share of the scales
Units     bytes a token, or bytes; every argument may be a column of a plan table.

In fp8: the matrices inside layers (attention, MLP, experts) during their matmuls, and the inputs
that their weight gradients read. In 16 bits: the weights themselves and their gradients, norms and
their inputs, queries, keys and values, the inputs of activations, the residual stream, embedding,
head and logits. Master weights and optimizer states as elsewhere.

Of the matrices' fp8 copies Transformer Engine keeps two, one read along the rows (forward) and one
along the columns (input gradients); the bundled executor casts again (``executor.ops.fp8``).

Source: NVIDIA, Transformer Engine user guide, "Using FP8 with Transformer Engine" and "Performance
considerations" (handling transposes); Micikevicius et al., FP8 formats (arXiv:2209.05433).
Leaves out: scales of whole tensors, trained weights that are stored in fp8 alone
(``fp8_model_init``; frozen ones: ``partition.frozen_weights``), layers that a recipe keeps in 16
bits, saved tensors of attention in fp8.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from cost_models.activations.saved import Regions
from cost_models.arrays import Count, Flag, Real
from cost_models.model.parameters import shard_numel
from cost_models.model.spec import LayerKind
from cost_models.partition.frozen_weights import is_multiplied, stored_in_few_bits
from cost_models.partition.rank_view import RankView
from cost_models.partition.tensor_sharding import cut_ranks
from cost_models.plan.workload import QUANTISED, Workload
from hardware_profiles.software.trainer import SoftwareProfile

CAST: Final = 3.0  # bytes: reads 16 bits, writes 8
COPY: Final = 2.0  # bytes: reads 8 bits, writes 8
# matmuls in 8 bits read operands with one scale a tensor along either direction
# (NVIDIA/TransformerEngine: common/gemm/cublaslt_gemm.cu, nvte_is_non_tn_fp8_gemm_supported)
EITHER_DIRECTION: Final = frozenset({"Blackwell", "Blackwell Ultra"})
GATHERED: Final = 2.0  # layers that ZeRO 3 holds whole: the one that runs and the next one


def element_bytes(workload: Workload, software: SoftwareProfile) -> float:
    """Bytes of an element during matmuls, with its share of the scales."""
    return QUANTISED[workload.precision] + software.fp8.scale_bytes


def fp8_regions(
    regions: Regions,
    kind: LayerKind,
    hidden_size: int,
    compute_bytes: float,
    element_bytes: float = 1.0,
) -> Regions:
    """Saved bytes of one layer whose matrices save their inputs in few bits.

    inputs   q of c            of column-cut matrices
    split    + q a e           of the output matrix: the core keeps its own copy in 16 bits
             - (c - q) F       of the second matrix of the MLP, k times and shared experts
    routed   - (c - q) k h     of the first matrices of experts
    """
    less = compute_bytes - element_bytes
    attentions = [kind.attention, *([kind.cross_attention] if kind.cross_attention else [])]
    copies = element_bytes * sum(a.num_heads * a.value_head_dim for a in attentions)
    mlp = kind.feed_forward
    per_token = mlp.experts_per_token if mlp.num_experts else 1
    width = per_token * mlp.ffn_hidden_size
    width += mlp.shared_ffn_hidden_size if mlp.num_experts else 0
    experts = less * mlp.experts_per_token * hidden_size if mlp.num_experts else 0.0
    return replace(
        regions,
        inputs=regions.inputs * element_bytes / compute_bytes,
        split=regions.split + copies - less * width,
        routed=regions.routed - experts,
    )


def fp8_weight_bytes(view: RankView) -> Real:
    """Bytes of the fp8 copies of a rank's matrices, sharded where the weights are.

        ZeRO 0 to 2   n P          P: elements of the rank's matrices
        ZeRO 3        n P / d + n of GATHERED layers

    n: copies that the trainer keeps from the forward to the backward pass, one of which serves both
    where matmuls read either direction (``EITHER_DIRECTION``); none of frozen matrices that are
    stored in few bits.

    Transformer Engine scatters and gathers its copies when FSDP does its flat parameters
    (``prepare_te_modules_for_fsdp`` in transformer_engine/pytorch/distributed.py).
    """
    table = view.table
    whole: Real = np.zeros(len(table))
    shards: Real = np.zeros(len(table))
    layer: Real = np.zeros(len(table))
    for layers in view.layers:
        of_layer: Real = np.zeros(len(table))
        for weight in layers.kind.weights:
            if is_multiplied(weight) and not stored_in_few_bits(weight, view):
                numel = shard_numel(weight, *table.cuts)
                ranks = table.shard_ranks
                if weight.role == "expert":
                    ranks = np.where(table.experts_apart, table.expert_shard_ranks, ranks)
                shards = shards + layers.count * numel / np.maximum(1, ranks)
                of_layer = of_layer + numel
        whole = whole + layers.count * of_layer
        layer = np.maximum(layer, of_layer)
    gathered = np.minimum(whole, shards + GATHERED * layer)
    elements = np.where(table.zero_stage >= 3, gathered, whole)
    fp8, architecture = view.software.fp8, view.cluster.accelerator.architecture
    once = fp8.copies_as_needed and fp8.scale_bytes == 0.0 and architecture in EITHER_DIRECTION
    copies = min(1.0, fp8.weight_copies) if once else fp8.weight_copies
    return copies * element_bytes(view.workload, view.software) * elements


def matrices_in_few_bits(view: RankView, *, experts: bool) -> Real:
    """Elements of trained matrices that ranks under ZeRO-1 keep in 8 bits alone.

    Where the new weights are gathered in 8 bits, the copies of ``fp8_weight_bytes`` are all there
    is next to fp32 shards. ``experts``: those of experts that are shared out apart, or the others.
    Source: NVIDIA/Megatron-LM: megatron/training/arguments.py, --fp8-param-gather ("do not use any
    other intermediate dtype").
    """
    table, software = view.table, view.software
    found: Real = np.zeros(len(table))
    kept = software.fp8.gathers_weights and software.fp8.weight_copies > 0.0
    if not kept or view.workload.precision not in QUANTISED:
        return found
    for layers in view.layers:
        for weight in layers.kind.weights:
            if not is_multiplied(weight) or weight.frozen or weight.is_adapter:
                continue
            apart = np.logical_and(table.experts_apart, weight.role == "expert")
            numel = shard_numel(weight, *table.cuts)
            found = found + np.where(np.equal(apart, experts), layers.count * numel, 0.0)
    return np.where(table.zero_stage == 1, found, 0.0)


def trained_in_few_bits(view: RankView, *, experts: bool) -> Real:
    """Elements of trained matrices of layers that have no copy in 16 bits (``fp8.trained_bytes``).

    They are multiplied in 16 bits. ``experts``: as of ``matrices_in_few_bits``. Source: pytorch/ao:
    torchao/prototype/quantized_training/int8.py. Leaves out: their scales, one a row; a head that
    is stored so as well; gathered layers in 8 bits.
    """
    found: Real = np.zeros(len(view.table))
    workload = view.workload
    if not view.software.fp8.trained_bytes or workload.compute_bytes != workload.master_bytes:
        return found
    for layers in view.layers:
        for weight in layers.kind.weights:
            if not is_multiplied(weight) or weight.frozen or weight.is_adapter:
                continue
            apart = np.logical_and(view.table.experts_apart, weight.role == "expert")
            numel = shard_numel(weight, *view.table.cuts)
            found = found + np.where(np.equal(apart, experts), layers.count * numel, 0.0)
    return found


def gathered_bytes(workload: Workload, software: SoftwareProfile) -> float | None:
    """Bytes of an element that a layer gathers with sequence parallelism; None: of any other."""
    if workload.precision not in QUANTISED or not software.fp8.gathers:
        return None
    return element_bytes(workload, software)


def gathered_matrix_share(workload: Workload, software: SoftwareProfile) -> float:
    """Bytes of an element of a layer's matrix that ZeRO gathers, over those in 16 bits."""
    if workload.precision not in QUANTISED or not software.fp8.gathers_weights:
        return 1.0
    return element_bytes(workload, software) / workload.compute_bytes


def gathered_cast_share(
    tensor_parallel: Count, sequence_parallel: Flag, software: SoftwareProfile, *, copies: bool
) -> Real:
    """Ratio of the bytes moved to cast a gathered element and one that is not gathered.

    Each of t ranks casts its own tokens. Where matmuls read operands along one direction only
    (``copies``: Hopper), a gathered tensor is copied along the other:

        (3 / t + 2) / n  with copies (reads 16 bits, writes 8; reads 8, writes 8), else 1 / t

    n: ``fp8.cast_bytes``. Source: NVIDIA/TransformerEngine@0004dbd0:
    transformer_engine/pytorch/module/linear.py (cast_to_fp8, then gather_along_first_dim); user
    guide, Performance considerations, Handling transposes.
    """
    ranks = np.multiply(1.0, tensor_parallel)
    if not software.fp8.cast_bytes:
        return np.ones_like(ranks)
    share = (CAST / ranks + COPY) / software.fp8.cast_bytes if copies else 1.0 / ranks
    gathers = np.logical_and(sequence_parallel, np.greater(ranks, 1.0)) & software.fp8.gathers
    return np.where(gathers, share, 1.0)


def cast_elements(
    kind: LayerKind, tensor_parallel: Count, gathered: Real = 1.0
) -> tuple[Real, Real]:
    """Elements a token that a layer casts: inputs of its matrices, gradients of their outputs.

    Column-cut matrices of a block share their input, which is cast once. ``gathered``: the
    weight of an element that tensor-parallel ranks gather after the cast.
    """
    shared: set[tuple[str, int]] = set()
    inputs: Real = 0.0
    outputs: Real = 0.0
    for weight in kind.weights:
        if not is_multiplied(weight):
            continue
        length, width = weight.features
        times = kind.feed_forward.experts_per_token if weight.role == "expert" else 1.0
        over = cut_ranks(weight, tensor_parallel)
        if weight.sharding == "row":
            inputs = inputs + times * length / over
        elif (weight.part, length) not in shared:
            shared.add((weight.part, length))
            inputs = inputs + times * length * (gathered if weight.sharding == "column" else 1.0)
        whole = gathered if weight.role == "linear" else 1.0
        outputs = outputs + times * width * (whole if weight.sharding == "row" else 1.0 / over)
    return inputs, outputs


def matmul_inputs(kind: LayerKind, tensor_parallel: Count) -> Real:
    """Elements a token of the inputs of all matrices, as often as matrices read them."""
    inputs: Real = 0.0
    for weight in kind.weights:
        if not is_multiplied(weight):
            continue
        times = kind.feed_forward.experts_per_token if weight.role == "expert" else 1.0
        over = np.multiply(1.0, tensor_parallel if weight.sharding == "row" else 1)
        inputs = inputs + times * weight.features[0] / over
    return inputs
