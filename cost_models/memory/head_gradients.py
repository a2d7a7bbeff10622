"""Unreduced gradients of the output projection, in trainers with unsharded weights.

The projection's backward pass is the first one. A tied table's gradient from it waits until the
embedding has added its own; a loss in chunks makes the projection's gradient once for every chunk.
Units: bytes. Every argument may be a column of a plan table.

Leaves out: rounding of tensors to the allocator's blocks (``memory.allocator``).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from msgspec import Struct

from cost_models.arrays import Real, holds
from cost_models.memory.ledger import Given, Item, product
from cost_models.partition.rank_view import RankView


class HeadGradients(Struct, frozen=True):
    """Rows at the moments of ``MOMENTS``, on top of accumulated gradients."""

    head: list[tuple[Item, Item]]  # and what is left of the logits, at each of its places
    layers: Item  # during the layers' backward passes
    embedding: Item


def head_gradients(view: RankView, logits: Real) -> HeadGradients:
    """Return the gradients of the head; 0 if gradients are sharded or have a buffer of their own.

        head       n = 1: c H, and the gradient L of the logits
                   n chunks: the fullest of c H + L, 2 c H + L (1 - 1/n), 3 c H + L (1 - 2/n)
        layers     c E of a tied table
        embedding  3 c E of it, 2 c E after a loss in chunks

    H elements of the projection, E of a table that is both ends, L ``logits`` in compute precision.
    If the projection's gradients are sharded, a loss in chunks still has L in addition. Chunks that
    are checkpointed with their projection: 3 c H, or c H while one is made again. The first
    two gradients of a leaf are added up in a third tensor, further ones in place. Source: torch's
    autograd engine (torch/csrc/autograd/input_buffer.cpp), as measured on a torch process
    (tests/cost_models/memory/test_head_gradients.py). The backward passes of all chunks' losses
    come first.
    """
    params = view.parameters
    model, workload, software = view.model, view.workload, view.software
    table, rank = view.table, view.rank
    alone = model.tie_embeddings & np.logical_and(rank.first, rank.last)
    whole = (table.zero_stage == 0) | (table.shard_ranks <= 1)
    apart = whole & (not software.gradients.whole_buffer)
    each = np.where(apart, workload.compute_bytes, 0.0)
    tied = np.where(alone, params.embedding, 0.0) if holds(alone) else 0.0
    block = each * (tied + params.head)
    logits_gradient = np.where(block > 0.0, logits, 0.0)

    def copied(name: str, elements: Given, copies: Real) -> Item:
        return product("buffers", name, ("c · copies", each * copies, "bytes"), elements)

    head = partial(copied, "gradients of the head", ("H", tied + params.head, "parameters"))
    table_of = partial(copied, "gradients of a tied table", ("E", tied, "parameters"))

    def left(size: Real) -> Item:
        return Item("logits", "gradient of the logits", size, formula="c · V/t · b·s")

    loss = software.loss
    if not loss.chunk_tokens or (loss.chunks_logits and not loss.repeats_chunks):
        return HeadGradients([(head(1.0), left(logits_gradient))], table_of(1.0), table_of(3.0))
    chunks = np.maximum(1.0, view.at_head.tokens / loss.chunk_tokens)
    several = chunks > 1.0
    of_table = table_of(np.where(several, 2.0, 3.0))
    if loss.repeats_chunks:
        again = left(logits + loss_copy_bytes(view))
        places = [
            (head(1.0), again),
            (head(np.where(several, 3.0, 1.0)), left(0.0 * logits_gradient)),
        ]
        return HeadGradients(places, table_of(1.0), of_table)
    places = [(head(1.0), left(logits))]
    for more in (1.0, 2.0):
        kept = logits_gradient * np.where(several, np.maximum(0.0, 1.0 - more / chunks), 1.0)
        places.append((head(np.where(several, 1.0 + more, 1.0)), left(kept)))
    return HeadGradients(places, table_of(1.0), of_table)


def loss_copy_bytes(view: RankView) -> Real:
    """Bytes of the copies of the projection that a chunk's loss makes: an element's, times V h / t.

    Source: the figure's, in the trainers' losses.
    """
    each = view.software.loss.head_copy_bytes * np.multiply(1.0, view.rank.last)
    found: Real = each * view.model.head_multiply / view.table.tensor_parallel
    return found
