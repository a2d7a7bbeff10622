"""Data options of a run; imports nothing heavy, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from hardware_profiles.arguments import names_arguments
from hardware_profiles.options import Option

SYNTHETIC: Final = "synthetic"
Packing = Literal["concat", "documents", "none"]
PACKINGS: Final[tuple[str, ...]] = get_args(Packing)
DATA: Final = "data"  # title of the options in the help

Tokenizer = Annotated[
    str | None, Option(metavar="FOLDER", group=DATA, help="local tokenizer (default: bytes)")
]
TextField = Annotated[
    str,
    Option(
        metavar="NAME",
        group=DATA,
        help="field of JSONL and Parquet rows (default: {default}; else their input_ids)",
    ),
]
SkipBadRows = Annotated[bool, Option(group=DATA, help="skip and count rows that cannot be used")]


@names_arguments("executor.data.DataOptions")
@dataclass(frozen=True, slots=True)
class DataOptions:
    """Data sources, and how they are read."""

    sources: Annotated[
        tuple[str, ...],  # each as NAME:WEIGHT, or all without weight
        Option(
            "--data",
            metavar="PATH[:WEIGHT]",
            common=True,
            group=DATA,
            help="a file or folder of text, JSONL, Parquet or tokens (may be repeated, for a "
            "mixture), or the word synthetic (default)",
        ),
    ] = (SYNTHETIC,)
    tokenizer: Tokenizer = None  # a local folder; None: bytes
    text_field: TextField = "text"
    packing: Annotated[
        Packing,
        Option(
            group=DATA,
            help="how documents fill sequences: concatenated (concat, default), concatenated "
            "without attention between documents (documents), or one per sequence (none)",
        ),
    ] = "concat"
    skip_bad_rows: SkipBadRows = False

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        names = ("tokenizer", "text_field", "packing", "skip_bad_rows")
        return {"data": list(self.sources), **{name: getattr(self, name) for name in names}}
