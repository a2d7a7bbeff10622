"""Frequency and cost of interruptions of runs, and the write rate of checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct, structs
from msgspec.structs import astuple

from hardware_profiles.cluster.schema import Figure, Kind
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import convert, read_toml

PATH: Final = Path(__file__).parent / "failures.toml"
# what --failures calls a figure, and what its number is multiplied by
SHORT: Final = {
    "mtbf": ("hours_between_failures", 1.0, "hours between failures of one accelerator"),
    "restart": ("restart_seconds", 60.0, "minutes until a run goes on"),
    "stall": ("stall_seconds", 1.0, "seconds that every checkpoint stops training at least"),
    "storage": ("storage_bytes_per_second_per_node", 1e9, "GB/s that a node writes"),
}
LARGEST: Final = 1e12


class Published(Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of the file."""

    value: Annotated[float, Meta(ge=1e-9, le=1e30)]
    kind: Kind
    source: str


class FailureProfile(Struct, frozen=True):
    """Each figure with its source."""

    hours_between_failures: Figure  # of one accelerator
    restart_seconds: Figure
    storage_bytes_per_second_per_node: Figure
    stall_seconds: Figure  # of a checkpoint, besides the copy to the host


class _FailuresFile(Struct, frozen=True, forbid_unknown_fields=True):
    hours_between_failures: Published
    restart_seconds: Published
    storage_bytes_per_second_per_node: Published
    stall_seconds: Published


@cache
def failure_profile() -> FailureProfile:
    """Load the published figures."""
    found = convert(read_toml(PATH, "figures of failures"), _FailuresFile, str(PATH))
    figures = {
        name: Figure(*astuple(getattr(found, name))) for name in _FailuresFile.__struct_fields__
    }
    return FailureProfile(**figures)


def parse_failures(text: str | None) -> FailureProfile:
    """Read ``mtbf=20000,restart=15,stall=2,storage=2``; missing figures are the published ones.

    >>> parse_failures("restart=15").restart_seconds.value
    900.0
    """
    profile = failure_profile()
    for item in filter(None, (part.strip() for part in (text or "").split(","))):
        name, equals, number = (part.strip() for part in item.partition("="))
        if name not in SHORT or not equals:
            hint = "" if name in SHORT else did_you_mean(name, list(SHORT))
            raise InputError(
                f"--failures {item[:40]!r}: must be some of mtbf=HOURS, restart=MINUTES, "
                f"stall=SECONDS, storage=GB/s with commas between them. {hint}".strip()
            )
        field, scale, meaning = SHORT[name]
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not 0.0 < value <= LARGEST:
            raise InputError(
                f"--failures {item[:40]!r}: must be {meaning}, above 0 and at most {LARGEST:g}"
            )
        profile = structs.replace(profile, **{field: Figure(scale * value, "assumed", "given")})
    return profile
