"""The folder of a run; one run at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError

RUNS: Final = Path("runs")
SUBFOLDER: Final = "checkpoints"  # of a run's folder
LOCK: Final = ".in-use"


@contextlib.contextmanager
def claimed_folder(output: Path | None, *, resume: bool = False) -> Iterator[Path]:
    """Create the folder of a run and lock it while the run lasts.

    The named one, which must be empty unless ``resume``, or a new one in ``runs``. An empty folder
    is removed afterwards. The lock is the operating system's: it ends with the process.
    """
    folder = _new_folder() if output is None else _named_folder(output)
    try:
        with _locked(folder):
            if not resume and any(entry.name != LOCK for entry in folder.iterdir()):
                saved = (folder / SUBFOLDER).is_dir()
                go_on = f", or go on from it with --resume {folder}" if saved else ""
                raise InputError(f"{folder}: is not empty; choose another --output{go_on}")
            yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty: the run is in it
            folder.rmdir()


def _new_folder() -> Path:
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for attempt in range(1, 1000):
        folder = RUNS / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if RUNS.is_dir():
                continue
            raise InputError(f"{RUNS}: is a file, but a folder for runs is needed") from None
        except OSError as error:
            raise InputError(f"{RUNS}: cannot be created: {error.strerror}") from None
        return folder
    raise InputError(f"{RUNS}: has a thousand runs of this second; name one with --output")


def _named_folder(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{output}: is a file; name a folder with --output") from None
    except OSError as error:
        raise InputError(f"{output}: cannot be created: {error.strerror}") from None
    return output


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, or raise an InputError."""
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        if not _is_ours(descriptor, path):
            raise InputError(f"{folder}: another run is using it; choose another --output")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int, path: Path) -> bool:
    """Lock the file if it is free; return whether it is locked and still in place."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:  # its owner removed it meanwhile
        return False
