"""Reads any piece of any tensor of a checkpoint, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
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
    from executor.layout import Layout, Pieces


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
        """Return the saved values of a parameter's pieces; see ``executor.layout.Start``."""
        return self.weights(layout.name, pieces)

    def weights(self, name: str, pieces: Pieces) -> Tensor:
        """Return pieces of a parameter."""
        parts = self._parts(name)
        return assembled(
            ((part.pieces, self._tensor(WEIGHTS, part, name)) for part in parts), pieces, name
        )

    def state(self, name: str, pieces: Pieces) -> dict[str, Tensor]:
        """Return what the optimizer remembered of pieces of a parameter."""
        found = {}
        parts = self._parts(name)
        for key in self.index.state:
            saved = [(p.pieces, self._tensor(STATE, p, state_name(key, name))) for p in parts]
            if saved[0][1].get_shape():
                found[key] = assembled(saved, pieces, name)
            else:  # a scalar, the same for every part
                found[key] = self.files[self._file(STATE, parts[0])].get_tensor(
                    state_name(key, name)
                )
        return found

    def _parts(self, name: str) -> tuple[Part, ...]:
        if name not in self.index.tensors:
            raise DamagedError(f"{self.folder}: holds no tensor {name}")
        return self.index.tensors[name].parts

    def _tensor(self, kind: str, part: Part, name: str) -> Any:
        return self.files.tensor(self._file(kind, part), name)

    def _file(self, kind: str, part: Part) -> str:
        return file_name(kind, part.rank, self.index.world_size)


def assembled(saved: Iterable[tuple[Pieces, Any]], pieces: Pieces, name: str) -> Tensor:
    """Put pieces of a tensor together from saved parts of it, of which only the overlap is read."""
    result: Tensor | None = None
    missing = 1
    for source_pieces, source in saved:
        if result is None:
            result = torch.empty(local_shape(pieces), dtype=DTYPES[source.get_dtype()])
            missing = result.numel()
        for block in overlaps(source_pieces, pieces):
            here = tuple(slice(s.target, s.target + s.length) for s in block)
            there = tuple(slice(s.source, s.source + s.length) for s in block)
            target = result[here]
            left_out = len(block) - len(source.get_shape())  # of one expert's matrix: the expert
            target.copy_(source[there[left_out:]])
            missing -= target.numel()
    if result is None or missing:
        raise DamagedError(f"{name}: {missing:,} elements are in none of the files")
    return result
