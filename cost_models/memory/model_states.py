"""Bytes of weights, gradients and optimizer state on one accelerator.

Symbols   P num_params [parameters on this rank: its pipeline stages, its tensor-parallel share]
          d shard_ranks, over which ZeRO shards   z zero_stage {0..3}   m num_microbatches
          c compute_bytes, w master_bytes [bytes of an element]
          g gradient_bytes [of an element]
Units     every function returns bytes; every argument is one number or one column of a plan table.

States of the optimizer: ``optimizer_states``.

Leaves out: ranks with smaller shards, where sizes do not divide evenly.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cost_models.activations.fp8 import (
    fp8_weight_bytes,
    matrices_in_few_bits,
    trained_in_few_bits,
)
from cost_models.arrays import Count, Flag, Real, holds
from cost_models.communication.zero_plus_plus import secondary_bytes
from cost_models.memory.ledger import Item, either, product
from cost_models.model.lora import has_frozen
from cost_models.partition.frozen_weights import (
    frozen_bytes,
    frozen_layer_bytes,
    offloads_frozen,
    whole_scale_bytes,
)
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import PlanTable
from cost_models.plan.workload import QUANTISED

MASTER: Final = "master weights"
SHARDED_MASTER: Final = "sharded master weights"
# elements, ranks that share them, and their unit: of all weights, and of experts
SYMBOLS: Final = (("P", "/d", "parameters"), ("E", "/d'", "expert parameters"))


def weight_rows(
    num_params: Real,
    shard_ranks: Count,
    zero_stage: Count,
    compute_bytes: float,
    master_bytes: float,
    *,
    experts: bool = False,
    in_few_bits: Real = 0.0,
    replicas: Real = 1.0,
) -> list[Item]:
    """Weights in the precision of the matmuls, and master weights stored separately from them.

        z <= 2   c P, and w P / (d if z >= 1) of master weights; under z = 0 in mixed precision only
        z = 3    w P / d r

    ``in_few_bits``: elements without a copy in that precision (``matrices_in_few_bits``).
    ``replicas``: those that divide the shards of z = 3 among them (``state_replicas``).

    Source: ZeRO sec. 5 (P_os+g+p); FSDP keeps the shards in master precision and casts when it
    gathers (Zhao et al., arXiv:2304.11277, sec. 4.4). ``experts``: sharded over ranks of their own.
    """
    numel, ranks, unit = SYMBOLS[experts]
    sharded, mixed = np.greater_equal(zero_stage, 3), compute_bytes != master_bytes
    params = np.multiply(1.0, num_params)
    apart = np.where(np.equal(zero_stage, 0), float(mixed), np.where(sharded, 0.0, 1.0)) * params
    c, w = ("c", compute_bytes, "bytes"), ("w", master_bytes, "bytes")
    whole, shard = np.where(sharded, 0.0, params - in_few_bits), np.where(sharded, params, 0.0)
    name = SHARDED_MASTER if mixed else "sharded weights"
    divided = (ranks, optimizer_shards(shard_ranks, zero_stage), "ranks")
    return [
        product("weights", "weights in compute precision", c, (numel, whole, unit)),
        product("weights", name, w, (numel, shard, unit), (ranks, shard_ranks * replicas, "ranks")),
        product("weights", MASTER, w, (numel, apart, unit), divided),
    ]


def rank_weights(view: RankView) -> list[Item]:
    """All copies of a rank's weights: trained, fp32 master, frozen, ZeRO++'s shards, fp8.

    DeepSpeed's ZeRO-3 has shards in compute precision, too: c P / d; its fp32 weights leave with
    offloaded states (``offloads_masters``). FSDP1 without sharding has the
    fp32 weights alone (``casts_unsharded``). Of offloaded weights, frozen ones too where they are
    sharded, only the shards of the running and of the next layer: 2 w P_layer / d. A tensor that
    one rank holds alone, in one precision, is not sharded: its ZeRO stage is 0.
    """
    workload, table, params = view.workload, view.table, view.parameters
    compute, master = workload.compute_bytes, workload.master_bytes
    sharding, rows = view.software.sharding, list[Item]()
    for number, (numel, ranks) in enumerate(shares(params.total, params.expert_total, table)):
        stage = np.where((ranks > 1) | (compute != master), table.zero_stage, 0)
        if sharding.casts_unsharded:
            ranks = np.where(table.zero_stage == 0, 1, ranks)
            stage = np.where(table.zero_stage == 0, 3, stage)
        few = matrices_in_few_bits(view, experts=number > 0)
        stored = trained_in_few_bits(view, experts=number > 0)
        if holds(stored):
            symbol, divided, unit = SYMBOLS[number > 0]
            each = ("b", view.software.fp8.trained_bytes, "bytes")
            shards = (divided, np.where(stage >= 3, ranks, 1), "ranks")
            rows.append(
                product("weights", "matrices in few bits", each, (symbol, stored, unit), shards)
            )
        rows += weight_rows(
            numel - stored,
            ranks,
            stage,
            compute,
            master,
            experts=number > 0,
            in_few_bits=few,
            replicas=state_replicas(view),
        )
        if sharding.compute_shards and compute != master:
            symbol, divided, unit = SYMBOLS[number > 0]
            count = (symbol, np.where(stage >= 3, numel, 0.0), unit)
            each = ("c", compute, "bytes")
            name = "shards in compute precision"
            rows.append(product("weights", name, each, count, (divided, ranks, "ranks")))
    if view.software.optimizer.offloads_masters and holds(table.offloads_optimizer):
        stay = np.logical_not(table.offloads_optimizer)
        rows = [either(stay, row) if row.name in (MASTER, SHARDED_MASTER) else row for row in rows]
    offloads = table.offloads_weights
    if holds(offloads):
        fetched = product(
            "weights",
            "shards in transfer of the layer that runs and the next one",
            ("2 w", 2.0 * master, "bytes"),
            ("P_layer", params.largest_layer, "parameters"),
            ("/d", np.maximum(1, table.shard_ranks), "ranks"),
        )
        rows = [either(~offloads, row) for row in rows] + [either(offloads, fetched)]
    if holds(table.secondary_ranks > 1):
        shared = params.total - params.expert_total
        size = secondary_bytes(shared, compute, table)
        rows.append(Item("weights", "secondary copy", size, formula="c · P / n"))
    if workload.precision in QUANTISED:
        size = fp8_weight_bytes(view)
        rows.append(
            Item(
                "weights",
                f"{workload.precision} copies",
                size,
                formula="copies · P of the matrices",
            )
        )
    if has_frozen(view.model):
        size = frozen_bytes(view)
        stays = Item("weights", "frozen base", size, formula="bytes of the frozen weights")
        leaves = offloads_frozen(view)
        rows.append(either(np.logical_not(leaves), stays) if holds(leaves) else stays)
        if holds(leaves):
            layers = 2.0 * frozen_layer_bytes(view)
            name = "frozen shards in transfer"
            moved = Item("weights", name, layers, formula="2 · a layer's shard")
            scales = Item("weights", "scales of the frozen base", whole_scale_bytes(view))
            rows += [either(leaves, row) for row in (moved, scales) if holds(row.size > 0.0)]
    return rows


def shares(total: Real, experts: Real, table: PlanTable) -> list[tuple[Real, Count]]:
    """Return elements and the ranks that share them: all but separate experts, and these if any."""
    if not holds(experts):
        return [(total, table.shard_ranks)]
    return [
        (total - experts, table.shard_ranks),
        (experts, np.maximum(1, table.expert_shard_ranks)),
    ]


def state_replicas(view: RankView) -> Real:
    """Replicas of ZeRO-3's shards that divide the optimizer's work among them: r, else 1.

    Source: InternLM/InternEvo: internlm/core/context/process_group_initializer.py, ZeRO-1 within
    the ranks with the same shards of weights (weight_data).
    """
    spreads = (view.table.zero_stage >= 3) & view.software.sharding.states_over_replicas
    return np.where(spreads, 1.0 * view.table.dp_replicate, 1.0)


def optimizer_shards(shard_ranks: Count | Real, zero_stage: Count) -> Real:
    """Ranks that share the optimizer's work: d from ZeRO-1 on, else 1."""
    return np.where(np.greater_equal(zero_stage, 1), np.multiply(1.0, shard_ranks), 1.0)


def accumulated_gradients(
    num_params: Real,
    shard_ranks: Count,
    zero_stage: Count,
    gradient_bytes: Real,
    *,
    accumulates: Flag,
    defers_reduction: Flag,
    experts: bool = False,
) -> Item:
    """Gradients that earlier micro-batches have left when the last one starts its backward pass.

        0                        one micro-batch
        g P                      z <= 1, or where the trainer reduces at the last micro-batch only
        g P / d                  z >= 2

    torch's pipeline stages reduce at the last micro-batch whatever the ZeRO stage
    (``defers_reduction``; torch 2.13, distributed/pipelining/stage.py, REDUCE_GRAD).

    Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), sec. 5.2.
    """
    sharded = np.logical_and(np.greater_equal(zero_stage, 2), np.logical_not(defers_reduction))
    shards = np.where(sharded, np.multiply(1.0, shard_ranks), 1.0)
    left = np.where(accumulates, np.multiply(1.0, num_params), 0.0)
    name = "gradients of finished micro-batches"
    return gradients(name, gradient_bytes, left, shards, experts=experts)


def reduced_gradients(
    num_params: Real,
    shard_ranks: Count,
    zero_stage: Count,
    gradient_bytes: float,
    *,
    experts: bool = False,
) -> Item:
    """Gradients that the optimizer reads: g P, or its shard from ZeRO-1 on."""
    shards = optimizer_shards(shard_ranks, zero_stage)
    return gradients("reduced gradients", gradient_bytes, num_params, shards, experts=experts)


def gradients(
    name: str,
    each: Real,
    elements: Real,
    shards: Real = 1.0,
    *,
    symbol: str = "g",
    experts: bool = False,
) -> Item:
    """Return g P / shards; ``symbol``: that of the bytes of an element."""
    letter, divided, unit = SYMBOLS[experts]
    numel = (letter, np.multiply(1.0, elements), unit)
    return product("gradients", name, (symbol, each, "bytes"), numel, (divided, shards, "ranks"))
