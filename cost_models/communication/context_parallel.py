"""Context parallelism: traffic, exposed seconds and buffers if ranks share a sequence's tokens.

Symbols   b micro_batch_size   S seq_len   n context_parallel   s = S / n tokens of a rank
          t tensor_parallel   a, k query and key heads   d head_dim   e value_head_dim
          m num_microbatches   c compute_bytes   x of sums and gradients (``sum_bytes``)
Units     bytes and seconds; every function broadcasts over plan columns.

Methods as in executor/parallel/context_parallel.py. Causal work is balanced: with ring and
allgather every rank has one chunk from the start and one from the end of a sequence (zigzag), with
ulysses all tokens of some heads.

Leaves out: ranks with unequal work, as under masks of packed documents; the lower rate of a flash
kernel on blocks of few hundred keys.
"""

from __future__ import annotations

import numpy as np

from cost_models.arrays import FP32, Count, Flag, Real, holds
from cost_models.communication.traffic import Traffic, no_traffic
from cost_models.model.spec import Attention
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import CONTEXT_METHODS, PlanTable
from cost_models.plan.recompute import CORE, FULL, repeats_module
from hardware_profiles.software.trainer import SoftwareProfile

RING, ULYSSES, ALLGATHER = (
    CONTEXT_METHODS.index(name) for name in ("ring", "ulysses", "allgather")
)

# Launches that context parallelism adds to a layer's, forward and backward, as shares of its own:
# of a block of keys (kernel, exchange, sums), and of the rest. Counted for the executor's layer of
# llama, 73 and 135 operators, on 1, 2 and 4 ranks (python -m benchmarks.step_time.count_operators)
BLOCK_LAUNCHES = 25.0 / 73.0, 37.0 / 135.0
RING_LAUNCHES = 8.0 / 73.0, 8.0 / 135.0
ULYSSES_LAUNCHES = 43.0 / 73.0, 40.0 / 135.0


def is_blockwise(table: PlanTable) -> Flag:
    """Whether attention is accumulated over blocks of keys: ring and allgather."""
    blockwise: Flag = (table.context_parallel > 1) & (table.context_parallel_method != ULYSSES)
    return blockwise


def sum_bytes(compute_bytes: float, software: SoftwareProfile) -> float:
    """Bytes an element of sums over blocks, and of the gradients of keys that ranks exchange."""
    return max(FP32, compute_bytes) if software.communication.sums_blocks_in_fp32 else compute_bytes


def exchanged_key_heads(attention: Attention, table: PlanTable) -> Real:
    """Key heads in an all_to_all: k / t, or as many as ranks if those are more."""
    heads = 1.0 * attention.num_kv_heads / table.tensor_parallel
    ranks = 1.0 * table.context_parallel
    return np.where(np.mod(heads, ranks) == 0.0, heads, ranks)


def key_value_bytes(attention: Attention, width: float, table: PlanTable) -> Real:
    """Bytes of a token's keys and values on a tensor-parallel rank: width k (d + e) / t."""
    heads = 1.0 * attention.num_kv_heads / table.tensor_parallel
    return width * heads * (attention.head_dim + attention.value_head_dim)


def ulysses_saved_bytes(attention: Attention, compute_bytes: float, table: PlanTable) -> Real:
    """Bytes a token that ulysses saves in addition to queries, keys, values and output.

    Repeated keys and values, and the output by heads in addition to the output by tokens, which the
    next matrix saves:  c (k' - k / t) (d + e) + c a e / t

    Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509), sec. 3; tensors that autograd saves
    of executor/parallel/context_parallel.py.
    """
    ulysses = (table.context_parallel > 1) & (table.context_parallel_method == ULYSSES)
    more = exchanged_key_heads(attention, table) - attention.num_kv_heads / table.tensor_parallel
    both = attention.head_dim + attention.value_head_dim
    output = attention.num_heads * attention.value_head_dim / (1.0 * table.tensor_parallel)
    return np.where(ulysses, compute_bytes * (more * both + output), 0.0)


def context_traffic(view: RankView) -> dict[tuple[str, str], Traffic]:
    """Traffic of keys and values of every layer and micro-batch; K = b s k (d + e) / t elements.

        ring       send            c K   n - 1 forward, n - 1 backward
                                   x K   n backward: the gradients, once around
        allgather  all_gather    n c K   one forward, one backward
                   reduce_scatter n x K  one backward
        ulysses    all_to_all            c b s (a d + k' (d + e)) / t  and  c b s a e / t, each once
                                         forward and once backward; k' = n t if n > k / t

    Recomputation repeats the forward part, without the last all_to_all if only the attention core
    is recomputed. Forward-only (frozen) layers have that part alone, once.

    Source: Liu et al., Ring Attention (arXiv:2310.01889), sec. 3; Llama 3 (arXiv:2407.21783), sec.
    3.3.2 (all-gather); DeepSpeed-Ulysses (arXiv:2309.14509), sec. 3. The executor's tests count the
    same bytes.
    """
    table, compute, tokens = view.table, view.compute_bytes, view.tokens
    kinds = ("send", "all_gather", "reduce_scatter", "all_to_all")
    if not holds(table.context_parallel > 1):
        return {("context", kind): no_traffic(len(table)) for kind in kinds}
    summed = sum_bytes(compute, view.software)
    n, t = 1.0 * table.context_parallel, table.tensor_parallel
    core = np.where((table.recompute == FULL) | repeats_module(table.recompute, CORE), 1.0, 0.0)
    full = np.where(table.recompute == FULL, 1.0, 0.0)
    zero: Real = np.zeros(len(table))
    sends = gathers = scatters = exchanges = Traffic(zero, zero)
    parts = [(layers.recomputed, 1.0, layers.kind) for layers in view.layers]
    parts += [(layers.count - layers.recomputed, 0.0, layers.kind) for layers in view.layers]
    for count, again, kind in parts:
        attention, repeats = kind.attention, count * (1.0 * table.num_microbatches)
        back = 0.0 if kind.forward_only else 1.0
        twice = 1.0 + again * core * back  # forward passes
        narrow = tokens * key_value_bytes(attention, compute, table)
        wide = tokens * key_value_bytes(attention, summed, table)
        hops = (n - 1.0) * (twice + back)
        sends += Traffic(hops + back * n, hops * narrow + back * n * wide).times(repeats)
        gathers += Traffic(twice + back, (twice + back) * n * narrow).times(repeats)
        scatters += Traffic(zero + back, back * n * wide).times(repeats)
        heads = 1.0 * attention.num_heads / t
        keys = exchanged_key_heads(attention, table) * (
            attention.head_dim + attention.value_head_dim
        )
        before = compute * tokens * (heads * attention.head_dim + keys)
        after = compute * tokens * heads * attention.value_head_dim
        outputs = 1.0 + back + again * full * back
        exchanges += Traffic(
            twice + back + outputs, (twice + back) * before + outputs * after
        ).times(repeats)

    def used(method: int) -> Real:
        here = (table.context_parallel > 1) & (table.context_parallel_method == method)
        return np.where(here, 1.0, 0.0)

    found = sends, gathers, scatters, exchanges
    methods = RING, ALLGATHER, ALLGATHER, ULYSSES
    return {
        ("context", kind): traffic.times(used(method))
        for kind, traffic, method in zip(kinds, found, methods, strict=True)
    }


def exposed_context_seconds(
    communication: Real, core_forward: Real, core_backward: Real, view: RankView, *, overlaps: bool
) -> tuple[Real, Real]:
    """Seconds of a micro-batch's context traffic that attention does not hide: forward, backward.

    A ring sends the next block while the current one is computed: n - 1 of n blocks are hidden, and
    the last gradients are exposed. Forward and backward passes share the traffic in proportion to
    their messages (n - 1 blocks; n - 1 blocks and n gradients of x / c the size). Gathers and
    exchanges are not overlapped; nor is anything on a CPU, whose cores do both.
    """
    table = view.table
    n = 1.0 * table.context_parallel
    wide = sum_bytes(view.compute_bytes, view.software) / view.compute_bytes
    core = (table.recompute == FULL) | repeats_module(table.recompute, CORE)
    again = np.where(core, view.rank.recomputed_share, 0.0)
    forward = (n - 1.0) * (1.0 + again)
    backward = (n - 1.0) + n * wide
    share = forward / np.maximum(1.0, forward + backward)
    hidden = (n - 1.0) / n
    ahead = np.maximum(0.0, share * communication - hidden * (1.0 + again) * core_forward)
    back = np.maximum(
        wide / np.maximum(1.0, backward) * (1.0 - share) * communication,
        (1.0 - share) * communication - hidden * core_backward,
    )
    ring = table.context_parallel_method == RING
    hides = ring & overlaps
    return (
        np.where(hides, ahead, share * communication),
        np.where(hides, back, (1.0 - share) * communication),
    )


def context_buffer_bytes_per_token(
    attention: Attention, compute_bytes: float, wide: float, table: PlanTable
) -> tuple[Real, Real]:
    """Bytes a token of a rank's exchange buffers in addition to saved tensors: forward, backward.

    Measured with the executor; K = k (d + e) / t, q = a d / t, o = a e / t elements a token; x is
    ``wide``

        ring       forward   2 c K (this block and the next one)   + x o (the sum)   + c o
                   backward  2 c K + 2 x K (gradients computed, and in transfer) + c K + x q + c q
        allgather  forward   n c K + c K + x o + c o
                   backward  n c K + n x K + x q + c q + c K
        ulysses    forward   2 c (q + k' (d + e))   backward twice that

    The last terms are one block's own output and gradients.

    Source: tensors alive in executor/parallel/context_parallel.py, as traced.
    """
    n, t = 1.0 * table.context_parallel, 1.0 * table.tensor_parallel
    query = attention.num_heads * attention.head_dim / t
    output = attention.num_heads * attention.value_head_dim / t
    keys = key_value_bytes(attention, 1.0, table)
    sums = (wide + compute_bytes) * output
    back = (wide + compute_bytes) * query + compute_bytes * keys
    blocks = np.where(table.context_parallel_method == RING, 2.0, n)
    own = np.where(table.context_parallel_method == RING, 0.0, 1.0)
    forward = (blocks + own) * compute_bytes * keys + sums
    backward = blocks * (compute_bytes + wide) * keys + back
    moved = exchanged_key_heads(attention, table) * (attention.head_dim + attention.value_head_dim)
    exchange = 2.0 * compute_bytes * (query + moved)
    ulysses = table.context_parallel_method == ULYSSES
    active = np.where(n > 1.0, 1.0, 0.0)
    return (
        active * np.where(ulysses, exchange, forward),
        active * np.where(ulysses, 2.0 * exchange, backward),
    )


def context_launch_shares(table: PlanTable) -> tuple[Real, Real]:
    """Launches that context parallelism adds to a layer's, as shares: forward and backward.

        ring, allgather   n of a block each, and those around them
        ulysses           those of the exchanges

    Source: ``python -m benchmarks.step_time.count_operators`` over executor/attention/ring.py and
    ulysses.py.
    """
    n, blockwise = 1.0 * table.context_parallel, is_blockwise(table)
    found = [
        np.where(blockwise, ring + n * block, np.where(n > 1.0, ulysses, 0.0))
        for ring, block, ulysses in zip(
            RING_LAUNCHES, BLOCK_LAUNCHES, ULYSSES_LAUNCHES, strict=True
        )
    ]
    return found[0], found[1]


def context_bytes_moved_per_token(
    attention: Attention, compute_bytes: float, wide: float, table: PlanTable
) -> tuple[Real, Real]:
    """Bytes a token that context parallelism reads and writes in memory: forward, backward.

        ring, allgather  r (c + 2 x) o + (x + c) o         r = 1 + 3/4 (n - 1) times a token's rows
                         r (c + 2 x) (q + K) + (x + c) (q + K)
                         each block is added to a sum in x, which is cast to c at the end; with the
                         keys of another rank half of the queries, or of the keys, is computed for
                         half of the ranks. Ring backward: also n times 3 x K, the received sums
        ulysses          4 c (q + k' (d + e) + o)          in either pass: what is exchanged is
                         sorted before and after

    with x = ``wide``, K = k (d + e) / t, q = a d / t, o = a e / t elements a token.

    Source: operators of executor/attention/ring.py and ulysses.py, with one kernel for each sum.
    """
    n, t = 1.0 * table.context_parallel, 1.0 * table.tensor_parallel
    query = attention.num_heads * attention.head_dim / t
    output = attention.num_heads * attention.value_head_dim / t
    keys = key_value_bytes(attention, 1.0, table)
    one = (1.0 + 0.75 * (n - 1.0)) * (compute_bytes + 2.0 * wide) + wide + compute_bytes
    received = np.where(table.context_parallel_method == RING, 3.0 * wide * n * keys, 0.0)
    both = attention.head_dim + attention.value_head_dim
    moved = exchanged_key_heads(attention, table) * both
    exchange = 4.0 * compute_bytes * (query + moved + output)
    blockwise, ulysses = is_blockwise(table), np.where(n > 1.0, exchange, 0.0)
    return (
        np.where(blockwise, one * output, ulysses),
        np.where(blockwise, one * (query + keys) + received, ulysses),
    )


def computed_score_share(kernel: str, context_parallel: Count, blockwise: Flag) -> Real:
    """Share of all scores that an eager core computes: (n + 1) / 2 n of them in blocks, else all.

    A fused core skips masked blocks in any case.
    """
    n = np.multiply(1.0, context_parallel)
    return np.where(np.logical_and(blockwise, kernel == "eager"), (n + 1.0) / (2.0 * n), 1.0)
