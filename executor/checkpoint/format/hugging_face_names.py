"""Names of Hugging Face weight files, and the tensors in which they store a parameter.

transformers 5 computes all experts of a layer with one packed tensor, but its files store one
tensor per expert and matrix; a few names differ as well. Otherwise file and module agree. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from executor.checkpoint.format.pieces import whole_tensor
from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_json

if TYPE_CHECKING:
    from executor.model.parameter_layout import Pieces

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
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
class StoredTensor:
    """A tensor in a file: these pieces of a parameter."""

    key: str
    pieces: Pieces
    one_expert: bool = False  # its first dimension, of length 1, is omitted

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        lengths = tuple(sum(b - a for a, b in ranges) for ranges in self.pieces)
        return lengths[1:] if self.one_expert else lengths


def stored_tensors(family: str, name: str, shape: Sequence[int]) -> list[StoredTensor]:
    """Return the tensors of the files that together form one parameter.

    >>> [s.key for s in stored("olmoe", "layers.0.mlp.experts.down_proj", (2, 8, 4))]
    ['layers.0.mlp.experts.0.down_proj.weight', 'layers.0.mlp.experts.1.down_proj.weight']
    """
    key = name.replace(*_RENAMED.get(family, ("", "")))
    packed = name.endswith((_GATE_UP, _DOWN)) and family not in _PACKED_IN_FILES
    if not packed:
        return [StoredTensor(key, whole_tensor(shape))]
    gate, up, down = _MATRICES.get(family, _USUAL_MATRICES)
    experts, rows, width = shape
    cuts = [(down, 0, rows)]
    if name.endswith(_GATE_UP):
        cuts = [(gate, 0, rows // 2), (up, rows // 2, rows)]
    prefix = key.rpartition(".")[0]
    return [
        StoredTensor(
            f"{prefix}.{expert}.{matrix}.weight",
            (((expert, expert + 1),), ((start, stop),), ((0, width),)),
            one_expert=True,
        )
        for expert in range(experts)
        for matrix, start, stop in cuts
    ]


def require_weights(folder: Path) -> None:
    """Raise an InputError if a folder has no config or no readable weights."""
    read_json(folder / CONFIG, "the config of a Hugging Face folder")
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        raise no_weights_error(folder)


def no_weights_error(folder: Path) -> InputError:
    """Return the error for a folder without readable weights."""
    pickled = " (pickled weights are not read: they can run code)"
    others = pickled if any(folder.glob("*.bin")) else ""
    return InputError(f"{folder}: neither {SINGLE} nor {INDEX} in it{others}")
