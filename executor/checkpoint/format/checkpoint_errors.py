"""Errors of checkpoints."""

from __future__ import annotations

from pathlib import Path

from hardware_profiles.errors import InputError, RunError


class CheckpointError(RunError):
    """A checkpoint could not be written."""


class DamagedError(InputError):
    """A checkpoint does not match its index, or has no index."""


def cannot_be_written(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file or folder that the system refused to write."""
    return CheckpointError(f"{path}: cannot be written: {error.strerror or error}")
