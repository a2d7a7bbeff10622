"""T5: an encoder and a decoder, run by the module of transformers (executor/encoder_decoder.py)."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from executor.families.description import Family


def _by_transformers(*_: Any) -> Tensor:
    raise AssertionError("the layers of T5 run themselves")


T5: Final = Family(
    tokens="shared",
    layers="decoder.block",
    norm="decoder.final_layer_norm",
    attention=_by_transformers,
    feed_forward=_by_transformers,
    encoder_decoder=True,
    # Raffel et al. (arXiv:1910.10683) tie the embedding to the head, and shrink the logits
    logits_multiplier=lambda c: c.d_model**-0.5 if c.scale_decoder_outputs else 1.0,
)
