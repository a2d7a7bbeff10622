"""Import of numpy without threads for products of matrices."""

from __future__ import annotations

import os
from typing import Final

THREADS: Final = "OPENBLAS_NUM_THREADS"


def import_numpy() -> None:
    """Import numpy for a command that multiplies no matrices: threads are not started for them.

    Threads that wait at the beginning and end take a quarter of the CPU time of numpy's import.
    The variable does not reach programs that a command starts; one that is set stays as it is.
    """
    if THREADS in os.environ:
        return
    os.environ[THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[THREADS]
