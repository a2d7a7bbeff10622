"""One decoder layer over the parts of the Hugging Face module, whole or as one rank's slice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.plan.recompute import BY_OPERATOR, EVERY_SECOND
from executor.attention.core import Documents
from executor.model.families.description import Layer, ResidualBlock, RotaryTables
from executor.ops.discarded_results import Discarded
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
    if not module.training:
        layer = layer.for_evaluation()
    if layer.offload:
        rest = partial(_run, layer, module, hidden, rotary)
        staying = [*module.parameters(), *module.buffers(), *(rotary or ())]
        return run_offloaded(rest, hidden.device, staying)
    return _run(layer, module, hidden, rotary)


def _run(layer: Layer, module: nn.Module, hidden: Tensor, rotary: RotaryTables | None) -> Tensor:
    if layer.recompute == "full":
        return checkpointed(decoder_layer, module, layer, hidden, rotary, random=layer.random)
    if layer.recompute in BY_OPERATOR:
        return checkpointed_selectively(
            decoder_layer,
            module,
            layer,
            hidden,
            rotary,
            random=layer.random,
            every_second=layer.recompute == EVERY_SECOND,
        )
    return decoder_layer(module, layer, hidden, rotary)


def decoder_layer(module: Any, layer: Layer, hidden: Tensor, rotary: RotaryTables | None) -> Tensor:
    """Attention, then the MLP; each adds its output to the hidden state.

    sequential  h' = h + attention(h),  h' + mlp(h') parallel    h + attention(h) + mlp(h)
    """
    family = layer.family
    block = family.attention_block
    with _norm_read(module, layer, block, hidden) as read:
        # with a parallel residual, the backward pass reads neither block's result
        with result_unread(layer.kind.parallel_residual and not _is_normed(block)):
            output = family.attention(module.get_submodule(block.name), layer, read, rotary)
        output = _finished(module, layer, block, output)
        after = _normed(module, block.norm_sum, hidden + output)
        del output  # nothing of the MLP reads it

        block = family.feed_forward_block
        if layer.kind.parallel_residual and block.norm_before is None:  # one norm for both
            output = _feed_forward(module, layer, block, read)
            return _normed(module, block.norm_sum, after + output)
    del read
    given = hidden if layer.kind.parallel_residual else after
    with _norm_read(module, layer, block, given) as read:
        output = _feed_forward(module, layer, block, read)
    return _normed(module, block.norm_sum, after + output)


@contextmanager
def _norm_read(module: Any, layer: Layer, block: ResidualBlock, x: Tensor) -> Iterator[Tensor]:
    """Yield the input of a block, which the backward pass may compute again."""
    if block.norm_before is None or not layer.repeats("layernorm"):
        yield _normed(module, block.norm_before, x)
        return
    norm = module.get_submodule(block.norm_before)
    with Discarded(lambda x: (norm(x),), x, random=False).readers() as (read,):
        yield read


def _feed_forward(module: Any, layer: Layer, block: ResidualBlock, x: Tensor) -> Tensor:
    run: Any = layer.family.feed_forward
    if layer.repeats("moe" if layer.kind.feed_forward.num_experts else "mlp"):
        run = partial(checkpointed, run, random=layer.random)
    with result_unread(not layer.kind.feed_forward.num_experts and not _is_normed(block)):
        output = run(module.get_submodule(block.name), layer, x)
    return _finished(module, layer, block, output)


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
