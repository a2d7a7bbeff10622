"""Data options of a run; imports nothing heavy, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

SYNTHETIC: Final = "synthetic"
PACKINGS: Final = ("concat", "documents", "none")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Data sources, and how they are read."""

    sources: tuple[str, ...] = (SYNTHETIC,)  # each as NAME:WEIGHT, or all without weight
    tokenizer: str | None = None  # a local folder; None: bytes
    text_field: str = "text"
    packing: str = "concat"
    skip_bad_rows: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        names = ("tokenizer", "text_field", "packing", "skip_bad_rows")
        return {"data": list(self.sources), **{name: getattr(self, name) for name in names}}
