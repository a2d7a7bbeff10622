"""Makes docs/reference/formulas.md: ``python docs/make_formulas.py --write`` or --check.

Takes every file of ``cost_models`` whose docstring has a list of symbols, and every public function
whose docstring has a formula (indented lines) or a source. Rooms stand in the order of their
import-linter contract, lowest first.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "formulas.md"
PACKAGE = "cost_models"
HEAD = """# Formulas

Every formula is a pure function that broadcasts over columns of a table of plans: the function that
prices one plan prices the whole search. Inside, everything is bytes, seconds, FLOP. `python
docs/make_formulas.py --write` makes this page of the docstrings. How the formulas work together:
[memory.md](../explanation/memory.md), [step_time.md](../explanation/step_time.md),
[serving.md](../how-to/serving.md).

## Symbols

Symbols are those of the papers, so a letter may mean different things in different rooms.

"""


@dataclass(frozen=True)
class Formula:
    """A public function with a formula: its name, the first sentence, the rest of its docstring."""

    name: str
    summary: str
    rest: str


@dataclass(frozen=True)
class File:
    """A file of formulas."""

    path: Path
    summary: str
    rest: str
    symbols: tuple[tuple[str, str], ...]
    formulas: tuple[Formula, ...]


def rooms() -> list[str]:
    """Return the subpackages and top-level modules, lowest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [PACKAGE] and contract["type"] == "layers":
            return [room for layer in reversed(contract["layers"]) for room in layer.split(" | ")]
    raise SystemExit(f"pyproject.toml has no layers contract of {PACKAGE}")


def parts_of(docstring: str) -> tuple[str, str]:
    """Split a docstring into its first paragraph and the rest."""
    summary, _, rest = docstring.partition("\n\n")
    return " ".join(summary.split()), rest.strip("\n")


def symbols_of(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield symbols and meanings of a ``Symbols`` paragraph: entries apart by three blanks."""
    match = re.search(r"^Symbols +(.*?)(?=^\S|\Z|\n\n)", docstring, re.MULTILINE | re.DOTALL)
    for line in match[1].splitlines() if match else ():
        for entry in re.split(r" {3,}", line.strip()):
            symbol, _, meaning = entry.partition(" ")
            if re.fullmatch(r"[A-Za-z]{1,2}|[a-z]+_[a-z0-9]|alpha|beta|gamma|tau", symbol):
                yield symbol, meaning.strip(" ,")


def is_formula(docstring: str) -> bool:
    """Whether a docstring has indented lines, other than a doctest, or a source."""
    lines = docstring.split("\n")[1:]
    return any(line.startswith("    ") for line in lines) or "Source:" in docstring


def read(path: Path) -> File:
    """Read a file's docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree) or ""
    formulas = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            own = ast.get_docstring(node) or ""
            if is_formula(own):
                formulas.append(Formula(node.name, *parts_of(own)))
    return File(path, *parts_of(docstring), tuple(symbols_of(docstring)), tuple(formulas))


def files_of(room: str) -> list[File]:
    """Return the files of a room that have formulas or symbols."""
    place = ROOT / PACKAGE / room
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [file for file in map(read, paths) if file.formulas or file.symbols]


def symbols_table(found: list[tuple[str, list[File]]]) -> str:
    """Return one row for each symbol and meaning, with the rooms that use it so."""
    meanings: dict[tuple[str, str], list[str]] = {}
    for room, files in found:
        for file in files:
            for entry in file.symbols:
                places = meanings.setdefault(entry, [])
                if room not in places:
                    places.append(room)
    lines = ["| symbol | meaning | rooms |", "| --- | --- | --- |"]
    for (symbol, meaning), places in sorted(
        meanings.items(), key=lambda item: (item[0][0].lower(), item[0][0], item[0][1])
    ):
        lines.append(f"| {symbol} | {meaning.replace('|', '')} | {', '.join(places)} |")
    return "\n".join(lines)


def section(room: str, files: list[File]) -> str:
    """Return the part of the page about one room."""
    lines = [f"## {room}", ""]
    for file in files:
        lines += [f"### `{file.path.relative_to(ROOT)}`", "", file.summary, ""]
        if file.rest:
            lines += ["```text", file.rest, "```", ""]
        for formula in file.formulas:
            lines += [f"**`{formula.name}`** {formula.summary}", ""]
            if formula.rest:
                lines += ["```text", formula.rest, "```", ""]
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    found = [(room, files) for room in rooms() if (files := files_of(room))]
    sections = [section(room, files) for room, files in found]
    return HEAD + symbols_table(found) + "\n\n" + "\n".join(sections).rstrip() + "\n"


def main() -> None:
    """Write the page, or exit with 1 where it is not what the docstrings say."""
    text = page()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print("docs/reference/formulas.md: python docs/make_formulas.py --write")
        sys.exit(1)


if __name__ == "__main__":
    main()
