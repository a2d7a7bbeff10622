"""Outputs and the picture in the README: ``python -m benchmarks.readme [--write]``.

Runs the commands that the README shows and compares what they print with the README; ``--write``
puts in what they print. Exit code 1 where a block or the picture differs. ``<!-- without: Budget
Assumed -->`` above a block names the paragraphs that the README leaves out; three dots stand in
their place. Blocks of ``shardplan run`` depend on the machine and are not compared.
"""

from __future__ import annotations

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
PICTURE: Final = ROOT / "docs" / "memory.svg"
PICTURE_COMMAND: Final = "shardplan fit llama-3-8b 8xA100-80GB --seq-len 8192 -o memory.svg"
BLOCK: Final = re.compile(
    r"(?:<!-- without: ([^>\n]*) -->\n)?"
    r"```console\n\$ (shardplan (?:fit|plan|models)[^\n]*)\n(.*?)```",
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


def shown_output(match: re.Match[str]) -> str:
    """Return what the README should show under a command."""
    with tempfile.TemporaryDirectory() as folder:
        return without_paragraphs(run(match[2], Path(folder)), (match[1] or "").split())


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
    """Return the README with the present output of every command."""

    def block(match: re.Match[str]) -> str:
        above = f"<!-- without: {match[1]} -->\n" if match[1] else ""
        return f"{above}```console\n$ {match[2]}\n{shown_output(match)}```"

    return BLOCK.sub(block, text)


def main() -> None:
    text, drawn = README.read_text(encoding="utf-8"), picture()
    if "--write" in sys.argv[1:]:
        text = written(text)
        README.write_text(text, encoding="utf-8")
        PICTURE.write_text(drawn, encoding="utf-8")
    wrong = [f"README.md differs from: {command}" for command in differences(text)]
    if PICTURE.read_text(encoding="utf-8") != drawn:
        wrong.append(f"docs/memory.svg differs from: {PICTURE_COMMAND}")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
