"""One decoder layer over the parts of the Hugging Face module, whole or as one rank's slice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from executor.attention.core import Documents
from executor.model.families.description import Layer, ResidualBlock, RotaryTables
from executor.ops.offload_activations import run_offloaded
from executor.ops.recompute import checkpointed, checkpointed_selectively, result_unread


def run_layer(
    layer: Layer,
    module: nn.Module,
    hidden: Tensor,
    rotary: RotaryTables | None,
    documents: Documents | None = None,
) -> Tensor:
    """Run a layer with the recomputation and offload that it is configured with."""
    if documents is not None:
        layer = replace(layer, core=replace(layer.core, documents=documents))
    if not module.training:  # evaluation: no dropout, no saved activations
        core = replace(layer.core, dropout=0.0, recompute=False)
        layer = replace(
            layer,
            core=core,
            dropout=0.0,
            recompute=False,
            recompute_selectively=False,
            offload=False,
        )
    if layer.offload:
        rest = partial(_run, layer, module, hidden, rotary)
        staying = [*module.parameters(), *module.buffers(), *(rotary or ())]
        return run_offloaded(rest, hidden.device, staying)
    return _run(layer, module, hidden, rotary)


def _run(layer: Layer, module: nn.Module, hidden: Tensor, rotary: RotaryTables | None) -> Tensor:
    if layer.recompute:
        return checkpointed(decoder_layer, module, layer, hidden, rotary, random=layer.random)
    if layer.recompute_selectively:
        return checkpointed_selectively(
            decoder_layer, module, layer, hidden, rotary, random=layer.random
        )
    return decoder_layer(module, layer, hidden, rotary)


def decoder_layer(module: Any, layer: Layer, hidden: Tensor, rotary: RotaryTables | None) -> Tensor:
    """Attention, then the MLP; each adds its output to the hidden state.

    sequential  h' = h + attention(h),  h' + mlp(h') parallel    h + attention(h) + mlp(h)
    """
    family = layer.family
    block = family.attention_block
    attention = module.get_submodule(block.name)
    read = _normed(module, block.norm_before, hidden)
    # with a parallel residual, the backward pass reads neither block's result
    with result_unread(layer.kind.parallel_residual and not _is_normed(block)):
        output = family.attention(attention, layer, read, rotary)
    output = _finished(module, layer, block, output)
    after = _normed(module, block.norm_sum, hidden + output)
    del output  # nothing of the MLP reads it

    block = family.feed_forward_block
    if not layer.kind.parallel_residual:
        read = _normed(module, block.norm_before, after)
    elif block.norm_before is not None:  # otherwise it shares the attention's norm
        read = _normed(module, block.norm_before, hidden)
    with result_unread(not layer.kind.feed_forward.num_experts and not _is_normed(block)):
        output = family.feed_forward(module.get_submodule(block.name), layer, read)
    after = after + _finished(module, layer, block, output)
    return _normed(module, block.norm_sum, after)


def _is_normed(block: ResidualBlock) -> bool:
    return block.norm_after is not None or block.norm_sum is not None


def _normed(module: Any, name: str | None, x: Tensor) -> Tensor:
    if name is None:
        return x
    normed: Tensor = module.get_submodule(name)(x)
    return normed


def _finished(module: Any, layer: Layer, block: ResidualBlock, x: Tensor) -> Tensor:
    """Return the contribution of a block to the hidden state."""
    x = _normed(module, block.norm_after, x)
    if layer.dropout:
        x = F.dropout(x, layer.dropout, module.training)
    return x if layer.residual_multiplier == 1.0 else x * layer.residual_multiplier
