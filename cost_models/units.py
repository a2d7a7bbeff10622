"""Formatting of quantities. Internally everything is in bytes, seconds and FLOP.

Printed units: memory in GiB (2**30 bytes), bandwidth in GB/s (10**9 bytes), compute in TFLOP/s
(10**12).
"""

from __future__ import annotations

from typing import Final

KIB: Final = 2.0**10
MIB: Final = 2.0**20
GIB: Final = 2.0**30
DAY: Final = 86400.0
YEAR: Final = 365.25 * DAY
SLOW_STEP: Final = 3600.0  # seconds
SLOW_RATE: Final = 1e9 / YEAR  # tokens/s


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
    """Format a duration with about three digits.

    >>> format_seconds(0.0123), format_seconds(0.8601), format_seconds(75.2), format_seconds(111.9)
    ('12.3 ms', '860 ms', '75.2 s', '112 s')
    >>> format_seconds(3.2e-5)
    '32 µs'
    """
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        return f"{value * 1e3:.1f} ms" if value < 0.09995 else f"{value * 1e3:.0f} ms"
    if value < 600.0:
        return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"
    if value < 5400.0:
        return f"{value / 60:.1f} min"
    if value < 2 * DAY:
        return f"{value / 3600:.1f} h"
    return f"{value / DAY:,.1f} days" if value < 2 * YEAR else f"{value / YEAR:,.1f} years"


def format_rate(per_second: float, thing: str = "tokens") -> str:
    """Format a rate; below one a second, as the time that one takes.

    >>> format_rate(3533.2), format_rate(4.25), format_rate(1 / 9), format_rate(20.0, "rows")
    ('3,530 tokens/s', '4.25 tokens/s', '9 s a token', '20 rows/s')
    """
    if 0.0 < per_second < 0.95:
        return f"{format_seconds(float(f'{1.0 / per_second:.2g}'))} a {thing.removesuffix('s')}"
    return f"{format_per_second(per_second)} {thing}/s"


def format_per_second(value: float) -> str:
    """Format the number of a rate with three digits, for a column whose heading names its unit.

    >>> format_per_second(28954.1), format_per_second(4.25), format_per_second(0.0123)
    ('29,000', '4.25', '0.0123')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def format_step(seconds: float, low: float, high: float, tokens_per_second: float) -> str:
    """Format a step time with its interval; a machine that is too slow is called so.

    That is: a step of more than an hour at which a billion tokens take more than a year.

    >>> format_step(2.32, 1.76, 2.55, 28000.0)
    '2.32 s (1.76 s to 2.55 s)'
    >>> format_step(7 * 3600.0, 5 * 3600.0, 9 * 3600.0, 0.3)
    'a step takes 7.0 h (5.0 h to 9.0 h): this machine is not for training it'
    """
    between = f"({format_seconds(low)} to {format_seconds(high)})"
    if seconds > SLOW_STEP and tokens_per_second < SLOW_RATE:
        return (
            f"a step takes {format_seconds(seconds)} {between}: this machine is not for training it"
        )
    return f"{format_seconds(seconds)} {between}"


def format_count(value: float) -> str:
    """Format a large count.

    >>> format_count(8.03e9), format_count(1234)
    ('8.03 B', '1,234')
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,.0f}"
