"""T5: an encoder and a decoder whose layers share tables of relative positions.

The stage around the layers is ``executor/model/encoder_decoder.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from executor.model.families.description import Block, Family, Layer
from executor.model.families.linears import columns, row
from executor.model.families.self_attention import separate
from executor.ops.offload_activations import offloaded
from executor.ops.recompute import recomputed
from executor.parallel.tensor_parallel import rank_randomness

PROJECT: Final = separate("q", "k", "v")


def run_t5_layer(
    layer: Layer,
    module: Any,
    hidden: Tensor,
    added: Tensor,
    source: Tensor | None = None,
    source_added: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a layer; (B, s, H) in and out.

    ``added`` (B or 1, heads or 1, S, S): what is added to the scores of self-attention. The first
    layer of a stack gets the mask, adds positions, and returns the sum for the others beside its
    hidden state. ``source`` (B, S, H): the encoder's output, every token of it on every rank, to
    whose gradient each rank gives a summand; ``source_added``: its mask.
    """
    if not module.training:  # evaluation: nothing is dropped, nothing is kept
        core = replace(layer.core, dropout=0.0, recompute=False)
        layer = replace(layer, core=core, dropout=0.0, recompute=False, offload=False)
    attention = module.layer[0].SelfAttention
    first = attention.has_relative_attention_bias
    if first:  # before all else: its gradient comes last, when all layers have added to it
        length = added.size(-1)
        added = attention.compute_bias(length, length, added.device) + added
    shared = [x for x in (added, source, source_added) if x is not None]
    run = partial(recomputed, random=layer.random) if layer.recompute else _call
    run = partial(run, t5_layer, module, layer, hidden, added, source, source_added)
    if layer.offload:
        staying = [*module.parameters(), *shared]
        hidden = offloaded(run, hidden.device, staying)
    else:
        hidden = run()
    return (hidden, added) if first else hidden


def t5_layer(
    module: Any,
    layer: Layer,
    hidden: Tensor,
    added: Tensor,
    source: Tensor | None,
    source_added: Tensor | None,
) -> Tensor:
    """Self-attention, in a decoder attention to ``source``, and the MLP, each added up."""
    block = module.layer[0]
    heads = PROJECT(block.SelfAttention, layer, block.layer_norm(hidden))
    output = layer.core.with_added(*heads, added)
    hidden = _sum(layer, hidden, row(layer.axis, output, block.SelfAttention.o))
    if source is not None:
        block = module.layer[1]
        attention, width = block.EncDecAttention, layer.kind.attention.head_dim
        (query,) = columns(layer.axis, block.layer_norm(hidden), attention.q)
        # every rank has the whole input already: no collective here, one for all layers
        alone = replace(layer.axis, group=None, size=1, rank=0, sequence_parallel=False)
        key, value = columns(alone, source, attention.k, attention.v)
        heads = (
            query.unflatten(-1, (-1, width)),
            key.unflatten(-1, (-1, width)),
            value.unflatten(-1, (-1, width)),
        )
        output = layer.core.with_added(*heads, source_added)
        hidden = _sum(layer, hidden, row(layer.axis, output, attention.o))
    block = module.layer[-1]
    return _sum(layer, hidden, _mlp(block.DenseReluDense, layer, block.layer_norm(hidden)))


def _mlp(module: Any, layer: Layer, x: Tensor) -> Tensor:
    if layer.kind.feed_forward.gated:
        opened, lifted = columns(layer.axis, x, module.wi_0, module.wi_1)
        inner = module.act(opened) * lifted
    else:
        (inner,) = columns(layer.axis, x, module.wi)
        inner = module.act(inner)
    if layer.dropout:  # the ranks hold different features
        with rank_randomness(layer.axis):
            inner = F.dropout(inner, layer.dropout)
    return row(layer.axis, inner, module.wo)


def _sum(layer: Layer, hidden: Tensor, output: Tensor) -> Tensor:
    return hidden + (F.dropout(output, layer.dropout) if layer.dropout else output)


def _call(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function(*arguments)
    return result


def _by_stage(*_: Any) -> Tensor:
    raise AssertionError("the layers of T5 have a forward pass of their own")


T5: Final = Family(
    tokens="shared",
    layers="decoder.block",
    norm="decoder.final_layer_norm",
    attention=_by_stage,
    feed_forward=_by_stage,
    attention_block=Block("layer.0.SelfAttention", None),
    softmax_in_fp32=False,
    encoder_decoder=True,
    decoder_tokens="decoder.embed_tokens",
    # Raffel et al. (arXiv:1910.10683) tie the embedding to the head, and shrink the logits
    logits_multiplier=lambda c: c.d_model**-0.5 if c.scale_decoder_outputs else 1.0,
)
