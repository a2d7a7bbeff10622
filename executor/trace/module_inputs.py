"""Arguments of a traced module: from a function of the user, from given shapes, or guessed.

The first of these that applies: ``--input 'x=float32[B,3,224,224]'`` (B: rows of a micro-batch);
``example_inputs(batch_size)``, an attribute of the factory or a function of its Python module that
returns arguments by name; for Hugging Face modules a guess from the config, which is reported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hardware_profiles.errors import InputError

FUNCTION: Final = "example_inputs"
LONGEST: Final = 4096  # tokens of a guessed sequence
IMAGE_SIZE: Final = 224  # if the vision config has none
DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_INPUT: Final = re.compile(r"([A-Za-z_]\w*)=(\w+)\[([^\]]*)\]")
_HOW: Final = (
    "its arguments are unknown: use --input 'x=float32[B,3,224,224]' (B: rows of a micro-batch), "
    f"or define {FUNCTION}(batch_size) in the module of the factory"
)
Inputs = Callable[[int], dict[str, Tensor]]  # rows to arguments


@dataclass(frozen=True, slots=True)
class InputShape:
    """One argument; a size of None is the number of rows."""

    name: str
    dtype: str
    sizes: tuple[int | None, ...]

    def tensor(self, rows: int) -> Tensor:
        """Return zeros of this shape."""
        sizes = [rows if size is None else size for size in self.sizes]
        return torch.zeros(sizes, dtype=DTYPES[self.dtype])

    def __str__(self) -> str:
        sizes = ",".join("B" if size is None else str(size) for size in self.sizes)
        return f"{self.name}={self.dtype}[{sizes}]"


def parse_input_shape(text: str) -> InputShape:
    """Parse one ``--input``.

    >>> str(parse_input_shape("x=float32[B, 3, 8]"))
    'x=float32[B,3,8]'
    """
    found = _INPUT.fullmatch(text.strip())
    if found is None:
        raise InputError(f"--input {text!r} (must be like x=float32[B,3,224,224])")
    name, dtype, listed = found.groups()
    if dtype not in DTYPES:
        raise InputError(f"--input {text!r}: {dtype} (must be one of {', '.join(DTYPES)})")
    words = [word.strip() for word in listed.split(",")] if listed.strip() else []
    for word in words:
        if word != "B" and not (word.isdecimal() and 1 <= int(word) <= 10**9):
            raise InputError(f"--input {text!r}: size {word!r} (must be B or a whole number)")
    if "B" not in words:
        raise InputError(f"--input {text!r}: no size is B, the rows of a micro-batch")
    return InputShape(name, dtype, tuple(None if word == "B" else int(word) for word in words))


def inputs_of(
    factory: Callable[..., Any], module: nn.Module, input_shapes: Sequence[str]
) -> tuple[Inputs, list[str]]:
    """Return a function from rows to arguments, and a list of the assumptions made."""
    if input_shapes:
        return _of_shapes([parse_input_shape(text) for text in input_shapes]), []
    function = getattr(factory, FUNCTION, None) or getattr(
        sys.modules.get(getattr(factory, "__module__", "")), FUNCTION, None
    )
    if function is not None:
        return _of_function(function), []
    shapes = _guess(module)
    if not shapes:
        raise InputError(_HOW)
    guess = f"the module is called with {', '.join(str(shape) for shape in shapes)} (a guess)"
    return _of_shapes(shapes), [f"{guess}; --input or {FUNCTION} overrides it"]


def _of_shapes(shapes: Sequence[InputShape]) -> Inputs:
    return lambda rows: {shape.name: shape.tensor(rows) for shape in shapes}


def _of_function(function: Callable[[int], Any]) -> Inputs:
    def inputs(rows: int) -> dict[str, Tensor]:
        found = function(rows)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise InputError(f"{FUNCTION} returns {type(found).__name__} (arguments by name)")
        return dict(found)

    return inputs


def _guess(module: nn.Module) -> list[InputShape]:
    """Return the usual arguments of a Hugging Face module; an empty list for other modules."""
    config, main = getattr(module, "config", None), getattr(module, "main_input_name", None)
    if config is None:
        return []
    name = type(module).__name__
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        shapes = [InputShape(main, "float32", (None, config.num_channels, height, width))]
        if name.endswith("ForImageClassification"):
            shapes.append(InputShape("labels", "int64", (None,)))
        return shapes
    if main == "input_ids":
        length = min(getattr(config, "max_position_embeddings", None) or LONGEST, LONGEST)
        shapes = [InputShape(main, "int64", (None, length))]
        if name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForTokenClassification")):
            shapes.append(InputShape("labels", "int64", (None, length)))
        elif name.endswith("ForSequenceClassification"):
            shapes.append(InputShape("labels", "int64", (None,)))
        return shapes
    return []
