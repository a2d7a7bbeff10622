"""Import of numpy without threads for products of matrices, and memory that its arrays leave."""

from __future__ import annotations

import os
import sys
from typing import Final

THREADS: Final = "OPENBLAS_NUM_THREADS"
# settings of glibc's mallopt (malloc.h) -> bytes: of freed memory at the end of the heap that stays
# there, and of an array that is taken from the heap (the most that is accepted)
KEPT: Final = {-1: 1 << 30, -3: 1 << 25}


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


def keep_freed_memory() -> None:
    """Let arrays use what others leave, instead of new pages, which the kernel clears.

    For the rest of the process; C libraries other than glibc stay as they are.
    """
    import ctypes  # numpy imports it, too

    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for setting, size in KEPT.items():
            mallopt(setting, size)
