"""A stage of an encoder-decoder: layers of the encoder, of the decoder, or of both.

The source (``inputs``) of a row has seq_len positions, the target (``labels``) as many, or
target_seq_len. Padding of the source is masked in both stacks; the decoder reads the target shifted
by one position.

Up to the end of the encoder a stage passes on its hidden state; from then on two of them in one
message, the decoder's and the encoder's output, whose gradients the stages accumulate on the way
back. The stage where the decoder begins (the bridge) holds the encoder's final norm and its own
copy of the embedding. The table of relative positions, which the layers of a stack share, is in the
first of them on every stage: a copy, unless that is the stack's first layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from cost_models.partition.shared_tensors import bridge_stage
from cost_models.plan_file import PlanFile
from executor.data.batch import IGNORED, Batch
from executor.data.objectives import PAD
from executor.model.families.description import Layer
from executor.model.families.t5 import run_t5_layer
from executor.model.stage import Stage
from executor.parallel.tensor_parallel import TensorAxis, gather_tokens, vocabulary_embedding
from hardware_profiles.errors import InputError

ENCODER: Final = "encoder"
DECODER: Final = "decoder"
ENCODER_NORM: Final = "encoder.final_layer_norm"
SCALING: Final = 1.0  # of the scores: T5 initialises its matrices smaller instead


class EncoderDecoderStage(Stage):
    """Tokens, one hidden state or two in; one, two or the summed loss out."""

    def __init__(self, file: PlanFile, index: int, axis: TensorAxis) -> None:
        self.is_bridge = index == bridge_stage(file.model, file.layer_ranges)
        self.width = file.model.hidden_size
        super().__init__(file, index, axis)

    def _take_parts(self, whole: nn.Module) -> None:
        names = list(self.layer_names)
        if self.first or self.is_bridge:
            self.tokens = self.family.tokens if self.first else self.family.decoder_tokens
            table: Any = whole.get_submodule(self.family.tokens)
            table.forward = partial(self._look_up, table)
            self._graft(self.tokens, table)
        if self.is_bridge:
            names.append(ENCODER_NORM)
        if self.last:
            names += self.family.head_modules
            head: Any = whole.get_submodule(self.family.head)
            head.forward = self._loss
        for name in names:
            self._graft(name, whole.get_submodule(name))
        for name in self.copies:  # of tensors that the layers of a stack share
            path, _, table_name = name.removesuffix(".weight").rpartition(".")
            if path.startswith(tuple(self.layer_names)):
                attention: Any = self.get_submodule(path)
                source = self.copies[name].removesuffix(".weight")
                setattr(attention, table_name, whole.get_submodule(source))
                attention.has_relative_attention_bias = True

    def _prepare_layer(self, name: str, layer: Layer) -> None:
        layer = replace(layer, core=replace(layer.core, scaling=SCALING))
        module = self.get_submodule(name)
        module.forward = partial(run_t5_layer, layer, module)

    def groups(self) -> Iterator[list[nn.Module]]:
        """Yield the modules that are gathered and reduced together, in forward order.

        A group is complete when each of its modules ran: the tokens first, the head last.
        """
        names = [self.tokens] if self.tokens else []
        names += [ENCODER_NORM] if self.is_bridge else []
        names += self.family.head_modules if self.last else []
        outer = [[self.get_submodule(name) for name in names]] if names else []
        layers = [[layer] for layer in self.layers()]
        yield from outer + layers if self.tokens else layers + outer

    def forward(self, batch: Batch, received: Tensor | None = None) -> Tensor:
        """Run a micro-batch; the last stage returns the loss summed over its tokens."""
        if batch.starts is not None:
            raise InputError("an encoder-decoder needs one document per row (packing documents)")
        target: Tensor | None = None
        if received is None:
            source = self.get_submodule(self.tokens)(batch.inputs)
        elif received.dim() == 1:
            target, source = self._unpacked(received, batch)
        else:
            source = received
        hidden = _hidden_places(source_mask(batch.inputs), source.dtype)
        source = self._run_stack(ENCODER, source, hidden)
        if self.is_bridge:
            target = self.get_submodule(self.tokens)(shift_right(batch.labels))
            source = self._dropped(self.get_submodule(ENCODER_NORM)(source))
        if target is None:
            return source
        length = batch.labels.size(1)
        later = ~torch.ones(length, length, dtype=torch.bool, device=source.device).tril()
        causal = _lowest(later[None, None], source.dtype)
        read = gather_tokens(self.axis, source)
        target = self._run_stack(DECODER, target, causal, read, hidden)
        if not self.last:
            return packed(target, source)
        target = self._dropped(self.get_submodule(self.family.norm or "")(target))
        loss: Tensor = self.get_submodule(self.family.head)(target, batch.labels)
        return loss

    def _unpacked(self, received: Tensor, batch: Batch) -> list[Tensor]:
        """Return the decoder's hidden state and the encoder's output from one message."""
        ranks = self.axis.size if self.axis.sequence_parallel else 1
        shapes = [(len(x), x.size(1) // ranks, self.width) for x in (batch.labels, batch.inputs)]
        parts = received.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _run_stack(self, stack: str, hidden: Tensor, added: Tensor, *source: Tensor) -> Tensor:
        """Run this stage's layers of one stack; the first adds the position bias for the others."""
        names = [name for name in self.layer_names if name.startswith(f"{stack}.")]
        for number, name in enumerate(names):
            output = self.get_submodule(name)(hidden, added, *source)
            hidden, added = (output, added) if number else output
        return hidden

    def _look_up(self, table: Any, tokens: Tensor) -> Tensor:
        return self._dropped(
            vocabulary_embedding(self.axis, tokens, table.weight, self.start, table.padding_idx)
        )


def packed(target: Tensor, source: Tensor) -> Tensor:
    """Return the decoder's hidden state and the encoder's output as one message."""
    return torch.cat([target.flatten(), source.flatten()])


def _hidden_places(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of padding for every query, (B, 1, 1, S)."""
    return _lowest(seen[:, None, None] == 0, dtype)


def _lowest(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the lowest finite number where ``hidden``, else 0."""
    lowest = torch.finfo(dtype).min
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, lowest)


def source_mask(inputs: Tensor) -> Tensor:
    """Return 1 for every position of a source (rows, S) up to its last token, 0 for padding.

    >>> is_source(torch.tensor([[5, 0, 7, 0, 0], [1, 2, 3, 4, 5]]))
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1]])
    """
    return (inputs != PAD).long().flip(1).cummax(1).values.flip(1)


def shift_right(labels: Tensor) -> Tensor:
    """Return the decoder's input tokens for the targets ``labels`` (rows, S): shifted by one.

    >>> shift_right(torch.tensor([[5, 6, -100]]))
    tensor([[0, 5, 6]])
    """
    read = torch.full_like(labels, PAD)
    read[:, 1:] = labels[:, :-1]
    return read.masked_fill(read == IGNORED, PAD)
