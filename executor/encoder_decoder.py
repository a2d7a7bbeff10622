"""An encoder and a decoder as one stage: the modules of transformers, called as they are.

The source (``inputs``) and the target (``labels``) of a row have seq_len places each. What fills
the source up is hidden from both stacks; the decoder reads the target one place later.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from cost_models.plan_file import PlanFile
from executor.compat import causal_lm
from executor.data.batch import IGNORED, Batch
from executor.data.objectives import PAD
from executor.expert_parallel import EVERY_EXPERT
from executor.families import FAMILIES
from executor.layout import layouts
from executor.models import COMPUTE_DTYPE, MASTER_DTYPE, Stage
from executor.tensor_parallel import TensorAxis
from hardware_profiles.errors import InputError

ENCODER: Final = "encoder"
DECODER: Final = "decoder"


class EncoderDecoderStage(Stage):
    """The whole of an encoder-decoder on one rank: its ranks are data ranks."""

    def __init__(self, file: PlanFile, axis: TensorAxis) -> None:
        nn.Module.__init__(self)
        spec, workload = file.model, file.workload
        self.index, self.first, self.last, self.axis = 0, True, True, axis
        self.experts = EVERY_EXPERT
        self.family, self.layer_names = FAMILIES[spec.family], list(spec.layer_prefixes)
        whole: Any = causal_lm(
            spec.config,
            device="meta",
            dtype=MASTER_DTYPE[workload.precision],
            attention_kernel=workload.attention_kernel,
        )
        self.rotary, self.logits_cap = None, None
        self.logits_multiplier = self.family.logits_multiplier(whole.config)
        whole.lm_head.forward = self._loss
        for name in (ENCODER, DECODER):  # both read the table through ``shared``
            del whole.get_submodule(name).embed_tokens
        for name in (self.family.tokens, ENCODER, DECODER, self.family.head):
            self._graft(name, whole.get_submodule(name))
        # the first blocks return the positions' biases, which nobody changes in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._cut_parameters(layouts(spec, axis), spec, COMPUTE_DTYPE[workload.precision])

    def groups(self) -> Iterator[list[nn.Module]]:
        """Yield the modules that are gathered and reduced together, in forward order."""
        norms = [self.get_submodule(f"{name}.final_layer_norm") for name in (ENCODER, DECODER)]
        tokens, head = (self.get_submodule(n) for n in (self.family.tokens, self.family.head))
        yield [tokens, *norms, head]
        for layer in self.layers():
            yield [layer]

    def forward(self, batch: Batch, received: Tensor | None = None) -> Tensor:
        """Run a micro-batch; return the loss summed over its tokens."""
        if batch.starts is not None:
            raise InputError("an encoder-decoder takes rows of one document (packing documents)")
        tokens, head = (self.get_submodule(n) for n in (self.family.tokens, self.family.head))
        seen = is_source(batch.inputs)
        source = self.get_submodule(ENCODER)(
            inputs_embeds=tokens(batch.inputs), attention_mask=seen
        )
        target = self.get_submodule(DECODER)(
            inputs_embeds=tokens(one_later(batch.labels)),
            encoder_hidden_states=source.last_hidden_state,
            encoder_attention_mask=seen,
        )
        loss: Tensor = head(target.last_hidden_state, batch.labels)
        return loss


def is_source(inputs: Tensor) -> Tensor:
    """Return 1 for every place of a source (rows, S) up to its last token, 0 for what follows.

    >>> is_source(torch.tensor([[5, 0, 7, 0, 0], [1, 2, 3, 4, 5]]))
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1]])
    """
    return (inputs != PAD).long().flip(1).cummax(1).values.flip(1)


def one_later(labels: Tensor) -> Tensor:
    """Return what the decoder reads where it is to predict ``labels`` (rows, S).

    >>> one_later(torch.tensor([[5, 6, -100]]))
    tensor([[0, 5, 6]])
    """
    read = torch.full_like(labels, PAD)
    read[:, 1:] = labels[:, :-1]
    return read.masked_fill(read == IGNORED, PAD)
