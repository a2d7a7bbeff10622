"""The measured step of a run: passes and waits of its timeline.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct

from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert, read_json

TIMELINE_FILE: Final = "timeline.json"
MAX_BYTES: Final = 100_000_000
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Number = Annotated[int, Meta(ge=0, le=10**9)]


class MeasuredPass(Struct, frozen=True):
    """One pass of a rank; its waits are included."""

    kind: str
    stage: Number
    microbatch: Number
    begin: Seconds
    end: Seconds


class MeasuredWait(Struct, frozen=True):
    """One wait of a rank for other ranks."""

    operation: str
    begin: Seconds
    end: Seconds


class MeasuredRank(Struct, frozen=True):
    """Passes and waits of one rank."""

    rank: Number
    stage: Number  # pipeline rank
    passes: tuple[MeasuredPass, ...]
    waits: tuple[MeasuredWait, ...]


class MeasuredStep(Struct, frozen=True):
    """The last sampled step of a run; ``phases``: seconds of rank 0 by phase."""

    step: Number
    phases: dict[str, Seconds]
    ranks: tuple[MeasuredRank, ...]


def read_measured(folder: Path) -> MeasuredStep | None:
    """Return the measured step of a run's folder; None: the run sampled no step."""
    path = folder / TIMELINE_FILE
    if not path.exists():
        return None
    found = convert(read_json(path, "a timeline", max_bytes=MAX_BYTES), MeasuredStep, str(path))
    for rank in found.ranks:
        spans = [(each.begin, each.end) for each in rank.passes]
        spans += [(each.begin, each.end) for each in rank.waits]
        for begin, end in spans:
            if end < begin:
                raise InputError(f"{path}: rank {rank.rank}: end = {end} is before its begin")
    return found
