"""Plans as products of choices, multiplied out into columns by values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.coded import Coded, coded
from cost_models.plan import FLAGS, PlanTable


class Block(NamedTuple):
    """All plans of one grid: its own columns, and choices that are multiplied with each other."""

    same: dict[str, Any]
    choices: tuple[dict[str, Any], ...]  # columns of each choice, one below the other
    sizes: tuple[int, ...]  # how many rows each choice has

    @property
    def size(self) -> int:
        """How many plans there are."""
        return prod(self.sizes)


def by_values(blocks: list[Block]) -> list[Block]:
    """Return the same blocks with columns by the values that all of them together have."""

    def each(columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = {name: coded([_typed(name, one[name]) for one in columns]) for name in columns[0]}
        return [dict(zip(found, parts, strict=True)) for parts in zip(*found.values(), strict=True)]

    same = each([block.same for block in blocks])
    choices = [each(list(of_all)) for of_all in zip(*(b.choices for b in blocks), strict=True)]
    return [
        Block(mine, one, block.sizes)
        for mine, one, block in zip(same, zip(*choices, strict=True), blocks, strict=True)
    ]


def _typed(name: str, values: Any) -> NDArray[Any]:
    return np.atleast_1d(np.asarray(values, dtype=np.bool_ if name in FLAGS else np.int64))


def expanded(blocks: Sequence[Block], pinned: Mapping[str, Any]) -> PlanTable:
    """Multiply out the choices of blocks ``by_values``; ``pinned``: columns of one value."""
    lengths = [block.size for block in blocks]
    ends = np.cumsum(lengths).tolist()
    columns: dict[str, Any] = {}
    for name, first in blocks[0].same.items():
        codes = np.concatenate([block.same[name].codes for block in blocks])
        columns[name] = _column(first.values, np.repeat(codes, lengths))
    for number, choice in enumerate(blocks[0].choices):
        for name, first in choice.items():
            codes = np.empty(ends[-1], dtype=first.codes.dtype)
            for block, end in zip(blocks, ends, strict=True):
                size, inner = block.sizes[number], prod(block.sizes[number + 1 :])
                mine = codes[end - block.size : end].reshape(-1, size, inner)
                mine[...] = block.choices[number][name].codes[:, None]
            columns[name] = _column(first.values, codes)
    for name, value in pinned.items():
        columns[name] = np.broadcast_to(_typed(name, value)[0], ends[-1])
    return PlanTable(**columns)


def _column(values: NDArray[Any], codes: NDArray[Any]) -> Any:
    return Coded(values, codes) if len(values) > 1 else np.broadcast_to(values[0], len(codes))
