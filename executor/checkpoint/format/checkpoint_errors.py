"""Errors of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError, RunError

MAX_NAME: Final = 200  # characters of a file's name


class CheckpointError(RunError):
    """A checkpoint could not be written."""


class DamagedError(InputError):
    """A checkpoint does not match its index, or has no index."""


def file_in(folder: Path, name: str) -> Path:
    """Return a file that an index names; a DamagedError if it is elsewhere, or a pipe or device."""
    path = folder / name
    if path.name != name or len(name) > MAX_NAME or not name.isprintable():
        raise DamagedError(f"{folder}: its index names a file elsewhere: {name[:60]!r}")
    if path.exists() and not path.is_file():
        raise DamagedError(f"{path}: is not a regular file")
    return path


def cannot_be_written(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file or folder that the system refused to write."""
    return CheckpointError(f"{path}: cannot be written: {error.strerror or error}")
