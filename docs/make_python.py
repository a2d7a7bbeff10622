"""Makes docs/reference/python/, the Python reference: ``make_python.py --write`` or --check.

Each page lists functions and classes with the first sentence of their docstring, which is what one
reads on GitHub; below, directives that mkdocstrings replaces by signatures and whole docstrings.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parent
ROOT: Final = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

from docstrings import describe  # noqa: E402
from generated import write_or_compare  # noqa: E402
from rooms import PACKAGE, TITLES, rooms  # noqa: E402

import planner  # noqa: E402

PLACE: Final = DOCS / "reference" / "python"
PLANNER: Final = """# The planner's functions

```python
import planner

answer = planner.fit("llama-3-8b", "8xA100-80GB", seq_len=8192)
answer.verdict, answer.plan  # print(answer) is what `shardplan fit` prints
```

Each function answers one question and returns an object that prints itself, has `to_dict()`, and
shows itself in a notebook. Keyword arguments of `fit` and `plan` are the options of the command
line; [defaults](../defaults.md) lists them with their Python names where those differ. A user's
error is an `InputError`.

"""
INDEX: Final = """# Python reference

Made of the docstrings (`python docs/make_python.py --write`); types and signatures are shown in the
built book. The formulas with symbols and worked numbers: [book of formulas](../formulas/README.md).
Which package depends on which: [architecture](../../explanation/architecture.md).

| page | content |
| --- | --- |
"""


def definitions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the public functions and classes of a file with their first sentences."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, summary_of(node)


def summary_of(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> str:
    """Return the first sentence of a docstring."""
    return describe(ast.get_docstring(node) or "").summary.replace("|", r"\|")


def file_summary(path: Path) -> str:
    """Return the first sentence of a file."""
    return summary_of(ast.parse(path.read_text(encoding="utf-8")))


def source(path: Path) -> str:
    """Return a link to a file of the code."""
    return f"[{path.relative_to(ROOT)}](../../../{path.relative_to(ROOT)})"


def planner_page() -> str:
    """Return the page about the functions of ``planner``."""
    lines = [PLANNER + "| function | | file |", "| --- | --- | --- |"]
    places = {name: planner.MODULES[name] for name in planner.__all__}
    for name, module in places.items():
        path = ROOT / f"{module.replace('.', '/')}.py"
        words = dict(definitions(path))[name]
        lines.append(f"| `{name}` | {words} | {source(path)} |")
    for name, module in places.items():
        lines += ["", f"::: {module}.{name}"]
        if name in ("fit", "plan"):  # they take the fields of a request as keywords
            lines += ["    options:", "      show_signature: false"]
    return "\n".join(lines) + "\n"


def room_page(room: str) -> str:
    """Return the page about a room of ``cost_models``."""
    place = ROOT / PACKAGE / room
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    paths = [path for path in paths if path.parent.name != "families"]  # no formulas
    lines = [f"# {PACKAGE}.{room}", "", file_summary(paths[0]), ""]
    modules = []
    for path in paths:
        found = list(definitions(path))
        if not found:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules.append(module)
        lines += [f"**{source(path)}** {file_summary(path)}", "", "| name | |", "| --- | --- |"]
        lines += [f"| `{name}` | {words} |" for name, words in found]
        lines.append("")
    for module in modules:
        lines += [f"::: {module}", ""]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[str, str]:
    """Return the text of every page."""
    made = {"planner.md": planner_page()}
    rows = ["| [planner](planner.md) | fit, plan, explain and the other questions |"]
    for room in rooms():
        if room in TITLES:
            made[f"{room}.md"] = room_page(room)
            rows.append(f"| [cost_models.{room}]({room}.md) | {TITLES[room]} |")
    return {"README.md": INDEX + "\n".join(rows) + "\n"} | made


def main() -> None:
    """Write the pages, or exit with 1 where one differs from the code."""
    made = {PLACE / name: text for name, text in pages().items()}
    write_or_compare(made, PLACE.glob("*.md"))


if __name__ == "__main__":
    main()
