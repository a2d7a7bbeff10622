"""Reader of any piece of any tensor in a checkpoint, independent of the layout that wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.checkpoint.format.checkpoint_errors import DamagedError, file_in
from executor.checkpoint.format.index import (
    STATE,
    WEIGHTS,
    CheckpointIndex,
    TensorPart,
    file_name,
    read_index,
    state_name,
)
from executor.checkpoint.format.pieces import local_shape, overlaps
from executor.checkpoint.format.tensor_file import DTYPES
from hardware_profiles.message import on_one_line

if TYPE_CHECKING:
    from executor.model.parameter_layout import ParameterLayout, Pieces


Source = Callable[[], Any]  # returns a lazily read tensor; opens its file


class TensorFiles:
    """The safetensors files of a folder, each opened once; tensors are read lazily."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.opened:
            path = file_in(self.folder, name)
            try:
                self.opened[name] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise DamagedError(f"{path}: cannot be read: {on_one_line(str(error))}") from None
        return self.opened[name]

    def tensor(self, file: str, name: str) -> Any:
        """Return a lazily read tensor."""
        try:
            return self[file].get_slice(name)
        except SafetensorError as error:
            raise DamagedError(f"{self.folder / file}: {on_one_line(str(error))}") from None


class Checkpoint:
    """A complete checkpoint."""

    def __init__(self, folder: Path, index: CheckpointIndex | None = None) -> None:
        self.folder = folder
        self.index = read_index(folder) if index is None else index
        self.files = TensorFiles(folder)

    def start(self, layout: ParameterLayout, pieces: Pieces) -> Tensor:
        """Return the saved values of a parameter's pieces (an ``Initializer``)."""
        return self.weights(layout.name, pieces)

    def weights(self, name: str, pieces: Pieces) -> Tensor:
        """Return pieces of a parameter."""
        parts = self._parts(name)
        return assemble([(p.pieces, self._source(WEIGHTS, p, name)) for p in parts], pieces, name)

    def state(self, name: str, pieces: Pieces) -> dict[str, Tensor]:
        """Return the optimizer state of pieces of a parameter; at least one element."""
        parts = [part for part in self._parts(name) if any(overlaps(part.pieces, pieces))]
        found = {}
        for key in self.index.state:
            saved = [(p.pieces, self._source(STATE, p, state_name(key, name))) for p in parts]
            if saved[0][1]().get_shape():
                found[key] = assemble(saved, pieces, name)
            else:  # a scalar, the same for every part
                file = self.files[self._file(STATE, parts[0])]
                found[key] = file.get_tensor(state_name(key, name))
        return found

    def _parts(self, name: str) -> tuple[TensorPart, ...]:
        if name not in self.index.tensors:
            raise DamagedError(f"{self.folder}: holds no tensor {name}")
        return self.index.tensors[name].parts

    def _source(self, kind: str, part: TensorPart, name: str) -> Source:
        return lambda: self.files.tensor(self._file(kind, part), name)

    def _file(self, kind: str, part: TensorPart) -> str:
        return file_name(kind, part.rank, self.index.world_size)


def assemble(saved: Sequence[tuple[Pieces, Source]], pieces: Pieces, name: str) -> Tensor:
    """Assemble pieces of a tensor from its saved parts, of which only the overlap is read."""
    shape = local_shape(pieces)
    result: Tensor | None = None
    missing = math.prod(shape)
    for source_pieces, source in saved:
        blocks = list(overlaps(source_pieces, pieces))
        if not blocks:
            continue
        tensor = source()
        if result is None:
            result = torch.empty(shape, dtype=DTYPES[tensor.get_dtype()])
        for block in blocks:
            target_slices = tuple(slice(s.target, s.target + s.length) for s in block)
            source_slices = tuple(slice(s.source, s.source + s.length) for s in block)
            omitted = len(block) - len(tensor.get_shape())  # the expert's dimension, if one expert
            target = result[target_slices]
            target.copy_(tensor[source_slices[omitted:]])
            missing -= target.numel()
    if missing:
        raise DamagedError(f"{name}: {missing:,} elements are in none of the files")
    return torch.empty(shape) if result is None else result
