"""Bars of characters: parts of a sum on one scale, one below the other or stacked, and a budget."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from cost_models.memory.parts import PART_WORDS
from cost_models.units import GIB, format_bytes
from planner.text.paragraphs import LINES, TOGETHER, width

NAME: Final = max(map(len, PART_WORDS.values()))
FULL: Final = "█"
LEAST: Final = "▏"  # a bar too short for a whole character
BUDGET: Final = "│"
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
ORDER: Final = ("weights", "optimizer", "runtime", "gradients", "activations", "logits", "buffers")
MOST_BARS: Final = 5  # of a short answer; smaller parts share a bar
FEWEST_BARS: Final = 3
STEPS: Final = (1, 2, 5)
LEAST_SHARE: Final = 0.25  # of the budget; shorter bars have their own scale
SMALL: Final = 0.04  # of the peak; smaller parts share a bar in a short answer


def bars_with_room(lines: int) -> int:
    """Return the number of bars of a short answer that has other lines, but for the total's bar."""
    return max(FEWEST_BARS, min(MOST_BARS, LINES - lines - 1))


def part_bars(
    parts: Mapping[str, float], budget: float, most: int | None = None, always: Collection[str] = ()
) -> list[str]:
    """Return each part above zero and their sum as bars, largest first, with a mark at the budget.

    The whole width is the budget, or the sum where it is larger. ``most``: number of bars of parts;
    parts below ``SMALL`` of the sum, and those beyond ``most``, share the last bar. Parts in
    ``always`` keep a bar of their own as long as there are bars.
    """
    total = sum(parts.values())
    rows = [(PART_WORDS[name], value) for name, value in _largest_first(parts)]
    if most is not None:
        kept = min(most, sum(value >= SMALL * total for _, value in rows))
        if len(rows) > kept + 1 or len(rows) > most:
            kept = min(kept, most - 1)
            first = sorted(rows, key=lambda row: row[0] not in {PART_WORDS[n] for n in always})
            rest = [row for row in rows if row not in first[:kept]]
            rows = [row for row in rows if row not in rest]
            together = sum(value for _, value in rest)
            rows.append((_joined(rest, largest=together > rows[0][1]), together))
    scale = max(total, budget)
    return [_bar(name, value, scale, budget) for name, value in [*rows, ("total", total)]]


def _largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    shown = [(name, value) for name, value in parts.items() if value > 0.0]
    return sorted(shown, key=lambda part: -part[1])


def _joined(rows: list[tuple[str, float]], *, largest: bool) -> str:
    """Return the names of several parts; where they have no room "others".

    ``largest``: no other bar is as long, so the largest part is named if it has room.
    """
    names = ", ".join(name for name, _ in rows)
    if len(names) <= NAME:
        return names
    named = f"{rows[0][0]}, …"
    return named if largest and len(named) <= NAME else "others"


def _bar(name: str, value: float, scale: float, budget: float) -> str:
    """Return one bar with its name in front and its size behind."""
    room = width() - NAME - 2 * 2 - 12
    filled = round(room * value / scale)
    cells = list((FULL * filled or LEAST).ljust(room + 1))
    cells[round(room * budget / scale)] = BUDGET
    return f"  {name:<{NAME}}  {''.join(cells)}{format_bytes(value):>11}"


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
        cells[round(width * budget / scale)] = BUDGET
    return "".join(cells).rstrip()


def legend(parts: Mapping[str, float]) -> str:
    """Return the marks of the parts above zero with their names."""
    shown = (name for name in ORDER if parts.get(name, 0.0) > 0.0)
    return "  ".join(f"{MARKS[name]}{TOGETHER}{PART_WORDS[name]}" for name in shown)


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
