"""Outputs on README.md and pages of docs/: ``python -m benchmarks.readme [--write]``.

Runs the commands that the pages show and compares their output with the pages; ``--write`` updates
the pages. Exit code 1 where a block or the picture differs. ``<!-- without: Budget Assumed -->``
above a block names paragraphs that are replaced by three dots, ``<!-- from: One to: Peak -->`` the
first and the last paragraph that are shown. The commands of a tutorial, those of its ``sh`` blocks
included, run one after the other in one folder, so that one reads what another one wrote. Blocks of
``shardplan run`` depend on the machine and are not compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
README: Final = ROOT / "README.md"
PAGES: Final = (
    README,
    ROOT / "docs" / "explanation" / "memory.md",
    ROOT / "docs" / "how-to" / "walks.md",
    ROOT / "docs" / "tutorials" / "first_answer.md",
    ROOT / "docs" / "tutorials" / "better_plan.md",
)
PICTURE: Final = ROOT / "docs" / "explanation" / "memory.svg"
PICTURE_COMMAND: Final = "shardplan fit llama-3-8b 8xA100-80GB --seq-len 8192 -o memory.svg"
BLOCK: Final = re.compile(
    r"(?:<!-- ((?:without|from): [^>\n]*) -->\n)?"
    r"```console\n\$ (shardplan (?:fit|plan|models|explain|export|report)[^\n]*)\n(?!\$)(.*?)```"
    r"|^```sh\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
ENVIRONMENT: Final = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}


@contextmanager
def working_folder() -> Iterator[Path]:
    """Make a folder in which the commands of a page find the files of the repository."""
    with tempfile.TemporaryDirectory() as name:
        for part in ("examples", "tests"):
            (Path(name) / part).symlink_to(ROOT / part)
        yield Path(name)


def run(command: str, folder: Path) -> str:
    """Return what a command prints in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "planner", *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=ENVIRONMENT,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def run_script(script: str, folder: Path) -> None:
    """Run an ``sh`` block; a command that fails is an error."""
    start = f'shardplan() {{ "{sys.executable}" -m planner "$@"; }}\n'
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", start + script],
        check=True,
        capture_output=True,
        cwd=folder,
        env=ENVIRONMENT,
    )


def blocks(text: str, *, tutorial: bool) -> Iterator[tuple[re.Match[str], Path]]:
    """Yield the console blocks of a page, each with the folder in which its command runs."""
    with working_folder() as folder:
        for match in BLOCK.finditer(text):
            if match[2] and tutorial:
                yield match, folder
            elif match[2]:
                with working_folder() as own:
                    yield match, own
            elif tutorial:
                run_script(match[4], folder)


def is_tutorial(page: Path) -> bool:
    """Whether the blocks of a page run one after the other."""
    return page.parent.name == "tutorials"


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


def shown_output(match: re.Match[str], folder: Path) -> str:
    """Return what the page should show under a command."""
    text = run(match[2], folder)
    kind, *words = (match[1] or "without:").split()
    if kind == "without:":
        return without_paragraphs(text, words)
    first, _, last = words
    return paragraphs_between(text, first, last)


def comparable(text: str) -> str:
    """Return the text without line breaks and without the seconds that a search took."""
    return " ".join(re.sub(r"in [\d.]+ (ms|s):", "in some time:", text).split())


def differences(text: str, *, tutorial: bool = False) -> list[str]:
    """Return the commands whose blocks differ from what they print."""
    return [
        match[2]
        for match, folder in blocks(text, tutorial=tutorial)
        if comparable(match[3]) != comparable(shown_output(match, folder))
    ]


def picture() -> str:
    """Return the drawing that the README includes."""
    with working_folder() as folder:
        run(PICTURE_COMMAND, folder)
        return (folder / "memory.svg").read_text(encoding="utf-8")


def written(text: str, *, tutorial: bool = False) -> str:
    """Return a page with the present output of every command."""
    parts, end = [], 0
    for match, folder in blocks(text, tutorial=tutorial):
        above = f"<!-- {match[1]} -->\n" if match[1] else ""
        shown = f"{above}```console\n$ {match[2]}\n{shown_output(match, folder)}```"
        parts += [text[end : match.start()], shown]
        end = match.end()
    return "".join([*parts, text[end:]])


def main() -> None:
    drawn, wrong = picture(), []
    if "--write" in sys.argv[1:]:
        PICTURE.write_text(drawn, encoding="utf-8")
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            page.write_text(written(text, tutorial=is_tutorial(page)), encoding="utf-8")
        return
    for page in PAGES:
        found = differences(page.read_text(encoding="utf-8"), tutorial=is_tutorial(page))
        wrong += [f"{page.name} differs from: {command}" for command in found]
    if PICTURE.read_text(encoding="utf-8") != drawn:
        wrong.append(f"docs/explanation/memory.svg differs from: {PICTURE_COMMAND}")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
