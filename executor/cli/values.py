"""Reads the values of options; what is not allowed is named."""

from __future__ import annotations

import argparse
import math

MOST = 10**7


def count(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a whole number from 1 to {MOST:,})")
    return int(text)


def large_count(text: str) -> int:
    """Read a whole number from 1 that may be a number of bytes."""
    if not text.isdecimal() or not 1 <= int(text) <= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a whole number from 1)")
    return int(text)


def natural(text: str) -> int:
    """Read a whole number from 0."""
    if not text.isdecimal() or int(text) > 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a whole number from 0)")
    return int(text)


def rate(text: str) -> float:
    """Read a finite number from 0."""
    value = number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a number from 0)")
    return value


def above_zero(text: str) -> float:
    """Read a finite number above 0."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a number above 0)")
    return value


def share(text: str) -> float:
    """Read a number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a number from 0 to 1)")
    return value


def below_one(text: str) -> float:
    """Read a number from 0 to below 1."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a number from 0 to below 1)")
    return value


def number(text: str) -> float:
    """Return a number, or one that lies in no range."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
