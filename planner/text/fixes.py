"""List of changes with which a plan fits: memory, pace and options, a line each where possible."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten, wrap
from typing import Final

from msgspec import Struct

from cost_models.units import format_bytes
from planner.text.paragraphs import INDENT, LINES, labelled, width

FEWEST: Final = 3  # fixes that are listed, even if the answer becomes longer
MANY_TIMES: Final = 99.5  # from here on ratios have no rounded digits
LABEL: Final = "Fixes"
NEXT: Final = "append the options of a fix to the command (each was checked to fit)"
NEXT_SHORT: Final = "append the options of a fix (-v: all fixes and options)"
NONE: Final = "none found with up to 1,024 nodes of this kind"


class Fix(Struct, frozen=True):
    """A change in words and as options, its peak in bytes and its pace in words.

    ``condition``: what is not known and must hold.
    """

    change: str
    peak: float
    pace: str
    options: str
    condition: str = ""


def pace(seconds: float, before: float) -> str:
    """Return how much slower or faster a token is, in words.

    >>> pace(1.0, 1.0), pace(1.2, 1.0), pace(5.0, 1.0), pace(0.8, 1.0), pace(0.1, 1.0)
    ('as fast', '20 % slower', '5× slower', '25 % faster', '10× faster')
    >>> pace(1.0, 212.0)
    '212× faster'
    """
    ratio = seconds / before
    word, times = ("slower", ratio) if ratio > 1.0 else ("faster", 1.0 / ratio)
    if times < 1.015:
        return "as fast"
    if times >= MANY_TIMES:
        return f"{times:,.0f}× {word}"
    return f"{times:.2g}× {word}" if times >= 2.0 else f"{100 * (times - 1.0):.0f} % {word}"


def fix_lines(fixes: Sequence[Fix], lines_before: int, *, verbose: bool) -> list[str]:
    """Return the fixes below each other, and how to use them.

    ``lines_before``: of the answer; a short answer shows as many fixes as have room, at least
    ``FEWEST``, and those without room for their options in words. ``verbose``: all of all.
    """
    if not fixes:
        return labelled(LABEL, NONE)
    paces = max(len(fix.pace) for fix in fixes)
    room = width() - INDENT - len(f"{'':>9}  ") - (paces + 2 if paces else 0)
    aligned = max((len(fix.options) for fix in fixes if len(fix.options) <= room), default=0)
    most = len(fixes) if verbose else max(FEWEST, LINES - lines_before - 1)
    lines, complete = [], len(fixes) <= most
    spare = LINES - lines_before - 1 - len(fixes)  # lines for options that need more than one
    for number, fix in enumerate(fixes[:most]):
        label = LABEL if number == 0 else ""
        start = f"{format_bytes(fix.peak):>9}  " + (f"{fix.pace:<{paces}}  " if paces else "")
        change = f"{fix.change}, {fix.condition}" if fix.condition else fix.change
        if len(fix.options) <= room and aligned + 2 + len(change) <= room:
            lines.append(f"{label:<{INDENT}}{start}{fix.options:<{aligned}}  {change}")
        elif verbose:
            lines += labelled(label, start + change) + labelled("", fix.options)
        elif len(fix.options) <= room:
            words = f"{fix.options}  ({fix.condition})" if fix.condition else fix.options
            words = words if len(words) <= room else fix.options
            lines.append(f"{label:<{INDENT}}{start}{words}")
        elif len(options := wrap(fix.options, room, break_on_hyphens=False)) - 1 <= spare:
            spare -= len(options) - 1
            lines.append(f"{label:<{INDENT}}{start}{options[0]}")
            lines += [f"{'':<{INDENT + len(start)}}{more}" for more in options[1:]]
        else:
            lines.append(f"{label:<{INDENT}}{start}{shorten(fix.change, room, placeholder=' …')}")
            complete = False
    return lines + labelled("Next", NEXT if verbose or complete else NEXT_SHORT)
