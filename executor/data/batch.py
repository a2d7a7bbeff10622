"""A global batch, or the rows of it that one data-parallel rank trains on."""

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

    ``starts`` gives, for every token, the index in its row at which its document begins. Tokens
    with equal starts attend to each other, and positions count from there. None: each row is one
    document.
    """

    inputs: Tensor  # (rows, seq_len), int64
    # (rows, seq_len), or of an encoder-decoder (rows, target_seq_len), int64; IGNORED: not part of
    # the loss
    labels: Tensor
    tokens: int  # in the loss of the whole global batch
    starts: Tensor | None = None  # (rows, seq_len), int64
    first_row: int = 0
    # columns of the rows in ``inputs`` and ``labels`` (context parallelism); None: all
    places: Tensor | None = None

    @classmethod
    def whole(cls, inputs: Tensor, labels: Tensor, starts: Tensor | None = None) -> Batch:
        """Return a global batch; counts its labels that are not ignored."""
        return cls(inputs, labels, int((labels != IGNORED).sum()), starts)

    def rows(self, start: int, stop: int) -> Batch:
        """Return rows [start, stop) of the global batch."""
        if not self.first_row <= start <= stop <= self.first_row + len(self.inputs):
            raise InputError(
                f"rows {start} to {stop} of a batch that holds rows {self.first_row} to "
                f"{self.first_row + len(self.inputs)}"
            )
        here = slice(start - self.first_row, stop - self.first_row)
        starts = None if self.starts is None else self.starts[here]
        return replace(
            self, inputs=self.inputs[here], labels=self.labels[here], starts=starts, first_row=start
        )

    def split(self, size: int) -> list[Batch]:
        """Split into micro-batches of ``size`` rows."""
        first, end = self.first_row, self.first_row + len(self.inputs)
        return [self.rows(row, min(end, row + size)) for row in range(first, end, size)]

    def at(self, places: Tensor) -> Batch:
        """Return the batch with only some tokens of each row; ``starts`` still cover all tokens."""
        return replace(
            self, inputs=self.inputs[:, places], labels=self.labels[:, places], places=places
        )

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device."""
        starts = None if self.starts is None else self.starts.to(device)
        places = None if self.places is None else self.places.to(device)
        return replace(
            self,
            inputs=self.inputs.to(device),
            labels=self.labels.to(device),
            starts=starts,
            places=places,
        )
