"""Outputs on README.md and pages of docs/: ``python -m benchmarks.readme [--write]``.

Runs the commands that the pages show and compares their output with the pages; ``--write`` updates
the pages. Exit code 1 where a block or the picture differs. ``<!-- without: Budget Assumed -->``
above a block names paragraphs that are replaced by three dots, ``<!-- from: One to: Peak -->`` the
first and the last paragraph that are shown. Blocks of ``shardplan run`` and ``explain`` depend on
the machine or on a file and are not compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
README: Final = ROOT / "README.md"
PAGES: Final = (
    README,
    ROOT / "docs" / "explanation" / "memory.md",
    ROOT / "docs" / "how-to" / "walks.md",
)
PICTURE: Final = ROOT / "docs" / "explanation" / "memory.svg"
PICTURE_COMMAND: Final = "shardplan fit llama-3-8b 8xA100-80GB --seq-len 8192 -o memory.svg"
BLOCK: Final = re.compile(
    r"(?:<!-- ((?:without|from): [^>\n]*) -->\n)?"
    r"```console\n\$ (shardplan (?:fit|plan|models)[^\n]*)\n(?!\$)(.*?)```",
    re.DOTALL,
)


def run(command: str, folder: Path) -> str:
    """Return what a command prints; files that it writes go to ``folder``."""
    words = shlex.split(command)[1:]
    if "-o" in words:
        position = words.index("-o") + 1
        words[position] = str(folder / words[position])
    done = subprocess.run(
        [sys.executable, "-m", "planner", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def without_paragraphs(text: str, labels: Collection[str]) -> str:
    r"""Replace the paragraphs with these labels by three dots; one line for neighbours.

    >>> print(without_paragraphs("Step  1 s\nBudget  2\n        3\nNext  4\n", ["Budget"]))
    Step  1 s
    ...
    Next  4
    <BLANKLINE>
    """
    lines: list[str] = []
    dropped = False
    for line in text.splitlines():
        if line and not line[0].isspace():
            dropped = line.split()[0] in labels
        if not dropped:
            lines.append(line)
        elif not lines or lines[-1] != "...":
            lines.append("...")
    return "".join(f"{line}\n" for line in lines)


def paragraphs_between(text: str, first: str, last: str) -> str:
    r"""Return the lines from the paragraph ``first`` to the end of the paragraph ``last``.

    >>> paragraphs_between("A 1\nB 2\n  3\nC 4\n  5\nD 6\n", "B", "C")
    'B 2\n  3\nC 4\n  5\n'
    """
    lines: list[str] = []
    label = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            if label == last:
                break
            label = line.split()[0]
        if lines or label == first:
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def shown_output(match: re.Match[str]) -> str:
    """Return what the page should show under a command."""
    with tempfile.TemporaryDirectory() as folder:
        text = run(match[2], Path(folder))
    kind, *words = (match[1] or "without:").split()
    if kind == "without:":
        return without_paragraphs(text, words)
    first, _, last = words
    return paragraphs_between(text, first, last)


def comparable(text: str) -> str:
    """Return the text without line breaks and without the seconds that a search took."""
    return " ".join(re.sub(r"in [\d.]+ (ms|s):", "in some time:", text).split())


def differences(text: str) -> list[str]:
    """Return the commands whose blocks differ from what they print."""
    return [
        match[2]
        for match in BLOCK.finditer(text)
        if comparable(match[3]) != comparable(shown_output(match))
    ]


def picture() -> str:
    """Return the drawing that the README includes."""
    with tempfile.TemporaryDirectory() as folder:
        run(PICTURE_COMMAND, Path(folder))
        return (Path(folder) / "memory.svg").read_text(encoding="utf-8")


def written(text: str) -> str:
    """Return a page with the present output of every command."""

    def block(match: re.Match[str]) -> str:
        above = f"<!-- {match[1]} -->\n" if match[1] else ""
        return f"{above}```console\n$ {match[2]}\n{shown_output(match)}```"

    return BLOCK.sub(block, text)


def main() -> None:
    drawn, wrong = picture(), []
    if "--write" in sys.argv[1:]:
        PICTURE.write_text(drawn, encoding="utf-8")
        for page in PAGES:
            page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for page in PAGES:
        found = differences(page.read_text(encoding="utf-8"))
        wrong += [f"{page.name} differs from: {command}" for command in found]
    if PICTURE.read_text(encoding="utf-8") != drawn:
        wrong.append(f"docs/explanation/memory.svg differs from: {PICTURE_COMMAND}")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
