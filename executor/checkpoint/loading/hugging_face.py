"""Reader of parameter pieces from a Hugging Face folder (safetensors, one file or several)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec import Struct
from torch import Tensor

from executor.checkpoint.format.checkpoint_errors import DamagedError
from executor.checkpoint.format.hugging_face_names import (
    CONFIG,
    INDEX,
    SINGLE,
    StoredTensor,
    no_weights_error,
    stored_tensors,
)
from executor.checkpoint.format.pieces import whole_tensor
from executor.checkpoint.loading.checkpoint_reader import TensorFiles, assemble
from executor.checkpoint.loading.compatibility import first_config_difference
from executor.model.families import FAMILIES
from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert, read_json

if TYPE_CHECKING:
    from executor.model.parameter_layout import ParameterLayout, Pieces

MAX_NAMES: Final = 3  # maximum number of names in an error
# tensors in files that are no parameters: computed buffers in older files, and persistent buffers
_NOT_PARAMETERS: Final = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
    ".position_ids",
    ".e_score_correction_bias",
    ".EncDecAttention.relative_attention_bias.weight",  # in the first T5 files, unused
)
_HEADS: Final = ("lm_head.weight", "embed_out.weight")
# copies of a tied embedding that files may contain
_COPIES: Final = (*_HEADS, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
COMPARED_ROWS: Final = 8192  # at a time
MAX_INDEX_BYTES: Final = 200_000_000  # DeepSeek-V3's has 9 million


class _WeightIndex(Struct, frozen=True):
    """The part of model.safetensors.index.json that is read."""

    weight_map: dict[str, str]  # file by tensor


class HuggingFaceFolder:
    """A folder written by ``save_pretrained``; only the requested slices are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / CONFIG, "the config of a Hugging Face folder")
        self.family = str(self.config.get("model_type"))
        self.files = TensorFiles(path)
        self.file_of = self._weight_map()

    def check(self, config: Mapping[str, Any], table: Mapping[str, ParameterLayout]) -> list[str]:
        """Check that the folder holds every parameter of a model; return notes."""
        missing = [name for name, layout in table.items() if self._find(layout) is None]
        if missing:
            raise InputError(
                f"{self.path}: {len(missing)} of {len(table)} parameters of the model are not in "
                f"its files: {_few(missing)}"
            )
        wrong = [words for layout in table.values() for words in self._wrong_shapes(layout)]
        if wrong:
            raise InputError(f"{self.path}: {len(wrong)} tensors of other shapes: {_few(wrong)}")
        used = {part.key for layout in table.values() for part in self._find(layout) or ()}
        unused = [k for k in sorted({*self.file_of} - used) if not k.endswith(_NOT_PARAMETERS)]
        if not table.keys() & {*_HEADS}:  # tied
            copies = [key for key in unused if key in _COPIES]
            self._check_copies(copies, table)
            unused = [key for key in unused if key not in copies]
        if unused:
            raise InputError(
                f"{self.path}: {len(unused)} of its {len(self.file_of)} tensors have no place in "
                f"the model: {_few(unused)}"
            )
        difference = first_config_difference(self.config, config)
        if difference is None:
            return []
        return [f"{self.path / CONFIG} differs from the plan's model: {difference}"]

    def _check_copies(self, copies: list[str], table: Mapping[str, ParameterLayout]) -> None:
        """Refuse a separate head (Flan-T5's), which a tied model would silently lose."""
        for key in copies:
            name = f"{FAMILIES[self.family].tokens}.weight"
            found = self._find(table[name]) or []
            one, two = self._tensor(found[0].key), self._tensor(key)
            rows = range(0, one.get_shape()[0], COMPARED_ROWS)
            same = one.get_shape() == two.get_shape() and all(
                torch.equal(one[row : row + COMPARED_ROWS], two[row : row + COMPARED_ROWS])
                for row in rows
            )
            if not same:
                raise InputError(
                    f"{self.path}: {key} is not {found[0].key}, but the model is trained with one "
                    "tensor for both (tied): these files cannot initialise it"
                )

    def start(self, layout: ParameterLayout, pieces: Pieces) -> Tensor:
        """Return the folder's values of a parameter's pieces (an ``Initializer``)."""
        found = self._find(layout)
        if found is None:
            raise DamagedError(f"{self.path}: holds no tensor {layout.name}")
        parts = [(part.pieces, partial(self._tensor, part.key)) for part in found]
        return assemble(parts, pieces, layout.name)

    def _find(self, layout: ParameterLayout) -> list[StoredTensor] | None:
        """Return the stored tensors of a parameter.

        Packed as in the module, or in the family's usual form.

        Files of a bare model omit the module's first name (``h.0.…``, not ``transformer.h.0.…``).
        """
        as_module = [StoredTensor(layout.name, whole_tensor(layout.shape))]
        for parts in (as_module, stored_tensors(self.family, layout.name, layout.shape)):
            for drop in (0, 1):
                named = [_without_first(part, drop) for part in parts]
                if all(part.key in self.file_of for part in named):
                    return named
        return None

    def _wrong_shapes(self, layout: ParameterLayout) -> Iterator[str]:
        for part in self._find(layout) or ():
            shape = tuple(self._tensor(part.key).get_shape())
            if shape != part.shape:
                yield f"{part.key} is {list(shape)}, the model has {list(part.shape)}"

    def _tensor(self, key: str) -> Any:
        return self.files.tensor(self.file_of[key], key)

    def _weight_map(self) -> dict[str, str]:
        """Return the file of every tensor."""
        if (self.path / INDEX).exists():
            what = "the index of a Hugging Face folder"
            values = read_json(self.path / INDEX, what, max_bytes=MAX_INDEX_BYTES)
            return convert(values, _WeightIndex, str(self.path / INDEX)).weight_map
        if (self.path / SINGLE).exists():
            return dict.fromkeys(self.files[SINGLE].keys(), SINGLE)
        raise no_weights_error(self.path)


def _without_first(part: StoredTensor, count: int) -> StoredTensor:
    key = part.key.partition(".")[2] if count else part.key
    return StoredTensor(key, part.pieces, part.one_expert)


def _few(words: list[str]) -> str:
    more = f", and {len(words) - MAX_NAMES} more" if len(words) > MAX_NAMES else ""
    return ", ".join(words[:MAX_NAMES]) + more
