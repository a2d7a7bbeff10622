"""The metrics of a run for TensorBoard, beside metrics.jsonl; the package is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hardware_profiles.errors import InputError

FOLDER: Final = "tensorboard"  # inside the folder of the run
NAMES: Final = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "loss_scale": "train/loss_scale",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "hfu": "speed/hfu",
    "exposed_communication_seconds": "speed/exposed_communication_seconds",
    "memory_bytes": "memory/bytes",
}
MOST_RANKS: Final = 64  # of which each has a curve of its own memory
EVALUATION_NAMES: Final = {"loss": "evaluation/loss", "perplexity": "evaluation/perplexity"}


def require_tensorboard() -> None:
    """Raise an InputError where the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("--tensorboard needs a package: pip install 'shardplan[tensorboard]'")


class TensorBoard:
    """Writes the records of steps and evaluations.

    Of several ranks the largest value, and the memory of each as long as they are not too many.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what an earlier session wrote after that step is not shown
        self.writer = SummaryWriter(str(folder / FOLDER), purge_step=first_step + 1)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        names = EVALUATION_NAMES if record["kind"] == "evaluation" else NAMES
        for key, name in names.items():
            value = record.get(key)
            if isinstance(value, list):
                if key == "memory_bytes" and len(value) <= MOST_RANKS:
                    self._of_each_rank(value, record["step"])
                value = max((v for v in value if v is not None), default=None)
            if value is not None:
                self.writer.add_scalar(name, value, record["step"])

    def _of_each_rank(self, values: Sequence[float | None], step: int) -> None:
        for rank, value in enumerate(values):
            if value is not None:
                self.writer.add_scalar(f"memory_of_rank/{rank:02d}", value, step)

    def close(self) -> None:
        """Write what is still held back."""
        self.writer.close()
