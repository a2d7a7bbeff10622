"""T5: an encoder and a decoder whose layers share tables of relative positions.

The stage around the layers is ``executor/model/encoder_decoder.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from executor.model.families.description import Family, Layer, ResidualBlock
from executor.model.families.linears import column_parallel, row_parallel
from executor.model.families.self_attention import separate
from executor.ops.offload_activations import run_offloaded
from executor.ops.recompute import checkpointed
from executor.parallel.tensor_parallel import rank_random_state

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

    ``added`` (B or 1, heads or 1, S, S): added to the scores of self-attention. The first layer of
    a stack receives the mask, adds the position bias, and returns the sum for the others together
    with its hidden state. ``source`` (B, S, H): the encoder's output, all tokens on every rank;
    each rank computes a partial gradient of it; ``source_added``: its mask.
    """
    if not module.training:
        layer = layer.for_evaluation()
    attention = module.layer[0].SelfAttention
    first = attention.has_relative_attention_bias
    if first:  # first: its gradient is complete only after all layers
        length = added.size(-1)
        added = attention.compute_bias(length, length, added.device) + added
    shared = [x for x in (added, source, source_added) if x is not None]
    run = partial(checkpointed, random=layer.random) if layer.recompute == "full" else _call
    run = partial(run, t5_layer, module, layer, hidden, added, source, source_added)
    if layer.offload:
        staying = [*module.parameters(), *shared]
        hidden = run_offloaded(run, hidden.device, staying)
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
    """Self-attention, in a decoder cross-attention to ``source``, and the MLP, each added up."""
    block = module.layer[0]
    heads = PROJECT(block.SelfAttention, layer, block.layer_norm(hidden))
    output = layer.core.attend_with_bias(*heads, added)
    hidden = _sum(layer, hidden, row_parallel(layer.axis, output, block.SelfAttention.o))
    if source is not None:
        block = module.layer[1]
        attention, width = block.EncDecAttention, layer.kind.attention.head_dim
        (query,) = column_parallel(layer.axis, block.layer_norm(hidden), attention.q)
        # every rank has the whole input already: one collective for all layers, none here
        alone = replace(layer.axis, group=None, size=1, rank=0, sequence_parallel=False)
        key, value = column_parallel(alone, source, attention.k, attention.v)
        heads = (
            query.unflatten(-1, (-1, width)),
            key.unflatten(-1, (-1, width)),
            value.unflatten(-1, (-1, width)),
        )
        output = layer.core.attend_with_bias(*heads, source_added)
        hidden = _sum(layer, hidden, row_parallel(layer.axis, output, attention.o))
    block = module.layer[-1]
    return _sum(layer, hidden, _mlp(block.DenseReluDense, layer, block.layer_norm(hidden)))


def _mlp(module: Any, layer: Layer, x: Tensor) -> Tensor:
    if layer.kind.feed_forward.gated:
        opened, lifted = column_parallel(layer.axis, x, module.wi_0, module.wi_1)
        inner = module.act(opened) * lifted
    else:
        (inner,) = column_parallel(layer.axis, x, module.wi)
        inner = module.act(inner)
    if layer.dropout:  # ranks hold different features
        with rank_random_state(layer.axis):
            inner = F.dropout(inner, layer.dropout)
    return row_parallel(layer.axis, inner, module.wo)


def _sum(layer: Layer, hidden: Tensor, output: Tensor) -> Tensor:
    return hidden + (F.dropout(output, layer.dropout) if layer.dropout else output)


def _call(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function(*arguments)
    return result


def _by_stage(*_: Any) -> Tensor:
    raise AssertionError("T5 layers run through run_t5_layer")


T5: Final = Family(
    tokens="shared",
    layers="decoder.block",
    norm="decoder.final_layer_norm",
    attention=_by_stage,
    feed_forward=_by_stage,
    attention_block=ResidualBlock("layer.0.SelfAttention", None),
    softmax_in_fp32=False,
    encoder_decoder=True,
    decoder_tokens="decoder.embed_tokens",
    # Raffel et al. (arXiv:1910.10683) tie the embedding to the head and scale the logits down
    logits_multiplier=lambda c: c.d_model**-0.5 if c.scale_decoder_outputs else 1.0,
)
