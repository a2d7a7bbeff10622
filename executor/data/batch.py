"""A batch, or the rows of it that one data rank trains on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor.data.packing import IGNORED
from hardware_profiles.errors import InputError

__all__ = ["IGNORED", "Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ``first_row`` to ``first_row + len(inputs)`` of a global batch.

    ``starts`` says for every token where in its row its document begins: tokens with the same start
    see each other, and positions count from there. None: every row is one document.
    """

    inputs: Tensor  # (rows, seq_len), int64
    labels: Tensor  # (rows, seq_len), int64; IGNORED where a token does not count
    tokens: int  # that count, in the whole global batch
    starts: Tensor | None = None  # (rows, seq_len), int64
    first_row: int = 0
    # which tokens of each row ``inputs`` and ``labels`` hold (context parallelism); None: all
    places: Tensor | None = None

    @classmethod
    def whole(cls, inputs: Tensor, labels: Tensor, starts: Tensor | None = None) -> Batch:
        """Return a global batch, its counted tokens counted."""
        return cls(inputs, labels, int((labels != IGNORED).sum()), starts)

    def rows(self, start: int, stop: int) -> Batch:
        """Return the rows [start, stop) of the global batch."""
        if not self.first_row <= start <= stop <= self.first_row + len(self.inputs):
            raise InputError(
                f"rows {start} to {stop} of a batch are asked for, it holds {self.first_row} to "
                f"{self.first_row + len(self.inputs)}"
            )
        here = slice(start - self.first_row, stop - self.first_row)
        starts = None if self.starts is None else self.starts[here]
        return replace(
            self,
            inputs=self.inputs[here],
            labels=self.labels[here],
            starts=starts,
            first_row=start,
        )

    def split(self, size: int) -> list[Batch]:
        """Cut into micro-batches of ``size`` rows."""
        first, end = self.first_row, self.first_row + len(self.inputs)
        return [self.rows(row, min(end, row + size)) for row in range(first, end, size)]

    def at(self, places: Tensor) -> Batch:
        """Return the batch with some tokens of each row only; ``starts`` are those of all."""
        return replace(
            self, inputs=self.inputs[:, places], labels=self.labels[:, places], places=places
        )

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        starts = None if self.starts is None else self.starts.to(device)
        places = None if self.places is None else self.places.to(device)
        return replace(
            self,
            inputs=self.inputs.to(device),
            labels=self.labels.to(device),
            starts=starts,
            places=places,
        )
