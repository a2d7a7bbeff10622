"""Encoder-decoders whose targets are not as long as their inputs.

Each layer has its own length of queries, each attention its own length of keys:

                            queries, and the layer's own tokens     keys and values
        encoder             seq_len                                 seq_len
        decoder             target_seq_len                          target_seq_len
        cross-attention     target_seq_len                          seq_len

A layer's costs are those of its own tokens; where the layers of a rank are added up, they are
counted for each token of the inputs (``LayerKind.token_share``).

Units: tokens of a sequence. Source: Raffel et al. (arXiv:1910.10683), sec. 2.1 and 3.1.4: a decoder
reads the targets shifted by one, and all of the encoder's output. Leaves out: that casts to fp8 and
adapters' operators of cross-attention's keys and values are of the inputs' tokens, too, and that
gradients of eager cross-attention's scores have rows of the inputs' length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cost_models.model.spec import LayerKind, ModelSpec
from cost_models.plan.workload import Workload
from hardware_profiles.errors import InputError


def with_target_length(model: ModelSpec, workload: Workload) -> ModelSpec:
    """Return the model whose decoder has the workload's ``target_seq_len``; unchanged without it.

    >>> from cost_models.model.families import model_spec
    >>> t5 = model_spec({"model_type": "t5"}, name="t5")
    >>> [with_target_length(t5, Workload(512, 1, target_seq_len=n)).target_share for n in (0, 128)]
    [1.0, 0.25]
    """
    if workload.target_seq_len in (0, workload.seq_len):
        return model
    return _with_lengths(model, workload.seq_len, workload.target_seq_len)


def require_decoder(model: ModelSpec, workload: Workload, where: str = "") -> None:
    """Raise an InputError where a model without a decoder of its own has a target length."""
    if workload.target_seq_len and not model.is_encoder_decoder:
        raise InputError(
            f"{where}target_seq_len = {workload.target_seq_len}: {model.name} has no encoder and "
            "decoder with sequences of their own (T5 has); leave it out"
        )


@lru_cache(maxsize=64)
def _with_lengths(model: ModelSpec, seq_len: int, target_seq_len: int) -> ModelSpec:
    def of_kind(kind: LayerKind) -> LayerKind:
        if kind.cross_attention is None:
            return kind
        across = replace(kind.cross_attention, num_queries=target_seq_len, num_keys=seq_len)
        return replace(kind, cross_attention=across)

    return replace(model, kinds=tuple(map(of_kind, model.kinds)))
