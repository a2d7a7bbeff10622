"""Rows and tokens of a batch as a training script gives it to its model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from hardware_profiles.errors import InputError

TOKENS: Final = ("input_ids", "tokens", "inputs_embeds", "decoder_input_ids", "labels")
_EXPECTED: Final = (
    "a batch (arguments by name), a tensor, a tuple of tensors, or (rows, tokens) such as (4, 2048)"
)


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """One micro-batch: rows, tokens of a row (None: not a text), and the model's arguments."""

    rows: int
    tokens: int | None
    arguments: Mapping[str, Any]


def batch_of(inputs: Any, module: nn.Module) -> LiveBatch:
    """Describe the inputs of a step: a batch, positional tensors, or two sizes."""
    if (
        isinstance(inputs, (tuple, list))
        and len(inputs) == 2
        and all(type(size) is int and size > 0 for size in inputs)
    ):
        return LiveBatch(inputs[0], inputs[1], {})
    if hasattr(inputs, "data") and isinstance(inputs.data, Mapping):  # BatchEncoding
        inputs = inputs.data
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        arguments = dict(inputs)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        arguments = _by_name(inputs, module)
    else:
        raise InputError(f"inputs = {type(inputs).__name__} (must be {_EXPECTED})")
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    sized = {key: value for key, value in tensors.items() if value.dim()}
    if not sized:
        raise InputError(f"inputs without any tensor that has rows (must be {_EXPECTED})")
    texts = [sized[key] for key in TOKENS if key in sized and sized[key].dim() >= 2]
    first = texts[0] if texts else next(iter(sized.values()))
    tokens = max((text.shape[1] for text in texts), default=None)
    if tokens is None and first.dim() == 2 and not first.is_floating_point():
        tokens = first.shape[1]
    return LiveBatch(len(first), None if tokens is None else int(tokens), arguments)


def _by_name(values: Sequence[Any], module: nn.Module) -> dict[str, Any]:
    """Return positional arguments by the names that the module's ``forward`` gives them."""
    names = [
        name
        for name, one in inspect.signature(module.forward).parameters.items()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    # a batch of a data loader may end with targets, which the model does not take
    return dict(zip(names, values, strict=False))
