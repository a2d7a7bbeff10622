"""The metrics of a run for TensorBoard, in addition to metrics.jsonl; the package is optional."""

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
MAX_RANKS: Final = 64  # with a memory curve of their own
EVALUATION_NAMES: Final = {"loss": "evaluation/loss", "perplexity": "evaluation/perplexity"}


def require_tensorboard() -> None:
    """Raise an InputError if the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("--tensorboard needs a package: pip install 'shardplan[tensorboard]'")


class TensorBoard:
    """Writes the records of steps and evaluations.

    For per-rank values it writes the largest, and each rank's memory if there are few ranks.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # records of an earlier session after that step are hidden
        self.writer = SummaryWriter(str(folder / FOLDER), purge_step=first_step + 1)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        names = EVALUATION_NAMES if record["kind"] == "evaluation" else NAMES
        for key, name in names.items():
            value = record.get(key)
            if isinstance(value, list):
                if key == "memory_bytes" and len(value) <= MAX_RANKS:
                    self._of_each_rank(value, record["step"])
                value = max((v for v in value if v is not None), default=None)
            if value is not None:
                self.writer.add_scalar(name, value, record["step"])

    def _of_each_rank(self, values: Sequence[float | None], step: int) -> None:
        for rank, value in enumerate(values):
            if value is not None:
                self.writer.add_scalar(f"memory_of_rank/{rank:02d}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self.writer.close()
