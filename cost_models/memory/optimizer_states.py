"""Bytes of optimizer states, and of the temporary tensors of the update.

Symbols   n elements of a tensor on a rank   r, c its last two dimensions, l all others together
          s state_bytes, w master_bytes [bytes of an element]
Units     bytes; every argument is one number or one column of a plan table.

Tensors are assumed to divide evenly, as in ``model_states``. ZeRO shards the first dimension
(FSDP2), tensor parallelism its own; a state is sharded like its weights.

Leaves out: step counters and other numbers of a few bytes a tensor.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.arrays import FP32, Count, Flag, Real
from cost_models.communication.volumes import communication_units
from cost_models.memory.ledger import Item, product
from cost_models.memory.model_states import SYMBOLS, optimizer_shards, shares, state_replicas
from cost_models.model.spec import Weight
from cost_models.partition.rank_view import RankView
from cost_models.partition.tensor_sharding import shard_dim, shards_within_experts
from cost_models.plan.plan import PlanTable
from cost_models.plan.workload import PROJECTED, Optimizer, Projection

# bitsandbytes 0.44 and later, optim/optimizer.py (its pull request 1365; 2048 before): a byte an
# element and one fp32 scale for each block; tensors below 4096 elements keep fp32 states, those
# below 100 000 are never paged, and neither are scales
BLOCKS: Final = {8: 256, 4: 128}  # 4 bits: torchao 0.18, optim/adam.py, Adam4bit
MIN_QUANTISED_ELEMENTS: Final = 4096
MIN_PAGED_ELEMENTS: Final = 1e5


class OptimizerTraits(Struct, frozen=True):
    """States that an optimizer keeps for each tensor, and temporary tensors of its update."""

    states: float  # as large as the tensor, of matrices inside layers
    other_states: float  # the same, of all other tensors
    factored: bool = False  # also a row and a column of every matrix (vectors: whole)
    bits: int = 0  # of an element of block-wise quantised states; 0: not quantised
    paged: bool = False  # states live in memory that moves to the host where the device is full
    foreach_copies: float = 0.0  # shard-size copies that an update over lists of tensors makes
    whole_matrices: bool = False  # an update reads whole matrices: gathered, one after the other
    projected: Projection = ""

    @property
    def is_uniform(self) -> bool:
        """Whether all parameters have the same number of state bytes, in every tensor."""
        varies = self.factored or self.bits or self.projected
        return self.states == self.other_states and not varies


OPTIMIZER_TRAITS: Final[dict[Optimizer, OptimizerTraits]] = {
    "sgd": OptimizerTraits(0.0, 0.0),
    "sgd_momentum": OptimizerTraits(1.0, 1.0),
    # Loshchilov, Hutter (arXiv:1711.05101), alg. 2; torch 2.13 optim/adam.py: the square root of
    # the second moments
    "adamw": OptimizerTraits(2.0, 2.0, foreach_copies=1.0),
    # the same, and gradients with the decay added
    "adam": OptimizerTraits(2.0, 2.0, foreach_copies=2.0),
    # You et al. (arXiv:1904.00962), alg. 2
    "lamb": OptimizerTraits(2.0, 2.0, foreach_copies=1.0),
    # Chen et al. (arXiv:2302.06675), alg. 2: the sign of an interpolation is a copy
    "lion": OptimizerTraits(1.0, 1.0, foreach_copies=1.0),
    # bitsandbytes, optim/lion.py: Lion8bit has one state, in blocks
    "lion_8bit": OptimizerTraits(1.0, 1.0, bits=8),
    # Shazeer, Stern (arXiv:1804.04235), alg. 4; torch 2.13 optim/_adafactor.py: the estimate of
    # the second moments is written out
    "adafactor": OptimizerTraits(0.0, 0.0, factored=True, foreach_copies=1.0),
    "adafactor_momentum": OptimizerTraits(1.0, 1.0, factored=True, foreach_copies=1.0),
    # Liu et al. (arXiv:2502.16982), sec. 2.2: momentum of matrices inside layers; embedding, head,
    # norms and biases are AdamW's
    "muon": OptimizerTraits(1.0, 2.0, whole_matrices=True),
    # Dettmers et al. (arXiv:2110.02861), sec. 2
    "adamw_8bit": OptimizerTraits(2.0, 2.0, bits=8),
    "paged_adamw": OptimizerTraits(2.0, 2.0, paged=True),
    "paged_adamw_8bit": OptimizerTraits(2.0, 2.0, bits=8, paged=True),
    # Li et al. (arXiv:2309.01507); torchao 0.18, optim/subclass_4bit.py: one kernel a tensor
    "adamw_4bit": OptimizerTraits(2.0, 2.0, bits=4),
    # Pagliardini et al. (arXiv:2409.03137), sec. 3: a fast and a slow mean; bitsandbytes,
    # optim/ademamix.py: both in one state of twice the size
    "ademamix": OptimizerTraits(3.0, 3.0),
    "ademamix_8bit": OptimizerTraits(3.0, 3.0, bits=8),
    # Zhao et al. (arXiv:2403.03507), alg. 2; galore_torch 1.0, adamw.py and adamw8bit.py
    "galore_adamw": OptimizerTraits(2.0, 2.0, projected=PROJECTED["galore_adamw"]),
    "galore_adamw_8bit": OptimizerTraits(
        2.0, 2.0, bits=8, projected=PROJECTED["galore_adamw_8bit"]
    ),
    # Zhu et al. (arXiv:2412.05270), alg. 1; apollo_torch 1.0.3, apollo.py, random_projector.py.
    # Its rank is 1 in APOLLO-Mini
    "apollo_adamw": OptimizerTraits(2.0, 2.0, projected=PROJECTED["apollo_adamw"]),
}
# torch or apex has one kernel for a whole update of these, and bitsandbytes for its own
FUSED: Final = ("sgd", "sgd_momentum", "adamw", "adam", "lamb")


class StateBytes(Struct, frozen=True):
    """Bytes of states on a rank: those that stay on the device, and those that can leave it."""

    resident: Real
    paged: Real


def quantised_state_bytes(numel: Real, states: float, bits: int) -> tuple[Real, Real]:
    """Bytes and scales of states in blocks: k n b / 8, and 4 k ceil(n / block); fp32 where small.

    A block has 256 elements of 8 bits, or 128 of 4.

    Source: Dettmers et al. (arXiv:2110.02861), sec. 2.1; bitsandbytes optim/optimizer.py; torchao
    0.18, optim/adam.py.

    >>> [float(x) for x in quantised_state_bytes(1 << 20, 2.0, 8)]
    [2097152.0, 32768.0]
    >>> [float(x) for x in quantised_state_bytes(4095, 2.0, 8)]
    [32760.0, 0.0]
    >>> [float(x) for x in quantised_state_bytes(1 << 20, 2.0, 4)]
    [1048576.0, 65536.0]
    """
    small = np.less(numel, MIN_QUANTISED_ELEMENTS)
    elements = np.where(small, 4.0, bits / 8.0) * states * numel
    scales = 4.0 * states * np.ceil(np.divide(numel, BLOCKS[bits]))
    return elements, np.where(small, 0.0, scales)


def factored_numel(shape: tuple[Real, Real, Real]) -> Real:
    """Elements of the row and column factors of l matrices of (r, c): l (r + c).

    Source: Shazeer, Stern, Adafactor (arXiv:1804.04235), sec. 3.

    >>> float(factored_numel((1.0, 4096.0, 11008.0)))
    15104.0
    """
    lead, rows, columns = shape
    return lead * (rows + columns)


def local_shape(weight: Weight, table: PlanTable, zero_stage: Count) -> tuple[Real, Real, Real]:
    """Leading dimensions together, rows and columns of a rank's part; a vector is one row.

    The tensor-parallel dimension over t (experts: over their own ranks, and their number over ep),
    then the first over d from ZeRO-1 on; experts fewer than ranks are sharded within
    (``shards_within_experts``).
    """
    one = np.ones(len(table))
    dims: list[Real] = [float(length) * one for length in weight.shape]
    cut, expert = shard_dim(weight), weight.is_routed_expert
    if cut is not None:
        dims[cut] = dims[cut] / (table.expert_tensor if expert else table.tensor_parallel)
    ranks = table.shard_ranks
    if expert:
        dims[0] = dims[0] / table.expert_parallel
        ranks = np.maximum(1, table.expert_shard_ranks)
    shards = optimizer_shards(ranks, zero_stage)
    inside: Flag = np.zeros(len(table), dtype=bool)
    if weight.role == "expert":
        inside = shards_within_experts(dims[0], dims[1], shards)
        dims[1] = np.where(inside, dims[1] / shards, dims[1])
    dims[0] = np.where(inside, dims[0], dims[0] / shards)
    if len(dims) == 1:
        return one, one, dims[0]
    lead = one
    for length in dims[:-2]:
        lead = lead * length
    return lead, dims[-2], dims[-1]


def is_layer_matrix(weight: Weight) -> bool:
    """Whether Muon updates a tensor: a matrix of a layer, neither embedding nor head."""
    return weight.is_matrix and weight.part not in ("embedding", "head")


def is_projected(traits: OptimizerTraits, weight: Weight) -> bool:
    """Whether a tensor's states are of a projected gradient: of linear layers, not of experts."""
    return bool(traits.projected) and is_layer_matrix(weight) and weight.role == "linear"


def projected_numel(
    projection: Projection, rows: Real, columns: Real, rank: float, gradient_bytes: float
) -> tuple[Real, Real]:
    """Elements of one state of a matrix whose gradient is projected, and of the projector.

        states      k max(r, c)    k = min(rank, r, c)
        projector   k min(r, c)    of singular vectors in fp32 min(r, c)^2: the first k are a view
                                   of all of them

    Source: galore_torch 1.0, galore_projector.py, get_orthogonal_matrix; apollo_torch 1.0.3,
    random_projector.py; storages of their optimizers after a step.

    >>> [float(x) for x in projected_numel("svd", 512.0, 256.0, 16.0, 2.0)]
    [8192.0, 4096.0]
    """
    least, most = np.minimum(rows, columns), np.maximum(rows, columns)
    kept = np.minimum(rank, least)
    views = projection == "svd" and gradient_bytes == FP32
    return kept * most, (least if views else kept) * least


def tensor_states(
    traits: OptimizerTraits,
    weight: Weight,
    shape: tuple[Real, Real, Real],
    state_bytes: float,
    rank: float = 0.0,
) -> StateBytes:
    """States of one tensor: s k n; factored s (k n + l (r + c)); projected; or quantised."""
    lead, rows, columns = shape
    numel = lead * rows * columns
    states = traits.states if is_layer_matrix(weight) else traits.other_states
    projector: Real = 0.0
    if is_projected(traits, weight):
        numel, projector = projected_numel(traits.projected, rows, columns, rank, state_bytes)
    if traits.bits:
        elements, scales = quantised_state_bytes(numel, states, traits.bits)
    else:
        elements = state_bytes * states * numel
        scales = np.zeros_like(elements)
        if traits.factored:
            whole = len(weight.shape) < 2
            scales = state_bytes * (numel if whole else factored_numel(shape))
    leaves = np.greater_equal(numel, MIN_PAGED_ELEMENTS) if traits.paged else False
    scales = scales + state_bytes * projector
    return StateBytes(scales + np.where(leaves, 0.0, elements), np.where(leaves, elements, 0.0))


def rank_states(view: RankView) -> StateBytes:
    """States of all trained tensors of a pipeline rank: k s a parameter, or tensor by tensor."""
    workload, table = view.workload, view.table
    traits = OPTIMIZER_TRAITS[workload.optimizer]
    if traits.is_uniform and not traits.paged:
        each = workload.state_bytes * traits.states
        return StateBytes(each * updated_elements(view), np.zeros(len(table)))
    resident, paged = np.zeros(len(table)), np.zeros(len(table))
    for block in communication_units(view.trained_model, view.rank):
        for weight in block.weights:
            shape = local_shape(weight, table, table.zero_stage)
            found = tensor_states(
                traits, weight, shape, workload.state_bytes, float(workload.optimizer_rank)
            )
            resident = resident + block.repeats * found.resident
            paged = paged + block.repeats * found.paged
    return StateBytes(resident, paged)


def paged_bytes(view: RankView) -> Real:
    """Bytes of states in memory that leaves the device where it is full; 0 of offloaded ones.

    Source: bitsandbytes, functional.py, get_paged: cudaMallocManaged. Their pages are on the device
    from the first update on, since a kernel touches them there.
    """
    if not (view.on_gpu and OPTIMIZER_TRAITS[view.workload.optimizer].paged):
        return np.zeros(len(view.table))
    paged: Real = np.where(view.table.offloads_optimizer, 0.0, rank_states(view).paged)
    return paged


def optimizer_rows(view: RankView) -> list[Item]:
    """States on the device: k s n where every parameter has as many; offloaded ones leave it."""
    workload, table, params = view.workload, view.table, view.parameters
    traits, offloads = OPTIMIZER_TRAITS[workload.optimizer], table.offloads_optimizer
    name = f"states of {workload.optimizer}"
    if not traits.is_uniform or traits.paged:
        size = np.where(offloads, 0.0, rank_states(view).resident)
        return [Item("optimizer", name, size, formula="k s of every tensor")]
    each, rows = ("k s", workload.state_bytes * traits.states, "bytes"), []
    of_all = shares(params.total, params.expert_total, table)
    for (symbol, divided, unit), (numel, ranks) in zip(SYMBOLS, of_all, strict=False):
        elements = (symbol, np.where(offloads, 0.0, numel), unit)
        shared = optimizer_shards(ranks, table.zero_stage) * state_replicas(view)
        shards = (divided, shared, "ranks")
        rows.append(product("optimizer", name, each, elements, shards))
    return rows


def updated_elements(view: RankView) -> Real:
    """Elements that a rank's optimizer updates: P / d from ZeRO-1 on (``state_replicas``: P / d r).

    Separately sharded experts have a d of their own.
    """
    params, table = view.parameters, view.table
    parts = shares(params.total, params.expert_total, table)
    of_replica = sum(
        (numel / optimizer_shards(ranks, table.zero_stage) for numel, ranks in parts),
        start=np.zeros(len(table)),
    )
    return of_replica / state_replicas(view)


def group_of_update(view: RankView) -> Real:
    """Elements that a rank updates at once: all of its own, under DeepSpeed's ZeRO-3 at most S.

    In the backward pass a tensor as its gradient arrives: of a layer, or of either end, at most.
    """
    count, most = updated_elements(view), view.software.optimizer.group_elements
    if view.software.optimizer.in_backward:
        params = view.parameters
        ends = np.maximum(params.embedding, params.head)
        return np.minimum(count, np.maximum(params.largest_layer, ends))
    if not most:
        return count
    grouped: Real = np.where(view.table.zero_stage >= 3, np.minimum(count, most), count)
    return grouped


def update_bytes(view: RankView) -> Real:
    """Temporary bytes of the update, in addition to weights, gradients and states.

        fused kernel       0
        over lists         s copies n of all n that the rank updates at once
        tensor by tensor   2 s n of the largest tensor: the root and its quotient; 3 s n of a
                           layer's largest, as the quotient of the one before it still lives;
                           of a flat partition (``group_of_update``) 2 s n of all of it
        whole matrices     w n + 4 n + 4 min(r, c)^2 of the largest one: the update, two bf16
                           iterates and their two products with themselves
        projected          of the largest tensor: ``_projection_bytes``

    Source: torch 2.13, optim/adam.py, _adafactor.py, _muon.py (Newton-Schulz).
    """
    workload, software = view.workload, view.software
    traits = OPTIMIZER_TRAITS[workload.optimizer]
    if traits.projected:
        return _projection_bytes(view)
    if traits.whole_matrices:
        return _whole_matrix_bytes(view)
    fused = software.optimizer.fused and workload.optimizer in FUSED
    if software.optimizer.loops and not fused:
        flat = 2.0 * group_of_update(view)
        elements = flat if software.optimizer.flat else _elements_of_a_loop(view)
        return workload.state_bytes * traits.foreach_copies * elements
    return workload.state_bytes * (0.0 if fused else traits.foreach_copies) * group_of_update(view)


def _elements_of_a_loop(view: RankView) -> Real:
    """Elements of the temporaries of an update that takes one tensor after the other."""
    largest = np.zeros(len(view.table))
    for block in communication_units(view.trained_model, view.rank):
        for weight in block.weights:
            lead, rows, columns = local_shape(weight, view.table, view.table.zero_stage)
            copies = (3.0 if is_layer_matrix(weight) else 2.0) * np.greater(block.repeats, 0)
            largest = np.maximum(largest, copies * lead * rows * columns)
    return largest


def _whole_matrix_bytes(view: RankView) -> Real:
    workload, table = view.workload, view.table
    largest = np.zeros(len(table))
    for block in communication_units(view.trained_model, view.rank):
        for weight in filter(is_layer_matrix, block.weights):
            rows, columns = (float(length) for length in weight.shape[-2:])
            numel = rows * columns
            temporary = workload.master_bytes * numel + 4.0 * numel
            largest = np.maximum(largest, temporary + 4.0 * min(rows, columns) ** 2)
    return largest


def _projection_bytes(view: RankView) -> Real:
    """Temporary bytes of updates with projected gradients, tensor by tensor.

        singular vectors   4 (2 n + min(r, c)^2), and 4 n more for 16 bits: copies of the gradient
                           in fp32, the second of which is factorised, and all vectors
        random             2 w n: the scaled gradient, and its quotient by the limiter
        other tensors      2 s n: the root and its quotient

    Source: galore_torch 1.0; apollo_torch 1.0.3; torch 2.13, linalg.svd (it factorises a copy).
    Leaves out: cuSOLVER's workspace.
    """
    workload, table = view.workload, view.table
    traits, master = OPTIMIZER_TRAITS[workload.optimizer], workload.master_bytes
    largest = np.zeros(len(table))
    for block in communication_units(view.trained_model, view.rank):
        for weight in block.weights:
            lead, rows, columns = local_shape(weight, table, table.zero_stage)
            numel = lead * rows * columns
            size = 2.0 * (0.0 if traits.bits else workload.state_bytes) * numel
            if is_projected(traits, weight):
                size = 2.0 * master * numel
                if traits.projected == "svd":
                    copies = 2.0 if master == FP32 else 3.0
                    size = FP32 * (copies * numel + np.minimum(rows, columns) ** 2)
            largest = np.maximum(largest, np.where(np.greater(block.repeats, 0), size, 0.0))
    return largest
