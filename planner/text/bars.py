"""Stacked bars of characters: parts of a sum on one scale, and a mark at the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cost_models.units import GIB

MARKS: Final = {
    "weights": "█",
    "gradients": "▒",
    "optimizer": "▓",
    "activations": "░",
    "logits": "▚",
    "buffers": "▪",
    "runtime": "·",
}
# from left to right; parts that are constant during a step come first
ORDER: Final = (
    "weights",
    "optimizer",
    "runtime",
    "gradients",
    "activations",
    "logits",
    "buffers",
)
STEPS: Final = (1, 2, 5)
LEAST_SHARE: Final = 0.25  # of the budget; shorter bars have their own scale


def shown_scale(largest: float, budget: float) -> float:
    """Return the value of the whole width; includes the budget unless bars become too short.

    >>> shown_scale(50.0, 80.0), shown_scale(90.0, 80.0), shown_scale(8.0, 80.0)
    (80.0, 90.0, 8.0)
    """
    return max(largest, budget) if largest >= LEAST_SHARE * budget else largest


def stacked_bar(parts: Mapping[str, float], scale: float, width: int, budget: float) -> str:
    """Return one bar; borders between parts are rounded to the nearest character.

    >>> stacked_bar({"weights": 2.0, "optimizer": 4.0}, 10.0, 10, 8.0)
    '██▓▓▓▓  │'
    """
    cells = [" "] * (width + 1)
    reached, left = 0.0, 0
    for name in ORDER:
        reached += parts.get(name, 0.0)
        right = min(width, round(width * reached / scale))
        cells[left:right] = MARKS[name] * (right - left)
        left = right
    if budget <= scale:
        cells[round(width * budget / scale)] = "│"
    return "".join(cells).rstrip()


def legend(parts: Mapping[str, float]) -> str:
    """Return the marks of the parts above zero with their names."""
    return "  ".join(f"{MARKS[name]} {name}" for name in ORDER if parts.get(name, 0.0) > 0.0)


def axis(scale: float, width: int) -> str:
    """Return round numbers of GiB above the bars, from 0.

    >>> axis(40 * 2.0**30, 40)
    '0         10        20        30        40 GiB'
    """
    step = tick(scale)
    cells = [" "] * (width + 8)
    position = 0.0
    while position <= scale * (1.0 + 1e-9):
        text = f"{position / GIB:g}"
        at = round(width * position / scale)
        cells[at : at + len(text)] = text
        position += step
    return "".join(cells).rstrip() + " GiB"


def tick(scale: float) -> float:
    """Return the distance of at most seven round numbers on a scale, in bytes."""
    unit = GIB * 10.0**-6
    while True:
        for factor in STEPS:
            if scale / (unit * factor) <= 6.0:
                return unit * factor
        unit *= 10.0
