"""What a module is called with: made by the user's function, from typed shapes, or guessed.

In this order: ``--input 'x=float32[B,3,224,224]'`` (B: the rows of a micro-batch);
``example_inputs(batch_size)``, an attribute of the factory or a function of its module, which
returns arguments by name; for a Hugging Face module a guess from its config, which is said.
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
IMAGE_SIZE: Final = 224  # where a vision config names none
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
    "say what the module is called with: --input 'x=float32[B,3,224,224]' (B: the rows of a "
    f"micro-batch), or a function {FUNCTION}(batch_size) beside the factory"
)
Inputs = Callable[[int], dict[str, Tensor]]  # of so many rows


@dataclass(frozen=True, slots=True)
class InputShape:
    """One argument: a dimension None is the number of rows."""

    name: str
    dtype: str
    sizes: tuple[int | None, ...]

    def tensor(self, rows: int) -> Tensor:
        """Return zeros of that shape."""
        sizes = [rows if size is None else size for size in self.sizes]
        return torch.zeros(sizes, dtype=DTYPES[self.dtype])

    def __str__(self) -> str:
        sizes = ",".join("B" if size is None else str(size) for size in self.sizes)
        return f"{self.name}={self.dtype}[{sizes}]"


def parse_input_shape(text: str) -> InputShape:
    """Read one ``--input``.

    >>> str(parse_shape("x=float32[B, 3, 8]"))
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
    """Return what makes the arguments for so many rows, and what was assumed on the way."""
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
    said = f"the module is called with {', '.join(str(shape) for shape in shapes)} (a guess)"
    return _of_shapes(shapes), [f"{said}; --input or {FUNCTION} say otherwise"]


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
    """Return the usual arguments of a Hugging Face module; none where it is something else."""
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
