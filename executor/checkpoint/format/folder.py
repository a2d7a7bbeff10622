"""The folder of a run's checkpoints: names, order, and deletion.

    step-00000100                    complete: published by one rename
    step-00000200.tmp-5f0c2a91       being written, or left by a killed run
    step-00000200.aside-5f0c2a91     set aside: damaged, or newer than a resumed checkpoint
    step-00000100.old-5f0c2a91       being deleted

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from executor.checkpoint.format.checkpoint_errors import cannot_be_written
from hardware_profiles.errors import InputError

_COMPLETE: Final = re.compile(r"step-(\d{8,})")
_PASSING: Final = re.compile(r"step-\d{8,}\.(tmp|old)-[0-9a-f]+")


def step_name(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:08d}"


def is_complete_name(name: str) -> bool:
    """Return whether a name is that of a complete checkpoint."""
    return _COMPLETE.fullmatch(name) is not None


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name."""
    found = _COMPLETE.fullmatch(folder.name)
    assert found is not None, folder
    return int(found[1])


class CheckpointFolder:
    """The folder of all checkpoints of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> list[Path]:
        """Return the folders named as complete checkpoints, the newest first."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        found = [self.path / name for name in names if _COMPLETE.fullmatch(name)]
        return sorted((f for f in found if f.is_dir()), key=step_of, reverse=True)

    def prepare(self) -> None:
        """Create the folder, and remove incomplete checkpoints of a killed run."""
        with _named(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
        for name in os.listdir(self.path):
            if _PASSING.fullmatch(name):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """Create a temporary folder for the checkpoint after a step."""
        folder = self.path / f"{step_name(step)}.tmp-{_token()}"
        with _named(folder):
            folder.mkdir()
        return folder

    def publish(self, temporary: Path, step: int) -> Path:
        """Publish a checkpoint whose files are all on the disk; return its folder."""
        final = self.path / step_name(step)
        with _named(final):
            sync_folder(temporary)
            if final.exists():
                self.set_aside(final)
            temporary.rename(final)
            sync_folder(self.path)
        return final

    def set_aside(self, folder: Path) -> Path:
        """Rename a checkpoint so that nothing resumes from it; it is never deleted."""
        aside = self.path / f"{folder.name}.aside-{_token()}"
        with _named(folder):
            folder.rename(aside)
            sync_folder(self.path)
        return aside

    def prune(self, keep: int, keep_every: int | None) -> list[Path]:
        """Delete all but the newest ``keep`` checkpoints and every ``keep_every``-th step's.

        Called after a new checkpoint is published, so that the newest is known to be intact.
        """
        deleted = []
        for folder in self.complete()[max(1, keep) :]:
            if keep_every is not None and step_of(folder) % keep_every == 0:
                continue
            old = folder.with_name(f"{folder.name}.old-{_token()}")
            with _named(folder):
                folder.rename(old)  # first, so that nothing half deleted looks complete
                sync_folder(self.path)
            shutil.rmtree(old, ignore_errors=True)
            deleted.append(folder)
        return deleted


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_and_sync(path: Path, text: str) -> None:
    """Write a new text file and wait until it is on the disk."""
    with _named(path), path.open("x", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


@contextlib.contextmanager
def removed_on_error(folder: Path, *, owner: bool) -> Iterator[None]:
    """Remove a folder, on its owner, if the block fails."""
    try:
        yield
    except BaseException:
        if owner:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an OSError into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(path, error) from None


def _token() -> str:
    return os.urandom(4).hex()
