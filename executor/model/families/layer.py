"""One decoder layer over the parts of the Hugging Face module, whole or as one rank's slice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from executor.attention.core import Documents
from executor.model.families.description import Block, Layer, Rotary
from executor.ops.offload_activations import offloaded
from executor.ops.recompute import recomputed
from executor.ops.selective_recompute import recomputed_around, unread


def run_layer(
    layer: Layer,
    module: nn.Module,
    hidden: Tensor,
    rotary: Rotary | None,
    documents: Documents | None = None,
) -> Tensor:
    """Run a layer, and keep of it what its recomputation asks for."""
    if documents is not None:
        layer = replace(layer, core=replace(layer.core, documents=documents))
    if not module.training:  # evaluation: nothing is dropped, nothing is kept
        core = replace(layer.core, dropout=0.0, recompute=False)
        layer = replace(
            layer, core=core, dropout=0.0, recompute=False, keeps_results=False, offload=False
        )
    if layer.offload:
        rest = partial(_run, layer, module, hidden, rotary)
        staying = [*module.parameters(), *module.buffers(), *(rotary or ())]
        return offloaded(rest, hidden.device, staying)
    return _run(layer, module, hidden, rotary)


def _run(layer: Layer, module: nn.Module, hidden: Tensor, rotary: Rotary | None) -> Tensor:
    if layer.recompute:
        return recomputed(decoder_layer, module, layer, hidden, rotary, random=layer.random)
    if layer.keeps_results:
        return recomputed_around(decoder_layer, module, layer, hidden, rotary, random=layer.random)
    return decoder_layer(module, layer, hidden, rotary)


def decoder_layer(module: Any, layer: Layer, hidden: Tensor, rotary: Rotary | None) -> Tensor:
    """Attention, then the MLP; each adds its output to the hidden state.

    in turn   h' = h + attention(h),  h' + mlp(h')
    parallel  h + attention(h) + mlp(h)
    """
    family = layer.family
    block = family.attention_block
    attention = module.get_submodule(block.name)
    read = _normed(module, block.norm_before, hidden)
    # side by side, the backward pass asks for neither block's result
    with unread(layer.kind.parallel_residual and not _is_normed(block)):
        output = family.attention(attention, layer, read, rotary)
    output = _finished(module, layer, block, output)
    after = _normed(module, block.norm_sum, hidden + output)
    del output  # nothing of the MLP reads it

    block = family.feed_forward_block
    if not layer.kind.parallel_residual:
        read = _normed(module, block.norm_before, after)
    elif block.norm_before is not None:  # else it shares the norm of the attention
        read = _normed(module, block.norm_before, hidden)
    with unread(not layer.kind.feed_forward.num_experts and not _is_normed(block)):
        output = family.feed_forward(module.get_submodule(block.name), layer, read)
    after = after + _finished(module, layer, block, output)
    return _normed(module, block.norm_sum, after)


def _is_normed(block: Block) -> bool:
    return block.norm_after is not None or block.norm_sum is not None


def _normed(module: Any, name: str | None, x: Tensor) -> Tensor:
    if name is None:
        return x
    normed: Tensor = module.get_submodule(name)(x)
    return normed


def _finished(module: Any, layer: Layer, block: Block, x: Tensor) -> Tensor:
    """Return what a block adds to the hidden state."""
    x = _normed(module, block.norm_after, x)
    if layer.dropout:
        x = F.dropout(x, layer.dropout, module.training)
    return x if layer.residual_multiplier == 1.0 else x * layer.residual_multiplier
