"""Makes docs/reference/formulas/, the book of formulas: ``make_formulas.py --write`` or --check.

A page for each room of ``cost_models``, lowest first as in their import-linter contract: every file
with symbols or formulas, every public function whose docstring has a formula (indented lines) or a
source. ``docs/docstrings.py`` reads the docstrings, ``docs/worked/numbers.py`` computes the worked
numbers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Final

DOCS: Final = Path(__file__).parent
ROOT: Final = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

from docstrings import Described, describe, prose, symbols_in  # noqa: E402
from generated import write_or_compare  # noqa: E402
from rooms import PACKAGE, TITLES, rooms  # noqa: E402
from worked import jobs, tables  # noqa: E402
from worked.numbers import JOBS, Call, command_of, worked_calls  # noqa: E402

BOOK: Final = DOCS / "reference" / "formulas"
HEAD: Final = """# Book of formulas

Each formula below is a pure function of `cost_models` that broadcasts over columns of a table of
plans: the function that prices one plan prices the whole search. The pages are made from the
docstrings (`python docs/make_formulas.py --write`), so they say what the code does. How the
formulas work together: [memory](../../explanation/memory.md), [step
time](../../explanation/step_time.md), [serving](../../how-to/serving.md).

## How to read a formula

- **Formula** with its explanation. Letters are those of the papers, so a letter may mean different
  things on different pages; below each formula stand the letters that it uses.
- **Example**: a small call and its result; the tests run it.
- **Worked number**: the arguments and the result of the function while one of the jobs below is
  priced, computed when the page is made. Arguments that are whole objects (a model, a plan) are
  left out. Inside, everything is bytes, seconds and FLOP; numbers are printed in larger units.
- [Whole jobs](jobs.md): what the formulas come to together.
- [Tables of plans](tables.md): what the parts of prices add up to, a table a trainer.
- **Source**: paper, section and equation, or the code whose behaviour the formula describes.
- **Leaves out**: the limits of a formula; below a heading, those of all formulas of its file. The
  whole estimate's limits: [memory](../../explanation/memory.md#limits),
  [accuracy](../../accuracy.md).

## The pages

"""


@dataclass(frozen=True)
class Formula:
    """A public function with a formula: its name, its docstring, its code."""

    name: str
    words: Described
    code: CodeType


@dataclass(frozen=True)
class File:
    """A file of formulas."""

    path: Path
    words: Described
    formulas: tuple[Formula, ...]


def read(path: Path) -> File:
    """Read a file's docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    formulas = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            words = describe(ast.get_docstring(node) or "")
            if words.formulas or words.source:
                function = getattr(importlib.import_module(name), node.name)
                formulas.append(Formula(node.name, words, inspect.unwrap(function).__code__))
    return File(path, describe(ast.get_docstring(tree) or ""), tuple(formulas))


def files_of(room: str) -> list[File]:
    """Return the files of a room that have formulas or symbols."""
    place = ROOT / PACKAGE / room
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [file for file in map(read, paths) if file.formulas or file.words.symbols]


def symbols_table(files: list[File]) -> Iterator[str]:
    """Yield one row for each symbol and meaning of a page."""
    meanings: dict[tuple[str, str], list[str]] = {}
    for file in files:
        for entry in dict.fromkeys(file.words.symbols):
            meanings.setdefault(entry, []).append(f"[{file.path.stem}](#{slug(title_of(file))})")
    if not meanings:
        return
    yield from ("## Symbols", "", "| symbol | meaning | in |", "| --- | --- | --- |")
    for (symbol, meaning), places in sorted(
        meanings.items(), key=lambda one: (one[0][0].lower(), one[0])
    ):
        cell = prose(meaning).replace("|", r"\|")
        yield f"| {letters(symbol)} | {cell} | {', '.join(places)} |"
    yield ""


def title_of(file: File) -> str:
    """Return the heading of a file's section."""
    return file.words.summary.rstrip(".")


def slug(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it.

    >>> slug("Step time: `p` stages")
    'step-time-p-stages'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def letters(symbol: str) -> str:
    """Return the letters of an entry as code."""
    return ", ".join(f"`{one}`" for one in symbol.split(", "))


def section(file: File, calls: Mapping[CodeType, Call]) -> Iterator[str]:
    """Yield the part of a page about one file."""
    yield from (f"## {title_of(file)}", "")
    yield from (f"`{file.path.relative_to(ROOT)}`", "")
    yield from described(file.words)
    yield from origin(file.words)
    for formula in file.formulas:
        yield from (f"### `{formula.name}`", "", formula.words.summary, "")
        yield from described(formula.words, file.words.symbols)
        if formula.words.examples:
            yield from ("**Example**", "", "```pycon")
            yield from "\n\n".join(formula.words.examples).splitlines()
            yield from ("```", "")
        if call := calls.get(formula.code):
            yield from worked(call)
        yield from origin(formula.words)


def described(words: Described, symbols: tuple[tuple[str, str], ...] = ()) -> Iterator[str]:
    """Yield the formulas and explanations of a docstring, and the letters of its formulas."""
    for part in words.body:
        yield from (part, "")
    used = [one for one in symbols if symbols_in(one[0], words)]
    if used:
        meant = "; ".join(f"{letters(symbol)} {prose(meaning)}" for symbol, meaning in used)
        yield from (f"**Symbols** {meant}.", "")
    if words.units:
        yield from (f"**Units** {words.units}", "")


def origin(words: Described) -> Iterator[str]:
    """Yield where a formula comes from, and its limits."""
    for title, text in (("Source", words.source), ("Leaves out", words.leaves_out)):
        if text:
            yield from (f"**{title}** {text}", "")


def worked(call: Call) -> Iterator[str]:
    """Yield a worked number."""
    yield from (
        f"**Worked number** of [job {call.job}](README.md#job-{call.job.lower()})",
        "",
        "```text",
    )
    width = max((len(name) for name, _ in call.arguments), default=0)
    for name, value in call.arguments:
        yield f"{name:{width}} = {value}"
    width = max(len(name) for name, _ in call.results)
    for number, (name, value) in enumerate(call.results):
        yield ("  " if number else "→ ") + (f"{name:{width}} = {value}" if name else value)
    yield from ("```", "")


def page(room: str, files: list[File], calls: Mapping[CodeType, Call]) -> str:
    """Return the page of a room."""
    lines = [f"# {TITLES.get(room, room)}", ""]
    package = ROOT / PACKAGE / room / "__init__.py"
    if package.exists():
        words = describe(ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or "")
        lines += [words.summary, ""]
    lines += symbols_table(files)
    for file in files:
        lines += section(file, calls)
    return "\n".join(lines).rstrip() + "\n"


def index(found: Mapping[str, list[File]]) -> str:
    """Return the first page: how to read the others, their formulas, the jobs."""
    lines = [HEAD + "| page | formulas |", "| --- | --- |"]
    for room, files in found.items():
        names = [
            f"[`{formula.name}`]({room}.md#{formula.name})"
            for file in files
            for formula in file.formulas
        ]
        lines.append(f"| [{TITLES.get(room, room)}]({room}.md) | {', '.join(names)} |")
    lines += ["", "## The jobs of the worked numbers", ""]
    lines += ["`import planner`, then:", ""]
    for job in JOBS:
        lines += [f"### Job {job}", "", "```python", command_of(job), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[str, str]:
    """Return the text of every page of the book."""
    found = {room: files for room in rooms() if (files := files_of(room))}
    codes = {
        formula.code for files in found.values() for file in files for formula in file.formulas
    }
    calls = worked_calls(codes)
    return {"README.md": index(found)} | {
        f"{room}.md": page(room, files, calls) for room, files in found.items()
    }


def main() -> None:
    """Write the pages, or exit with 1 where one is not what the docstrings say."""
    book = pages() | {"jobs.md": jobs.page(), "tables.md": tables.page()}
    write_or_compare({BOOK / name: text for name, text in book.items()}, BOOK.glob("*.md"))


if __name__ == "__main__":
    main()
