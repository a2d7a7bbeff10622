"""Formatting of quantities. Internally everything is in bytes, seconds and FLOP.

Printed units: memory in GiB (2**30 bytes), bandwidth in GB/s (10**9 bytes), compute in TFLOP/s
(10**12).
"""

from __future__ import annotations

from typing import Final

KIB: Final = 2.0**10
MIB: Final = 2.0**20
GIB: Final = 2.0**30


def format_bytes(value: float) -> str:
    """Format bytes in a unit that keeps three or four figures.

    >>> format_bytes(80 * 2**30), format_bytes(1536), format_bytes(12)
    ('80.0 GiB', '1.5 KiB', '12 B')
    """
    for unit, size in (("TiB", 2.0**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(value) >= size * (10 if unit == "TiB" else 1):
            return (
                f"{value / size:,.1f} {unit}"
                if value < 100 * size
                else f"{value / size:,.0f} {unit}"
            )
    return f"{value:.0f} B"


def format_gib(value: float) -> str:
    """Format bytes as a number of GiB.

    >>> format_gib(3 * 2**29)
    '1.5'
    """
    gib = value / GIB
    if abs(gib) >= 100:
        return f"{gib:,.0f}"
    return f"{gib:.1f}" if abs(gib) >= 0.095 else f"{gib:.3f}"


def format_seconds(value: float) -> str:
    """Format a duration.

    >>> format_seconds(0.0123), format_seconds(75.2), format_seconds(3.2e-5)
    ('12.3 ms', '75.2 s', '32 µs')
    """
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1.0:
        return f"{value * 1e3:.1f} ms"
    if value < 600.0:
        return f"{value:.3g} s" if value < 10 else f"{value:.1f} s"
    return f"{value / 3600:.1f} h" if value >= 5400 else f"{value / 60:.1f} min"


def format_count(value: float) -> str:
    """Format a large count.

    >>> format_count(8.03e9), format_count(1234)
    ('8.03 B', '1,234')
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,.0f}"
