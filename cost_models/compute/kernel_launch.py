"""Host seconds of kernel launches, and the time that a pass waits for them.

Every operator costs the host a fixed time, whatever its size; the number of operators depends on
the software, on routed experts, adapters, casts to 8 bits, and on torch's DTensor under tensor
parallelism. A captured CUDA graph is one operator; synchronous launches (CUDA_LAUNCH_BLOCKING=1)
hide nothing. Units: seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np

from cost_models.arrays import Real
from cost_models.communication.context_parallel import context_launch_shares
from cost_models.compute.rates import Rates
from cost_models.model.lora import first_adapters
from cost_models.model.spec import DeltaRule, LayerKind, ModelSpec
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import PlanTable
from cost_models.plan.recompute import FULL, by_operator
from cost_models.plan.workload import QUANTISED, Workload
from hardware_profiles.software.trainer import SoftwareProfile

# Degree to which a GPU's work and the host's overlap (``host_wait``). Fitted: GPT of 3 to 16 ms a
# layer under Megatron-LM on one node (shardplan validate --time --only vtrain-single); the same
# value halves the median error of BERT, whose 68 runs were not looked at (7.1 to 3.3 %: --only
# nvidia-bert)
HOST_OVERLAP = 4.0
# of the gradient of a matrix: two views, a matmul, a sum (executor/parallel/tensor_parallel.py,
# executor/ops/deferred_weight_gradients.py)
DEFERRED_OPERATORS = 4.0
# of DTensor's work around a layer whose norms are cut too, where none are, and matrices whose work
# norms of each head cost, between which attention is on DTensors: 1.4 times the layer of seven
# (python -m benchmarks.step_time.dtensor_operators; pytorch/torchtitan:
# torchtitan/models/qwen3/infra/parallelize.py, use_local_output=False)
WITHOUT_SEQUENCE_PARALLEL = 0.68
NORMS_OF_HEADS = 2.8
# of a gated delta rule without its own kernels (transformers 5: torch_chunk_gated_delta_rule),
# forward and backward: beyond the kernels, and for each chunk of a sequence. Counted at torch's
# dispatcher for 64 to 512 tokens
EAGER_RULE = (85.0, 86.0)
EAGER_CHUNK = (37.0, 54.0)


def operator_seconds(view: RankView, operator: float) -> tuple[Real, Real]:
    """Host seconds of launching the operators of a forward and of a backward pass.

    Recomputation of layers launches the forward operators again (with ``selective_ops`` the host
    goes through all of them, and the device skips the matmuls). Operators outside the layers are
    split between the passes like a layer's. Sharded weights, and weights with a separate master
    copy, are handled in groups: every layer, the embedding, the head; a compiled model that nothing
    wraps casts the latter in kernels of its own. With graphs of layers a layer is one operator in
    each pass, with a graph of the iteration nothing is launched between captures but the update. A
    synchronous host also waits for the start of every kernel.
    """
    model, workload, software = view.model, view.workload, view.software
    table, rank, host = view.table, view.rank, view.software.host
    zero = np.zeros(len(table))
    if host.cuda_graphs == "iteration":
        return zero, zero
    layers = sum(rank.kind_counts)
    more = _unfused(model, software, workload, table)
    forward = host.layer_operators_forward + more
    backward = host.layer_operators_backward + more
    outside = host.microbatch_operators / (forward + backward)
    mixed = workload.compute_bytes != workload.master_bytes
    wrapped = software.sharding.blockwise_backward or not software.kernels.pads_matmuls
    outer = 1.0 * rank.first + rank.last + (rank.bridge == "between")
    groups = np.where((table.shard_ranks > 1) | (mixed and wrapped), layers + outer, 0.0)
    around = groups * host.group_operators
    starts_forward, starts_backward = _with_layers(
        view,
        lambda kind: _layer_operators(kind, forward, backward, view),
        outside * forward + around,
        outside * backward + around,
    )
    if host.synchronous:
        operator = operator + host.launch_latency
    return operator * starts_forward, operator * starts_backward


def kernel_gaps(view: RankView) -> tuple[Real, Real]:
    """Seconds of a forward and of a backward pass in which the device runs between two kernels.

        g (k r + o)      g ``host.gap_seconds`` of an operator, k of a layer, r layers, o outside

    A kernel waits until the one before it has drained, whatever its size. Recomputed layers start
    theirs again in the backward pass.

    Source: NVIDIA developer blog, Getting Started with CUDA Graphs: 3.8 us a kernel of 2.9 us with
    launches hidden. Leaves out: kernels of adapters, routed experts, casts, hooks and groups.
    """
    host, table = view.software.host, view.table
    zero = np.zeros(len(table))
    if not host.gap_seconds or host.synchronous or host.cuda_graphs != "none":
        return zero, zero
    once, back = host.layer_operators_forward, host.layer_operators_backward
    outside = host.microbatch_operators / (once + back)
    forward, backward = _with_layers(
        view, lambda kind: (once, back), outside * once + zero, outside * back + zero
    )
    return host.gap_seconds * forward, host.gap_seconds * backward


def _with_layers(
    view: RankView,
    operators: Callable[[LayerKind], tuple[Real, Real]],
    forward: Real,
    backward: Real,
) -> tuple[Real, Real]:
    """Add the operators of a rank's layers to those outside of them, of both passes."""
    repeats = (view.table.recompute == FULL) | by_operator(view.table.recompute)
    for each in view.layers:
        once, back = operators(each.kind)
        again = np.where(repeats, once, 0.0)
        forward = forward + each.count * once
        backward = backward + each.trained * back + each.run_again * again
    return forward, backward


def deferred_launches(view: RankView, operator: float) -> Real:
    """Host seconds of launching the weight gradients of a rank's layers."""
    matrices: Real = 1.0 * sum(
        each.trained * sum(w.is_matrix and not w.frozen for w in each.kind.weights)
        for each in view.layers
    )
    return operator * DEFERRED_OPERATORS * matrices + np.zeros(len(view.table))


def _layer_operators(
    kind: LayerKind, forward: Real, backward: Real, view: RankView
) -> tuple[Real, Real]:
    """Operators of a layer's passes: its own, of context ranks, DTensor, experts, adapters, fp8."""
    host = view.software.host
    if host.cuda_graphs == "layers":
        return np.ones_like(forward), np.ones_like(backward)
    ahead, back = context_launch_shares(view.table)
    forward = forward + host.layer_operators_forward * ahead
    backward = backward + host.layer_operators_backward * back
    if kind.attention.delta_rule is not None:
        ahead, back = _rule_operators(kind.attention.delta_rule, view)
        forward, backward = forward + ahead, backward + back
    wrapped = _cut_matrices(kind, view.table)
    forward = forward + wrapped * host.dtensor_operators_forward
    backward = backward + wrapped * host.dtensor_operators_backward
    fused = view.software.adapters.of_fused_matrices
    adapters = len(first_adapters(kind, of_fused_matrices=fused))
    # two groups each, under FSDP1's SHARD_GRAD_OP, too: it gathers each once in a step
    apart = view.software.sharding.adapters_apart & (view.table.zero_stage >= 2)
    wrapping = np.where(apart & (view.table.shard_ranks > 1), 2.0 * host.group_operators, 0.0)
    forward, backward = forward + adapters * wrapping, backward + adapters * wrapping
    forward = forward + adapters * host.adapter_operators_forward
    backward = backward + adapters * host.adapter_operators_backward
    each: Real = 1.0  # experts with launches of their own
    if kind.feed_forward.num_experts:
        experts = kind.feed_forward.num_experts / view.table.expert_parallel
        forward = forward + host.routing_operators_forward + experts * host.expert_operators_forward
        backward = backward + host.routing_operators_backward
        trained = any(w.role == "expert" and not w.frozen for w in kind.weights)
        of_expert = host.expert_operators_backward if trained else host.expert_operators_forward
        backward = backward + experts * of_expert
        each = experts if host.expert_operators_forward else 1.0
    hooked = _hooked(kind, view.table, each)
    forward = forward + hooked * host.hook_operators_forward
    backward = backward + hooked * host.hook_operators_backward
    rounding, few = view.software.rounding, view.workload.precision in QUANTISED
    if few or rounding.operators_forward:
        matrices = sum(
            each if weight.role == "expert" else 1.0
            for weight in kind.weights
            if weight.is_matrix and len(weight.shape) > 1 and not weight.is_adapter
        )
        forward = forward + matrices * rounding.operators_forward
        backward = backward + matrices * rounding.operators_backward
        if few:
            forward = forward + matrices * host.fp8_operators_forward
            backward = backward + matrices * host.fp8_operators_backward
    return forward, backward


def _rule_operators(rule: DeltaRule, view: RankView) -> tuple[float, float]:
    """Operators of a gated delta rule's passes, beyond those of attention."""
    host, workload = view.software.host, view.workload
    forward, backward = host.rule_operators_forward, host.rule_operators_backward
    if workload.attention_kernel != "eager":
        return forward, backward
    chunks = ceil(workload.seq_len / rule.chunk)
    return (
        forward + EAGER_RULE[0] + EAGER_CHUNK[0] * chunks,
        backward + EAGER_RULE[1] + EAGER_CHUNK[1] * chunks,
    )


def _cut_matrices(kind: LayerKind, table: PlanTable) -> Real:
    """Matrices of a layer that tensor parallelism cuts; fewer where it cuts no norms.

    Norms of each head count as matrices.
    """
    matrices: Real = 1.0 * sum(
        weight.role == "linear" and weight.sharding != "replicate" and len(weight.shape) > 1
        for weight in kind.weights
        if not weight.is_adapter
    )
    if kind.attention.qk_norm:
        matrices = matrices + NORMS_OF_HEADS
    share = np.where(table.sequence_parallel, 1.0, WITHOUT_SEQUENCE_PARALLEL)
    return np.where(table.tensor_parallel > 1, share * matrices, 0.0)


def _hooked(kind: LayerKind, table: PlanTable, each: Real) -> Real:
    """What of a layer hooks are called for: its trained weights; under ZeRO-3 all of its modules.

    A module gathers, waits for and releases its matrix and its bias at once.
    """
    trained: Real = 0.0
    modules: dict[str, Real] = {}
    for weight in kind.weights:
        times = each if weight.role == "expert" else 1.0
        trained = trained + (0.0 if weight.frozen else times)
        modules[weight.name.removesuffix(".bias").removesuffix(".weight")] = times
    return np.where(table.zero_stage >= 3, sum(modules.values()), trained)


def _unfused(
    model: ModelSpec, software: SoftwareProfile, workload: Workload, table: PlanTable
) -> Real:
    """Operators that an unfused softmax adds, where the fused one does not support a b / t."""
    if workload.attention_kernel != "eager" or not software.host.fused_softmax_batch:
        return np.zeros(len(table))
    heads = max(kind.attention.num_heads for kind in model.kinds)
    matrices = 1.0 * table.micro_batch_size * heads / table.tensor_parallel
    refused = np.mod(matrices, software.host.fused_softmax_batch) != 0.0
    return np.where(refused, software.host.unfused_softmax_operators, 0.0)


def host_wait(
    starting: Real,
    device: Real,
    rate: Rates,
    *,
    overlap: float | None = None,
    synchronous: bool = False,
) -> Real:
    """Seconds that a pass waits for its launches.

        (s^g + d^g)^(1/g) - d    s seconds of launches, d of the device, g ``overlap``

    A GPU runs while the host launches the next kernels, but neither is steady: the device idles
    after short kernels, and the host is late after synchronisations. With g = 1 nothing overlaps,
    with an infinite g the shorter of the two is hidden completely; HOST_OVERLAP by default. On a
    CPU, and with synchronous launches, the two add up.

    Source: the form of Qiao et al., Pollux (arXiv:2008.12260), sec. 3.2, for gradients and their
    synchronisation. Leaves out: single kernels, whose order decides how much of the launches is
    hidden.

    >>> from msgspec.structs import replace
    >>> gpu = Rates(1e12, 1e12, 0.0, False)
    >>> round(float(host_wait(1.0, 1.0, gpu)), 3), round(float(host_wait(1.0, 3.0, gpu)), 3)
    (0.189, 0.009)
    >>> float(host_wait(1.0, 3.0, replace(gpu, host_is_device=True)))
    1.0
    """
    adds = rate.host_is_device or synchronous
    return launch_wait(starting, device, adds=adds, overlap=overlap)


def launch_wait(starting: Real, device: Real, *, adds: bool, overlap: float | None = None) -> Real:
    """Seconds that a pass waits for its launches; the formula of ``host_wait``.

    ``adds``: launches and passes follow each other. With all of several passes together a wait is
    no longer than theirs together (Minkowski), for every division of launches and device seconds.

    Source: as ``host_wait``. Leaves out: as ``host_wait``.

    >>> round(float(launch_wait(1.0, 1.0, adds=False)), 3), launch_wait(1.0, 3.0, adds=True)
    (0.189, 1.0)
    """
    if adds:
        return starting
    power = HOST_OVERLAP if overlap is None else overlap
    longer = np.maximum(starting, device)
    share = np.minimum(starting, device) / np.where(longer > 0.0, longer, 1.0)
    waits: Real = longer * (1.0 + share**power) ** (1.0 / power) - device
    return waits
