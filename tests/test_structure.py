"""Rules about the tree that a machine can check."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

from hardware_profiles.software.trainer import FOLDER, profile_names, software_profile

ROOT = Path(__file__).parents[1]
PACKAGES = ("hardware_profiles", "cost_models", "planner", "executor")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
MOST_LINES = 1000
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("os", "system")}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_import_contracts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short_and_says_what_it_is(path: Path) -> None:
    with tokenize.open(path) as handle:
        text = handle.read()
    assert text.count("\n") <= MOST_LINES
    assert ast.get_docstring(ast.parse(text)), "no docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_runs_no_foreign_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            assert called.id not in FORBIDDEN_CALLS, node.lineno
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            assert (called.value.id, called.attr) not in FORBIDDEN_ATTRIBUTES, node.lineno
        for keyword in node.keywords:
            on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            assert not (keyword.arg in ("shell", "trust_remote_code") and on), node.lineno


def test_the_walk_sees_the_packages() -> None:
    assert len(MODULES) > 50
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("name", profile_names())
def test_every_number_of_a_software_profile_has_a_source(name: str) -> None:
    profile = software_profile(name)
    assert profile.name == name
    assert profile.description
    numbers = [f for f in profile.__slots__ if f not in ("name", "description", "sources")]
    assert set(profile.sources) == set(numbers)
    assert all(len(source) >= 4 for source in profile.sources.values())


def test_all_profiles_are_listed() -> None:
    assert {"shardplan", "megatron"} <= set(profile_names())
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(profile_names())
