"""Fewer runs of Python's cyclic garbage collector, which scans all objects each time.

Pricing creates hundreds of thousands of short-lived objects that reference counting frees; the
reference cycles of ``ProductFrame`` are broken explicitly (``release``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

OBJECTS: Final = 500_000  # new objects before a collection of the youngest generation


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Raise the threshold of the garbage collector; context manager or decorator."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
