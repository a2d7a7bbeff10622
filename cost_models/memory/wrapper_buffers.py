"""Buffers of data-parallel wrappers: buckets of DDP and DeepSpeed, tensors that exist twice.

Symbols   P trained elements of a rank   d ranks that ZeRO shards over   z ZeRO stage
          g bytes of a kept gradient   c compute_bytes   w master_bytes   h hidden size
Units     bytes; columns of a plan table. The figures are those of a trainer's engines.

Source: torch 2.13, csrc/distributed/c10d/reducer.cpp (initialize_buckets: a tensor as large as the
bucket's gradients, which are copied into it unless they are views of it); DeepSpeed,
deepspeed/runtime/zero/stage_1_and_2.py (setup_buckets, step), stage3.py
(_setup_for_real_optimizer, _prepare_fp32_grad_for_sub_group), partitioned_param_coordinator.py
(__params_to_release) and bf16_optimizer.py. Leaves out: the fp64 copy of one gradient while its
norm is computed; parameters below ZeRO-3's persistence threshold, which stay whole.
"""

from __future__ import annotations

import numpy as np

from cost_models.activations.embedding_and_head import loss_in_compute_precision
from cost_models.arrays import FP32, Flag, Real
from cost_models.memory.ledger import (
    EMBEDDING,
    LAST_LAYER,
    LATER_BACKWARD,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    OPTIMIZER,
    Item,
    product,
)
from cost_models.memory.optimizer_states import group_of_update
from cost_models.model.lora import frozen_part, has_frozen
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.rank_view import RankView
from cost_models.plan.recompute import FULL


def wrapper_rows(view: RankView) -> list[Item]:
    """Return the buffers of a rank's wrapper that its trainer's engines name.

        DDP's buckets        B g P       z = 0, d > 1; from the first step on
        reduce buckets       c E         z >= 1; during a backward pass, of ZeRO-3 always
        weights kept whole   c (min(P, L) - P_layer)   z = 3; not released before the backward pass;
                                                       P with sharded frozen weights
        16-bit gradients     c P         next to whole fp32 ones, some until the next backward pass
        outputs of replicas  d (l V + 2 c k) b s   gathered before the backward pass (DataParallel)

    E elements of a bucket, given or a multiple of h^2; L weights that may stay gathered; l bytes of
    a logit, k elements of a token's keys in all layers that keep them. Source: the module's.
    """
    software, table, params = view.software, view.table, view.parameters
    gradients, sharding, workload = software.gradients, software.sharding, view.workload
    compute, rows = workload.compute_bytes, list[Item]()
    zero, several = table.zero_stage, table.shard_ranks > 1

    def add(
        name: str, symbol: str, each: float, letter: str, elements: Real, *lives: int, **more: float
    ) -> None:
        unit = "elements" if letter == "E" else "parameters"
        copies = [(sign, number, "copies") for sign, number in more.items()]
        row = product("buffers", name, *copies, (symbol, each, "bytes"), (letter, elements, unit))
        rows.append(row.during(*lives) if lives else row)

    if gradients.bucket_copies:
        kept = workload.gradient_bytes(in_master_precision=gradients.in_master_precision)
        whole = _where((zero == 0) & several, params.total)
        add("DDP's buckets", "g", kept, "P", whole, B=gradients.bucket_copies)
    if elements := bucket_elements(view):
        # one rank is at no ZeRO stage, but its optimizer has the buckets of the trainer's stage
        stage = np.where(several, zero, sharding.largest_zero_stage)
        passing = _where((stage >= 1) & (stage < 3), elements)
        add("reduce buckets", "c", compute, "E", passing, LOSS_BACKWARD, EMBEDDING)
        add("reduce buckets", "c", compute, "E", _where(stage >= 3, elements))
    if sharding.live_elements:
        total, layer = _gathered_elements(view)
        beyond = np.minimum(total, sharding.live_elements) - layer
        gathers = several | table.offloads_weights  # one rank fetches from the host
        kept_whole = _where((zero >= 3) & gathers, np.maximum(0.0, beyond))
        name = "weights that are not released"
        add(name, "c", compute, "L", kept_whole, LOSS_FORWARD, LATER_BACKWARD)
    if gradients.in_both_precisions:
        name, accumulated = "gradients in compute precision", table.num_microbatches > 1
        stays = gradients.kept_after_backward
        add(name, "c", compute, "P", params.total, LAST_LAYER, OPTIMIZER if stays else EMBEDDING)
        add(name, "c", compute, "P", _where(accumulated & stays, params.total), LOSS_FORWARD)
    if sharding.gathers_outputs:
        size = _where((zero == 0) & several, table.shard_ranks * _output_bytes(view))
        formula = "d · b·s · (l V + 2 c k)"
        outputs = Item("buffers", "outputs of all replicas", size, formula=formula)
        rows.append(outputs.during(LOSS_FORWARD))
    return rows


def _output_bytes(view: RankView) -> Real:
    """Bytes that a replica returns: logits, and keys and values unless layers are checkpointed."""
    model, table, compute = view.model, view.table, view.workload.compute_bytes
    each = compute if loss_in_compute_precision(view) else max(FP32, compute)
    widths = [
        kind.token_share * kind.attention.num_kv_heads * kind.attention.head_dim
        for kind in model.kinds
    ]
    keys = sum(widths[kind] for kind in model.pattern)
    cached = np.where(table.recompute == FULL, 0.0, 2.0 * compute * keys)
    found: Real = view.tokens * (model.target_share * each * model.vocab_size + cached)
    return found


def bucket_elements(view: RankView) -> float:
    """Elements of a trainer's reduce buckets: given, and a multiple of h^2 (transformers' auto)."""
    sharding = view.software.sharding
    return sharding.bucket_elements + sharding.bucket_hidden_squares * view.model.hidden_size**2


def update_with_copies(view: RankView, update: Real) -> Real:
    """Bytes of the update with gradients, or states of few bits, that are cast for it.

        max(u n, t + (w - g) n)    n = P / d
        max(u S, t + w S)          under ZeRO-3, at most S elements at once

    u bytes of the copies of an element while it is cast; then the fp32 gradient replaces the kept
    one, and the optimizer has its temporaries t, ``update``. Source: DeepSpeed, stage_1_and_2.py,
    step: flatten(averaged_gradients), then to(float32), while these still live; a single rank's
    partition is the whole; stage3.py: grad_partitions_flat_buffer stays. Moments of 8 bits:
    Transformer Engine, fused_adam.py, step.
    """
    optimizer, workload, table = view.software.optimizer, view.workload, view.table
    if not optimizer.copied_bytes:
        return update
    precision = view.software.gradients.in_master_precision
    kept = workload.gradient_bytes(in_master_precision=precision)
    count = group_of_update(view)
    freed = np.where(table.zero_stage >= 3, 0.0, kept)
    cast = update + np.maximum(0.0, workload.master_bytes - freed) * count
    copied = np.maximum(optimizer.copied_bytes * count, cast)
    return np.where((table.zero_stage >= 1) | (table.shard_ranks <= 1), copied, update)


def _gathered_elements(view: RankView) -> tuple[Real, Real]:
    """Elements that a rank gathers in a step, and of the largest layer: sharded frozen ones too."""
    params, frozen = view.parameters, frozen_part(view.model, quantised=False)
    if not (view.software.sharding.frozen_weights and has_frozen(view.model)):
        return params.total, params.largest_layer
    others = rank_parameters(frozen, view.rank, view.table)
    return params.total + others.total, params.largest_layer + others.largest_layer


def _where(flag: Flag, value: Real) -> Real:
    found: Real = np.where(flag, value, 0.0)
    return found
