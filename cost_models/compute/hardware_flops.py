"""Hardware FLOP of a plan: what all ranks compute in a step, recomputation included.

Units     FLOP (a multiply and an add are two); columns of a plan table.

Leaves out: norms, activations, softmax and rotary embeddings (as ``flops``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from cost_models.arrays import Count, Real, among
from cost_models.communication.context_parallel import computed_score_share, is_blockwise
from cost_models.compute.flops import (
    CORE_BACKWARD,
    core_backward_flops_per_token,
    core_flops_per_token,
    embedding_flops_per_token,
    head_flops_per_token,
    matmul_flops_per_token,
    trained_outer_flops_per_token,
)
from cost_models.model.adapter_methods import SECOND, is_composed
from cost_models.model.lora import adapter_names, embedding_is_frozen
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.model.target_length import with_target_length
from cost_models.partition.recomputed_layers import RecomputedLayers, repeated_by_setting
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import PlanTable, split_layers
from cost_models.plan.recompute import (
    CORE,
    EVERY_SECOND_MM,
    FULL,
    by_operator,
    repeats_module,
    repeats_modules,
)
from cost_models.plan.workload import Workload


def hardware_flops_per_step(
    model: ModelSpec,
    workload: Workload,
    table: PlanTable,
    layer_ranges: Sequence[tuple[int, int]] | None = None,
    stage_recompute_layers: tuple[int, ...] | None = None,
) -> Real:
    """FLOP of matmuls and attention of all ranks in one step, as a dispatcher counts them.

    Forward once; backward two matmuls for each one, and five for the two of a flash kernel, which
    computes the scores again. Full recomputation repeats a layer up to the last tensor that is
    needed (its last matrix only where a norm or a dropout follows), selective the attention core,
    selective_ops only an eager core, ops:every-2nd-mm that and ``repeated_matrices``, a set of
    modules their matrices and cores. ``layer_ranges``: the stages of a single plan, else even ones;
    they matter if only some layers of a stage recompute. ``stage_recompute_layers``: of each stage,
    of a single plan. Ring and all-gather attention skip blocks that a causal mask hides. Leaves
    out: rows by which experts' batches are padded, blocks that a sliding window hides.

    Source: Dao et al. (arXiv:2205.14135), sec. 3.1; Korthikanti et al. (arXiv:2205.05198), sec. 5.
    """
    model = with_target_length(model, workload)
    tokens = 1.0 * workload.seq_len * workload.global_batch_size
    # of the scores, where ring and all-gather attention skip hidden blocks
    share = computed_score_share("eager", table.context_parallel, is_blockwise(table))
    once = _matrix_flops(model, table) + _outer_flops(model, table)
    once = once + _core_flops(model, workload, share)
    # tensor-parallel ranks compute the gradient of the projection's input nevertheless
    unneeded = np.where(table.tensor_parallel > 1, 0.0, _unneeded_head_gradient(model))
    repeats = _recomputed_layers(model, table, layer_ranges, stage_recompute_layers)
    again = _recomputed_flops(model, workload, table, repeats, share)
    full = np.where(table.recompute == FULL, 1.0, 0.0)
    avoided = _avoided_flops(model, table, [number * full for number in repeats])
    return tokens * (once - unneeded + again - avoided)


def _matrix_flops(model: ModelSpec, table: PlanTable) -> Real:
    """FLOP of the layers' matrices for one token: forward, gradients of weights and of inputs."""
    total: Real = np.zeros(len(table))
    for kind in (model.kinds[number] for number in model.pattern):
        trained = [weight for weight in kind.weights if not weight.frozen]
        trained += [replace(weight, adapter="") for weight in kind.weights if is_composed(weight)]
        for weights in (kind.weights, trained, () if kind.forward_only else kind.weights):
            total = total + kind.token_share * _matmul_flops_of_ranks(weights, table, kind)
    return total


def _core_flops(model: ModelSpec, workload: Workload, share: Real) -> Real:
    """FLOP of the layers' attention cores for one token: forward, and backward where there is one.

    ``share``: of the scores, those that are computed.
    """
    kernel, layers = workload.attention_kernel, [model.kinds[number] for number in model.pattern]
    once = [_own_core_flops(kind, workload) for kind in layers]
    forward = float(sum(once))
    backward = float(sum(_own_core_flops(kind, workload, kernel) for kind in layers))
    ratio = CORE_BACKWARD[kernel] * share
    idle = [ratio * flops for flops, kind in zip(once, layers, strict=True) if kind.forward_only]
    return (forward + backward) * share - sum(idle)


def _own_core_flops(kind: LayerKind, workload: Workload, backward_of: str = "") -> Real:
    """FLOP of a layer's cores for one token of the inputs: forward, or backward of a kernel."""
    seq_len = kind.own_seq_len(workload.seq_len)
    if backward_of:
        return kind.token_share * core_backward_flops_per_token(kind, seq_len, backward_of)
    return kind.token_share * core_flops_per_token(kind, seq_len)


def _recomputed_flops(
    model: ModelSpec, workload: Workload, table: PlanTable, repeats: Sequence[Real], share: Real
) -> Real:
    """FLOP of recomputation for one token; ``repeats``: recomputed layers of each kind."""
    full = np.where(table.recompute == FULL, 1.0, 0.0)
    selective = np.where(repeats_module(table.recompute, CORE), 1.0, 0.0)
    ops = np.where(by_operator(table.recompute), 1.0, 0.0)
    every_second = np.equal(table.recompute, EVERY_SECOND_MM)
    # an eager core ends with its second matmul, whose result the backward pass does not need
    eager = 1.0 if workload.attention_kernel == "eager" else 0.0
    again: Real = np.zeros(len(table))
    for number, kind in zip(repeats, model.kinds, strict=True):
        if kind.forward_only:
            continue
        number, seq_len = kind.token_share * number, kind.own_seq_len(workload.seq_len)
        scores = share * core_flops_per_token(kind, seq_len)
        whole = _matmul_flops_of_ranks(kind.weights, table, kind) + scores
        whole = whole - _last_matrix(model, kind)
        of_core = scores - share * eager * _value_flops(kind, seq_len)
        again = again + number * (full * whole + selective * of_core)
        again = again + number * ops * eager * scores
        experts = matmul_flops_per_token(kind, [w for w in kind.weights if w.role == "expert"])
        again = again + np.where(every_second, number * experts, 0.0)
        for repeats_it, matrices in repeated_by_setting(kind, table):
            matmuls = _repeated_flops(model, kind, matrices, table)
            again = again + np.where(repeats_it, number * matmuls, 0.0)
    return again


def _matmul_flops_of_ranks(
    weights: Iterable[Weight], table: PlanTable, kind: LayerKind | None = None
) -> Real:
    """Forward FLOP of some matrices for one token, of all tensor-parallel ranks together.

    A matrix that is whole on each rank meets the rank's tokens: all of them, unless the ranks share
    the sequence. Routers meet all tokens where the experts are cut, adapters of cut matrices
    always.
    """
    ranks = 1.0 * table.tensor_parallel
    shared = np.where(table.sequence_parallel, 1.0, ranks)
    routers = np.where(table.expert_tensor_parallel, ranks, 1.0)
    cut = _adapters_of_cut_matrices(kind)
    total: Real = np.zeros(len(table))
    for weight in weights:
        copies: Real = 1.0
        if weight.sharding == "replicate":
            copies = routers if weight.part == "router" else shared
            copies = ranks if weight.name in cut else copies
        total = total + copies * matmul_flops_per_token(kind, (weight,))
    return total


def _adapters_of_cut_matrices(kind: LayerKind | None) -> set[str]:
    """Return the names of the adapters of a layer's matrices that are cut."""
    weights = () if kind is None else kind.weights
    cut = [weight.name for weight in weights if weight.sharding != "replicate"]
    return {adapter for name in cut for adapter in adapter_names(name)}


def _outer_flops(model: ModelSpec, table: PlanTable) -> Real:
    """FLOP of the embedding block and the head for one token: forward and backward."""
    once = [*model.embedding, *model.head]
    often = [w for w in once if w.sharding == "replicate"]
    passes = 1.0 if embedding_is_frozen(model) else 2.0
    found: Real = 2.0 * head_flops_per_token(model) + trained_outer_flops_per_token(model)
    found = found + passes * embedding_flops_per_token(model)
    for weights in (often, often, [w for w in often if not w.frozen]):
        found = (
            found + _matmul_flops_of_ranks(weights, table) - matmul_flops_per_token(None, weights)
        )
    return found


def _recomputed_layers(
    model: ModelSpec,
    table: PlanTable,
    layer_ranges: Sequence[tuple[int, int]] | None,
    by_stage: tuple[int, ...] | None,
) -> list[Real]:
    """Return how many layers of each kind are recomputed, if the plan recomputes; columns."""
    found: list[Real] = [np.zeros(len(table)) for _ in model.kinds]
    num_stages = table.num_stages
    keys = np.stack([num_stages, table.recompute_layers, table.recompute_every])
    for key in np.unique(keys, axis=1).T.tolist():
        recomputed = RecomputedLayers(key[1], key[2], by_stage)
        ranges = layer_ranges or split_layers(model.num_layers, key[0])
        layers = [i for stage, r in enumerate(ranges) for i in recomputed.of_stage(stage, r)]
        kinds = [model.pattern[i] for i in layers]
        rows = np.all(np.equal(keys.T, key), axis=1)
        for number, column in enumerate(found):
            column[rows] = kinds.count(number)  # type: ignore[index]
    return found


def _avoided_flops(model: ModelSpec, table: PlanTable, repeats: Sequence[Real]) -> Real:
    """FLOP for one token of adapters and matmuls that the backward pass does not need.

    Matrices that read the frozen embedding need no gradient of their input; the executor's
    functions of tensor parallelism and of split backward passes compute it nevertheless.
    """
    kinds = [model.kinds[kind] for kind in model.pattern]
    avoided: Real = np.zeros(len(table))
    for number, kind in enumerate(model.kinds):
        avoided = avoided + kind.token_share * repeats[number] * _last_adapter(model, kind)
    avoided = table.tensor_parallel * avoided
    first = next((kind for kind in kinds if not kind.forward_only), None)
    if first is None or not _input_needs_none(model, first):
        return avoided
    parts = ["attention"]
    if first.parallel_residual:
        mlp = [w for w in first.weights if w.role == "linear" and w.part == "mlp"]
        if all(w.frozen for w in mlp):  # and nothing below it is trained
            avoided = avoided + matmul_flops_per_token(first, mlp)
        else:
            parts.append("mlp")
    reads = [w for w in first.weights if w.role == "linear" and w.part in parts]
    reads = [w for w in reads if w.sharding != "row" and not w.name.endswith(SECOND)]
    latent = {rank for rank in (first.attention.q_lora_rank, first.attention.kv_lora_rank) if rank}
    reads = [w for w in reads if w.features[0] not in latent]
    cut = _adapters_of_cut_matrices(first)
    whole = [w for w in reads if w.sharding == "replicate" and w.name not in cut]
    idle = sum(2.0 * w.numel for w in reads if w not in whole)
    # a decoder's first matrices are of the encoder's sizes
    idle *= 1.0 + bool(model.bridge) * model.target_share
    plain = (table.tensor_parallel == 1) & ~among(table.pipeline_schedule, SPLIT_CODES)
    avoided = avoided + _matmul_flops_of_ranks(whole, table, first)
    return avoided + np.where(plain, idle, 0.0)


def _value_flops(kind: LayerKind, seq_len: Count) -> float:
    """Forward FLOP of the last matmul of a layer's attention cores for one token.

    Scores with values: 2 a e s. Linear attention: the update of the last chunk's state, 2 a C d e
    for a sequence.
    """
    own, rule = kind.attention, kind.attention.delta_rule
    if rule is not None:
        update = 2.0 * rule.chunk * own.num_heads * own.head_dim * own.value_head_dim
        return float(update / np.multiply(1.0, seq_len))
    cores = [kind.attention] + ([kind.cross_attention] if kind.cross_attention else [])
    return float(
        sum(
            2.0 * a.num_heads * a.value_head_dim * np.multiply(1.0, a.keys_of(seq_len))
            for a in cores
        )
    )


def _unneeded_head_gradient(model: ModelSpec) -> float:
    """Backward FLOP for one token of the gradient of the head's input, if no weight needs it."""
    idle = all(model.kinds[kind].forward_only for kind in model.pattern)
    needed = not idle or any(w.part == "norm" and not w.frozen for w in model.head)
    return 0.0 if needed else head_flops_per_token(model)


def _input_needs_none(model: ModelSpec, kind: LayerKind) -> bool:
    """Whether a layer's first matrices need no gradient of their input.

    So it is if neither the embedding nor a norm before them is trained. ``kind``: of the lowest
    layer with a backward pass.
    """
    norms = [w for w in kind.weights if w.part == "norm" and w.shape == (model.hidden_size,)]
    behind = kind.norms_after or all(w.frozen for w in norms)
    return embedding_is_frozen(model) and behind


def _last_matrix(model: ModelSpec, kind: LayerKind) -> float:
    """Forward FLOP of the last matrix of a layer, where recomputation stops before it."""
    if kind.norms_after or model.hidden_dropout > 0:
        return 0.0
    last = _last_row_cut(kind)
    return 2.0 * last.numel if last else 0.0


def _repeated_flops(
    model: ModelSpec, kind: LayerKind, matrices: Sequence[Weight], table: PlanTable
) -> Real:
    """Forward FLOP of matrices that are computed again, for one token.

    Recomputation stops before its last matrix, of a module always, of a layer see ``_last_matrix``;
    every tensor-parallel rank multiplies with a whole small matrix of an adapter.
    """
    if all(w.part == "shared_experts" for w in matrices):  # without their gate
        shared = [w for w in matrices if w.sharding != "replicate"]
        return matmul_flops_per_token(kind, shared[:-1])
    total = _matmul_flops_of_ranks(matrices, table, kind)
    last = _last_row_cut(kind)
    if last is None or last not in matrices:
        return total
    stops = repeats_modules(table.recompute) | bool(_last_matrix(model, kind))
    second = adapter_names(last.name)[1] if last.quantised else ""
    of_second = sum(2.0 * w.numel for w in matrices if w.name == second)
    skipped = 2.0 * last.numel + table.tensor_parallel * of_second
    return total - np.where(stops, skipped, 0.0)


def _last_adapter(model: ModelSpec, kind: LayerKind) -> float:
    """Forward FLOP of adapter B of the last matrix of a layer, if recomputation stops before that.

    Only where the matrix is in 4 bits: it saves no tensor.
    """
    last = _last_row_cut(kind)
    if last is None or not last.quantised or not _last_matrix(model, kind):
        return 0.0
    (second,) = (w for w in kind.weights if w.name == adapter_names(last.name)[1])
    return 2.0 * second.numel


def _last_row_cut(kind: LayerKind) -> Weight | None:
    """Return the last row-cut matrix of a dense feed-forward."""
    rows = [
        w
        for w in kind.weights
        if w.role == "linear" and w.sharding == "row" and w.part == "mlp" and not w.is_adapter
    ]
    return rows[-1] if rows else None
