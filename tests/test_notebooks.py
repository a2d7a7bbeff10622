"""The notebooks use public names alone, keep their outputs, and link to pages that exist."""

import ast
import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import planner

FOLDER = Path(__file__).parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MODULES = {"matplotlib", "numpy", "pandas", "planner", *sys.stdlib_module_names}
LARGEST = 60_000  # bytes of a drawing


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def test_there_are_seven() -> None:
    assert [path.name[:2] for path in PATHS] == [f"{number:02d}" for number in range(1, 8)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_only_public_names_are_used(path: Path) -> None:
    for cell in cells(path, "code"):
        tree = ast.parse(source(cell))
        for name in imports(tree):
            assert name == "planner" or name.partition(".")[0] in MODULES - {"planner"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
                if isinstance(node.value, ast.Name) and node.value.id == "planner":
                    assert node.attr in planner.__all__


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_are_kept_without_errors(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    drawings = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert drawings
    assert all(len(base64.b64decode(one)) <= LARGEST for one in drawings)
    assert str(FOLDER.parent) not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(source(cell) for cell in cells(path, "markdown"))
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert all((FOLDER / link).exists() for link in links)
