"""Rows of saved activations: of the layers of all micro-batches in flight, of heads, of tables.

Symbols   n micro-batches in flight   L layers that save alike   b·s tokens of a micro-batch
          a bytes a token, of one layer or one head
Units     bytes; columns of a plan table.

Source: in flight: ``partition.in_flight``; bytes a token: ``activations``. Leaves out: the
micro-batch of the backward pass that is under way, whose tensors are freed one by one (it counts
whole).
"""

from __future__ import annotations

import numpy as np

from cost_models.activations.live import LiveActivations
from cost_models.arrays import Real, holds
from cost_models.memory.ledger import Given, Item, added, least, product

TOKENS = "b·s"
IN_FLIGHT = "in flight"


def saved_rows(live: LiveActivations, fewer: float = 0.0) -> tuple[Item, Item]:
    """Return what is saved but for the running head's tensors, and these.

        layers     n L b·s a of each kind of layer; offloaded: those of one or two layers
        shared     n b·s a: the encoder's output, position biases, the embedding's
        operands   of pending weight gradients
        heads      n b·s a, token ids, logits of finished heads (more than one only under GPipe)

    ``fewer``: micro-batches whose backward pass has ended.
    """
    tokens: Given = (TOKENS, live.tokens, "tokens")
    flight = np.maximum(live.in_flight - fewer, 0.0) if fewer else live.in_flight
    finished = np.maximum(live.at_head - 1.0, 0.0)
    heads = finished if fewer else live.at_head
    rows = [_layers(live, ("n", flight, IN_FLIGHT), tokens)]
    if holds(live.shared_per_token):
        name = "kept for all layers: embedding, encoder's output, position biases"
        rows.append(_kept(name, flight, tokens, live.shared_per_token))
    if holds(live.pending):
        name = "operands of pending weight gradients"
        rows.append(_kept(name, live.pending, tokens, live.operands_per_token, "pending"))
    rows.append(_kept("token ids and labels", heads, tokens, live.ids_per_token))
    if holds(finished):
        kept = live.logits_gradient * finished
        rows.append(_kept("the inputs of finished heads", finished, tokens, live.head_per_token))
        rows.append(Item("activations", "logits of finished heads", kept, formula="n · b·s · c·V"))
    if holds(live.tables):
        rows.append(Item("activations", "rotary tables, masks", live.tables, formula="tables"))
    a = ("a", live.head_per_token, "bytes")
    return added(*rows), product("activations", "the head's inputs", tokens, a)


def activation(name: str, size: Real) -> Item:
    """Return a row of activations; its terms are those of a layer."""
    return Item("activations", name, size, formula="b·s · bytes a token")


def logits(name: str, size: Real) -> Item:
    """Return a row of logits."""
    return Item("logits", name, size, formula="bytes · V/t · b·s")


def _layers(live: LiveActivations, flight: Given, tokens: Given) -> Item:
    rows = [
        product(
            "activations",
            "saved by layers" if each.recomputed else "saved by layers that always keep them",
            *(flight, ("L", each.count, "layers"), tokens, ("a", each.per_token, "bytes")),
        )
        for each in live.layers
    ]
    if not rows:
        return Item("activations", "saved by layers", 0.0 * live.tokens)
    if live.on_device is None:
        return added(*rows)
    name, formula = "layers in transfer to the host", "b·s · a of the layers on the device"
    return least(added(*rows), Item("activations", name, live.on_device, formula=formula))


def _kept(name: str, count: Real, tokens: Given, each: Real, unit: str = IN_FLIGHT) -> Item:
    return product("activations", name, ("n", count, unit), tokens, ("a", each, "bytes"))
