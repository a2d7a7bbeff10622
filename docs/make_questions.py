"""Draws the screens of docs/how-to/questions.md: ``make_questions.py --write`` or --check.

Each picture of the page is the terminal that answers the command in its description; the headings
are questions of tests/questions/questions.toml. The text of the page is written by hand.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tomllib
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from generated import write_or_compare  # noqa: E402

from planner.cli.app import main as shardplan  # noqa: E402
from planner.cli.outputs import COLOURS, VERDICT  # noqa: E402

QUESTIONS: Final = ROOT / "tests" / "questions" / "questions.toml"
PAGE: Final = ROOT / "docs" / "how-to" / "questions.md"
SCREENS: Final = ROOT / "docs" / "how-to" / "screens"
COLUMNS: Final = 80
WIDTH, HEIGHT, MARGIN = 8.4, 18, 14  # of a character in pixels, and around the text
STYLE: Final = (
    'text{font:14px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#e6edf3}'
    "text.typed{fill:#79c0ff}rect.bar{fill:#8b949e}line{stroke:#f2cc60;stroke-width:2}"
    ".green,.yellow,.red{font-weight:bold}"
    "text.green{fill:#7ee787}text.yellow{fill:#f2cc60}text.red{fill:#ff7b72}"
)
# a heading, and below it the picture with its command as the text for those who do not see it
SHOWN: Final = re.compile(r"^## (.+)\n\n!\[shardplan (.+)\]\(screens/(.+\.svg)\)$", re.MULTILINE)


def screen(command: str) -> str:
    """Return what a terminal of 80 columns shows for a command."""
    os.environ.update(COLUMNS=str(COLUMNS), NO_COLOR="1")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        contextlib.suppress(SystemExit),
    ):
        shardplan(command.split())
    shown.seek(0)
    return f"$ shardplan {command}\n{shown.read()}".rstrip()


def x_of(column: float) -> str:
    """Return where a column begins."""
    return f"{MARGIN + column * WIDTH:g}"


def cell(words: str, column: int, top: float, kind: str) -> str:
    """Return words at their column; where a font is wider or narrower, they are fitted to it."""
    return (
        f'<text class="{kind}" x="{x_of(column)}" y="{top + 13}" '
        f'textLength="{len(words) * WIDTH:g}">{escape(words, quote=False)}</text>'
    )


def row(line: str, number: int) -> str:
    """Return a line of the terminal as SVG: bars as rectangles, each group of words as a cell."""
    top = MARGIN + number * HEIGHT
    parts = [
        f'<rect class="bar" x="{x_of(bar.start())}" y="{top + 3}" '
        f'width="{len(bar[0]) * WIDTH:g}" height="{HEIGHT - 6}"/>'
        for bar in re.finditer("█(?:[█│]*█)?", line)
    ]
    for mark in re.finditer("│", line):
        x = x_of(mark.start() + 0.5)
        parts.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{top + HEIGHT}"/>')
    if verdict := VERDICT.search(line):
        parts.append(cell(verdict[2], verdict.start(2), top, COLOURS[verdict[2]]))
        line = " " * verdict.end(2) + line[verdict.end(2) :]
    kind = "plain" if number else "typed"
    for words in re.finditer(r"[^\s█│]+(?: [^\s█│]+)*", line):
        parts.append(cell(words[0], words.start(), top, kind))
    return "".join(parts)


def drawing(text: str, title: str) -> str:
    """Return a picture of a terminal that shows a text, readable on light and dark pages."""
    lines = text.splitlines()
    width, height = f"{COLUMNS * WIDTH + 2 * MARGIN:g}", len(lines) * HEIGHT + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title, quote=False)}</title><style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#161b22" stroke="#30363d"/>',
            *(row(line, number) for number, line in enumerate(lines)),
            "</svg>\n",
        ]
    )


def screens() -> dict[Path, str]:
    """Return the pictures of the page, and raise where a question is not one of those tested."""
    asked = {
        one["command"]: one["ask"]
        for one in tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["question"]
    }
    shown = SHOWN.findall(PAGE.read_text(encoding="utf-8"))
    if unknown := [command for ask, command, _ in shown if asked.get(command) != ask]:
        sys.exit(
            f"docs/how-to/questions.md: not in {QUESTIONS.name} as headed: {', '.join(unknown)}"
        )
    return {
        SCREENS / name: drawing(screen(command), f"{ask} shardplan {command}")
        for ask, command, name in shown
    }


def main() -> None:
    """Write the pictures, or exit with 1 where they differ from the answers."""
    write_or_compare(screens(), SCREENS.glob("*.svg"))


if __name__ == "__main__":
    main()
