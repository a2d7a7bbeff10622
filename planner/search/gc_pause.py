"""Python's collector of cycles, seldom: it looks through all objects again and again.

Pricing makes hundreds of thousands of short-lived objects, which their reference counts free; what
refers to itself in a circle there (``levels.Frame``) is let go of by hand.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

OBJECTS: Final = 100_000  # more than before, until the youngest are looked through


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let the collector wait for more objects; also as a decorator."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
