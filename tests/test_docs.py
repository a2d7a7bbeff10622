"""Pages name files, modules and headings that exist, and the rooms in their order."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("hardware_profiles", "cost_models", "planner", "executor")
FOLDERS = (*PACKAGES, "benchmarks", "tests", "docs", "examples", "notebooks")
PAGES = sorted(
    path for part in ("*.md", "docs/**/*.md", "examples/*.md") for path in ROOT.glob(part)
)
PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*\w\*?/?)")
MODULE = re.compile(
    rf"(?<![\w./'-])((?:{'|'.join((*PACKAGES, 'benchmarks', 'notebooks'))})(?:\.\w+)+)"
)
BARE_FILE = re.compile(r"`(\w+\.(?:py|toml|csv))`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def names_in(module: Path) -> set[str]:
    """Names that a module defines or imports, at its top level or for type checkers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    parts = dotted.split(".")
    place = ROOT
    for number, part in enumerate(parts):
        if (place / part).is_dir():
            place = place / part
            continue
        module = place / f"{part}.py"
        if module.is_file():
            rest = parts[number + 1 :]
            return not rest or rest[0] in names_in(module)
        packages = [place / name for name in ("__init__.py", "__init__.pyi")]
        return any(part in names_in(path) for path in packages if path.is_file())
    return True


# they cite files of other repositories
CITING = ROOT / "docs" / "reference" / "hardware"


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent != CITING], ids=name_of)
def test_every_path_exists(page: Path) -> None:
    missing = [
        path
        for path in PATH.findall(text_of(page))
        if not any(ROOT.glob(path.replace("NAME", "*")))
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_without_a_folder_exists_once(page: Path) -> None:
    wrong = {
        name: [name_of(path) for path in found]
        for name in BARE_FILE.findall(text_of(page))
        if name not in EXAMPLES
        and len(found := [p for part in FOLDERS for p in (ROOT / part).rglob(name)]) != 1
    }
    assert wrong == {}


# files at the root, of a user, or of a run
EXAMPLES = {"pyproject.toml", "box.toml", "profile.toml", "rows.csv", "groups.csv", "RUNS.csv"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_module_exists(page: Path) -> None:
    text = LINK.sub("", text_of(page))
    missing = [name for name in MODULE.findall(text) if not exists(name)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_name_in_a_file_exists(page: Path) -> None:
    found = re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", text_of(page))
    assert [(name, path) for name, path in found if name not in names_in(ROOT / path)] == []


@cache
def source_text() -> str:
    """Everything in which a name of a page may be defined."""
    return "\n".join(
        path.read_text(encoding="utf-8")
        for folder in FOLDERS
        if folder != "docs"
        for end in ("py", "toml", "json", "csv")
        for path in (ROOT / folder).rglob(f"*.{end}")
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_identifier_is_in_the_code(page: Path) -> None:
    names = set(re.findall(r"`([A-Za-z]\w*_\w+)`", text_of(page)))
    assert sorted(name for name in names if name not in source_text()) == []


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(text_of(page)):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


def test_every_page_is_linked_from_the_index() -> None:
    """From docs/README.md, or from the README.md of its folder that docs/README.md links to."""
    folder = ROOT / "docs"
    linked = links_of(folder / "README.md")
    for index in [path for path in linked if path.name == "README.md"]:
        linked |= links_of(index)
    assert sorted(name_of(page) for page in book_pages() - linked) == []


def links_of(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target, _ in LINK.findall(text_of(page)) if target}


def book_pages() -> set[Path]:
    return set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "README.md"}


def entries_of(navigation: object) -> Iterator[str]:
    """Paths of a navigation of mkdocs.yml: pages, and folders that end with a slash."""
    if isinstance(navigation, str):
        yield navigation
    elif isinstance(navigation, dict):
        yield from entries_of(list(navigation.values()))
    elif isinstance(navigation, list):
        for entry in navigation:
            yield from entries_of(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    entries = list(entries_of(yaml.safe_load("nav:" + text.split("\nnav:")[1])["nav"]))
    folder = ROOT / "docs"
    listed = [
        page
        for entry in entries
        for page in ((folder / entry).glob("*.md") if entry[-1] == "/" else [folder / entry])
    ]
    assert sorted(map(name_of, listed)) == sorted(
        map(name_of, book_pages() | {folder / "README.md"})
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_rooms_stand_in_the_order_of_their_contract(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and contract.get("containers") == [package]
    )
    page = text_of(ROOT / "docs" / "explanation" / "architecture.md")
    section = page.split(f"**`{package}`")[1].split("**`")[0].split("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`[^|]*`) \|", section, re.M)]
    assert [sorted(row) for row in rows] == [
        sorted(layer.split(" | ")) for layer in reversed(layers)
    ]


@pytest.mark.parametrize(
    "script",
    [
        "make_defaults.py",
        "make_stub.py",
        "make_schema.py",
        "make_targets.py",
        "make_commands.py",
        "make_hardware.py",
        "make_python.py",
        pytest.param("make_questions.py", marks=pytest.mark.slow),
        pytest.param("make_examples.py", marks=pytest.mark.slow),
    ],
)
def test_generated_pages_are_current(script: str) -> None:
    """``python docs/SCRIPT --write`` makes them anew."""
    command = [sys.executable, str(ROOT / "docs" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_formula_has_a_source_limits_and_a_number() -> None:
    """In its own section of the book, or (source, limits) in the heading of its file."""
    for page in sorted((ROOT / "docs" / "reference" / "formulas").glob("[a-z]*.md")):
        for file in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            head, *formulas = file.split("\n### ")
            for formula in formulas:
                name = f"{page.name}: {formula.split()[0]}"
                for part in ("**Source**", "**Leaves out**"):
                    assert part in head + formula, f"{name} has no {part}"
                number = "**Worked number**" in formula or "**Example**" in formula
                assert number, f"{name} has no number"


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").split()) <= 900
