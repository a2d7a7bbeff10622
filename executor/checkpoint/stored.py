"""How Hugging Face files hold a parameter of the module: under which names, in which pieces.

transformers 5 computes all experts of a layer with one packed tensor, and its files keep one tensor
an expert and matrix; a few names differ as well. Elsewhere file and module agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from executor.checkpoint.pieces import whole

if TYPE_CHECKING:
    from executor.model.layout import Pieces

# name in the module -> name in the files
_RENAMED: Final = {
    "gpt_neox": ("lm_head.", "embed_out."),
    "mixtral": (".mlp.", ".block_sparse_moe."),
}
_PACKED_IN_FILES: Final = ("gpt_oss",)
_MATRICES: Final = {"mixtral": ("w1", "w3", "w2")}  # gate, up, down
_USUAL_MATRICES: Final = ("gate_proj", "up_proj", "down_proj")
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: these pieces of a parameter."""

    key: str
    pieces: Pieces
    one_expert: bool = False  # its first dimension, of length 1, is left out

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        lengths = tuple(sum(b - a for a, b in ranges) for ranges in self.pieces)
        return lengths[1:] if self.one_expert else lengths


def stored(family: str, name: str, shape: Sequence[int]) -> list[Stored]:
    """Return the tensors of the files that together are one parameter.

    >>> [s.key for s in stored("olmoe", "layers.0.mlp.experts.down_proj", (2, 8, 4))]
    ['layers.0.mlp.experts.0.down_proj.weight', 'layers.0.mlp.experts.1.down_proj.weight']
    """
    key = name.replace(*_RENAMED.get(family, ("", "")))
    packed = name.endswith((_GATE_UP, _DOWN)) and family not in _PACKED_IN_FILES
    if not packed:
        return [Stored(key, whole(shape))]
    gate, up, down = _MATRICES.get(family, _USUAL_MATRICES)
    experts, rows, width = shape
    cuts = [(down, 0, rows)]
    if name.endswith(_GATE_UP):
        cuts = [(gate, 0, rows // 2), (up, rows // 2, rows)]
    prefix = key.rpartition(".")[0]
    return [
        Stored(
            f"{prefix}.{expert}.{matrix}.weight",
            (((expert, expert + 1),), ((start, stop),), ((0, width),)),
            one_expert=True,
        )
        for expert in range(experts)
        for matrix, start, stop in cuts
    ]
