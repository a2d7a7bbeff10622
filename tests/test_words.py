"""Public names use the field's words (docs/reference/glossary.md).

``python tests/test_words.py`` prints the names of all packages that do not. A public name is a
module, class, function, parameter or field without a leading underscore.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardware_profiles.fields import names_in

ROOT = Path(__file__).parents[1]
PACKAGES = ("hardware_profiles", "cost_models", "planner", "executor")
# words of this code base that mean nothing to a reader who knows the field
PRIVATE = frozenset(
    names_in("""
        anew asked away beside born door flying gone heard held hopeless lonely mates mute said
        seldom spared stillness story tariff there told retyped typed walk walked walks
    """)
)
ALLOWED = frozenset({"bounded_away"})  # names in which such a word has its usual meaning


def public_names(module: Path) -> Iterator[str]:
    """Names that a module gives to modules, classes, functions, parameters and fields."""
    yield module.stem
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.name
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield part.target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                yield argument.arg


def words_of(name: str) -> set[str]:
    """Split a name into its words.

    >>> sorted(words_of("TracedScenario_of_plan"))
    ['of', 'plan', 'scenario', 'traced']
    """
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def offending(package: str) -> list[str]:
    """Return the public names of a package that hold a private word, with their files."""
    found = {
        f"{module.relative_to(ROOT)}: {name}"
        for module in (ROOT / package).rglob("*.py")
        for name in public_names(module)
        if not name.startswith("_") and words_of(name) & PRIVATE and name not in ALLOWED
    }
    return sorted(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_use_words_of_the_field(package: str) -> None:
    assert offending(package) == []


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for module in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(str(module.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_the_glossary_has_about_sixty_terms() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    assert 50 <= len(rows) <= 75


def test_names_of_the_glossary_are_in_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )
    names = [
        name
        for line in page.splitlines()
        if line.startswith("| ")
        for name in re.findall(r"`(\w+)`", line.split(" | ")[1])
    ]
    assert [name for name in names if name not in code] == []


if __name__ == "__main__":
    for each in PACKAGES:
        print(*offending(each), sep="\n")
