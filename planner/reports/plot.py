"""Drawings with two axes as SVG, in the colours of the page; linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from planner.answer.memory_svg import STYLE
from planner.text.html_page import Html, element, escape, scrolling

WIDTH: Final = 680
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 26, 40
MOST_TICKS: Final = 7
Numbers = tuple[float, float]
Words = Callable[[float], str]


class Plot:
    """One drawing: scales, axes with ticks, and shapes in the units of the axes."""

    def __init__(
        self, x: Numbers, y: Numbers, height: int = 300, *, logarithmic: bool = False
    ) -> None:
        self.x_range, self.y_range, self.height, self.logarithmic = x, y, height, logarithmic
        self.body: list[str] = []

    def x(self, value: float) -> float:
        """Return the horizontal place of a value."""
        return LEFT + (WIDTH - LEFT - RIGHT) * self._share(value, self.x_range)

    def y(self, value: float) -> float:
        """Return the vertical place of a value."""
        return (
            self.height - BOTTOM - (self.height - TOP - BOTTOM) * self._share(value, self.y_range)
        )

    def _share(self, value: float, ends: Numbers) -> float:
        low, high = ends
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)

    def axes(self, x_words: str, y_words: str, x_tick: Words, y_tick: Words | None = None) -> None:
        """Draw both axes, the horizontal one with words; ``y_tick`` None: no vertical ticks."""
        bottom = self.height - BOTTOM
        for value in self._ticks(self.x_range):
            at = self.x(value)
            self._add(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>')
            self.text(at, bottom + 16, x_tick(value), "small", "middle")
        for value in self._ticks(self.y_range) if y_tick is not None else ():
            at = self.y(value)
            self._add(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
            assert y_tick is not None
            self.text(LEFT - 6, at + 4, y_tick(value), "small", "end")
        self.text(WIDTH - RIGHT, self.height - 8, x_words, "small", "end")
        self.text(4, TOP - 12, y_words, "small")

    def _ticks(self, ends: Numbers) -> list[float]:
        """Return round values of an axis: decades, or multiples of 1, 2 or 5."""
        low, high = ends
        if self.logarithmic:
            first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
            return [10.0**power for power in range(first, last + 1)]
        step = 10.0 ** math.floor(math.log10((high - low) / MOST_TICKS))
        step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= MOST_TICKS)
        first = math.ceil(low / step)
        return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]

    def _add(self, shape: str) -> None:
        self.body.append(shape)

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "start") -> None:
        """Write words at a place of the drawing."""
        self._add(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def line(self, points: Sequence[Numbers], css: str = "", style: str = "") -> None:
        """Draw a line through points."""
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        self._add(f'<path class="{css}" style="fill:none;{style}" d="M{path}"/>')

    def area(self, upper: Sequence[Numbers], lower: Sequence[Numbers], colour: str) -> None:
        """Fill the area between two lines."""
        points = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in [*upper, *lower[::-1]])
        self._add(f'<path fill="{colour}" d="M{points}Z"/>')

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], colour: str) -> None:
        """Draw boxes of one colour: left and right of the axis, top and height in pixels."""
        path = "".join(
            f"M{self.x(a):.1f} {top:.1f}H{self.x(b):.1f}v{high:.1f}H{self.x(a):.1f}z"
            for a, b, top, high in boxes
        )
        self._add(f'<path fill="{colour}" stroke="var(--ground)" stroke-width=".5" d="{path}"/>')

    def mark(self, x: float, y: float, label: str, colour: str, words: str, size: int = 9) -> None:
        """Draw a point with a short label in it; ``words``: what a pointer shows."""
        at, up = self.x(x), self.y(y)
        self._add(
            f'<g><title>{escape(words)}</title><circle cx="{at:.1f}" cy="{up:.1f}" r="{size}" '
            f'fill="{colour}" stroke="var(--ground)"/>'
            f'<text x="{at:.1f}" y="{up + 4:.1f}" class="mark" text-anchor="middle">'
            f"{escape(label)}</text></g>"
        )

    def budget(self, y: float, words: str) -> None:
        """Draw a horizontal line with words above it."""
        self.line([(self.x_range[0], y), (self.x_range[1], y)], "budget")
        self.text(WIDTH - RIGHT - 4, self.y(y) - 5, words, "small", "end")

    def html(self, description: str) -> Html:
        """Return the drawing; ``description``: for who cannot see it."""
        style = STYLE + ".drawn .mark{font-size:11px;font-weight:600;fill:#fff}"
        return scrolling(
            Html(
                f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" '
                f'viewBox="0 0 {WIDTH} {self.height}" '
                f'role="img" aria-label="{escape(description)}"><style>{style}</style>'
                + "".join(self.body)
                + "</svg>"
            )
        )


def legend(colours: Iterable[tuple[str, str]]) -> Html:
    """Return names with their colours."""
    return element(
        "p",
        *(
            element(
                "span",
                element(
                    "span",
                    style=f"display:inline-block;width:.8em;height:.8em;background:{colour};"
                    "margin-right:.35em",
                ),
                f"{name} ",
                style="display:inline-block;margin-right:1em",
            )
            for name, colour in colours
        ),
        css="note",
    )
