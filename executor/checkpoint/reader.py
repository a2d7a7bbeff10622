"""Reads any piece of any tensor of a checkpoint, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.checkpoint.errors import DamagedError
from executor.checkpoint.index import STATE, WEIGHTS, Index, Part, file_name, read_index
from executor.checkpoint.pieces import local_shape, overlaps
from executor.checkpoint.snapshot import state_name
from executor.checkpoint.tensor_file import DTYPES

if TYPE_CHECKING:
    from executor.model.layout import Layout, Pieces


Source = Callable[[], Any]  # a tensor that reads what is sliced from it; opens its file


class TensorFiles:
    """The safetensors files of a folder, each opened once; tensors stay on the disk until read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.opened:
            path = self.folder / name
            try:
                self.opened[name] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise DamagedError(f"{path}: cannot be read: {error}") from None
        return self.opened[name]

    def tensor(self, file: str, name: str) -> Any:
        """Return a tensor that reads what is sliced from it."""
        try:
            return self[file].get_slice(name)
        except SafetensorError as error:
            raise DamagedError(f"{self.folder / file}: {error}") from None


class Checkpoint:
    """A complete checkpoint."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index = read_index(folder) if index is None else index
        self.files = TensorFiles(folder)

    def start(self, layout: Layout, pieces: Pieces) -> Tensor:
        """Return the saved values of a parameter's pieces; see ``executor.model.layout.Start``."""
        return self.weights(layout.name, pieces)

    def weights(self, name: str, pieces: Pieces) -> Tensor:
        """Return pieces of a parameter."""
        parts = self._parts(name)
        return assembled([(p.pieces, self._source(WEIGHTS, p, name)) for p in parts], pieces, name)

    def state(self, name: str, pieces: Pieces) -> dict[str, Tensor]:
        """Return what the optimizer remembered of pieces of a parameter; at least one element."""
        parts = [part for part in self._parts(name) if any(overlaps(part.pieces, pieces))]
        found = {}
        for key in self.index.state:
            saved = [(p.pieces, self._source(STATE, p, state_name(key, name))) for p in parts]
            if saved[0][1]().get_shape():
                found[key] = assembled(saved, pieces, name)
            else:  # a scalar, the same for every part
                file = self.files[self._file(STATE, parts[0])]
                found[key] = file.get_tensor(state_name(key, name))
        return found

    def _parts(self, name: str) -> tuple[Part, ...]:
        if name not in self.index.tensors:
            raise DamagedError(f"{self.folder}: holds no tensor {name}")
        return self.index.tensors[name].parts

    def _source(self, kind: str, part: Part, name: str) -> Source:
        return lambda: self.files.tensor(self._file(kind, part), name)

    def _file(self, kind: str, part: Part) -> str:
        return file_name(kind, part.rank, self.index.world_size)


def assembled(saved: Sequence[tuple[Pieces, Source]], pieces: Pieces, name: str) -> Tensor:
    """Put pieces of a tensor together from saved parts of it, of which only the overlap is read."""
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
            here = tuple(slice(s.target, s.target + s.length) for s in block)
            there = tuple(slice(s.source, s.source + s.length) for s in block)
            left_out = len(block) - len(tensor.get_shape())  # of one expert's matrix: the expert
            target = result[here]
            target.copy_(tensor[there[left_out:]])
            missing -= target.numel()
    if missing:
        raise DamagedError(f"{name}: {missing:,} elements are in none of the files")
    return torch.empty(shape) if result is None else result
