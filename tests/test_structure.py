"""Rules about the tree that a machine can check."""

import ast
from functools import cache
from pathlib import Path

import pytest

from hardware_profiles.software.profile import Profile
from hardware_profiles.software.trainer import FOLDER, profile_names, software_profile

ROOT = Path(__file__).parents[1]
PACKAGES = ("hardware_profiles", "cost_models", "planner", "executor")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
MOST_LINES = 1000
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
# of networks: models are fetched by huggingface_hub, ranks meet by torch
FORBIDDEN_MODULES |= {"requests", "httpx", "aiohttp", "urllib3", "ftplib", "smtplib", "telnetlib"}
FORBIDDEN_PARTS = {"urllib.request", "http.client"}
FORBIDDEN_ATTRIBUTES = {
    *(("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")),
    *(("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("numpy", "load")),
    *(("np", "load"), ("dist", "all_gather_object"), ("dist", "broadcast_object_list")),
    *(("dist", "gather_object"), ("dist", "scatter_object_list")),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_import_contracts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS


def test_modules_are_short() -> None:
    lines = {name_of(path): path.read_bytes().count(b"\n") for path in MODULES}
    assert {name for name, number in lines.items() if number > MOST_LINES} == set()


def foreign_code(node: ast.AST) -> bool:
    """Whether a node imports or calls something that runs code from a file or a shell."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
        return bool(
            {name.split(".")[0] for name in names} & FORBIDDEN_MODULES or names & FORBIDDEN_PARTS
        )
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module.split(".")[0] in FORBIDDEN_MODULES or module in FORBIDDEN_PARTS
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name) and called.id in FORBIDDEN_CALLS:
        return True
    owner = called.value if isinstance(called, ast.Attribute) else None
    if isinstance(owner, ast.Name) and (owner.id, called.attr) in FORBIDDEN_ATTRIBUTES:
        return True
    return any(
        keyword.arg in ("shell", "trust_remote_code")
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in node.keywords
    )


def prints(node: ast.AST) -> bool:
    """Whether a node writes text on the terminal without escaping what it contains."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name):
        return called.id == "print"
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return False
    name = f"{called.value.id}.{called.attr}"
    return name in ("click.echo", "click.secho") or name.startswith("traceback.print")


@cache
def found() -> dict[str, list[str]]:
    """What one pass over the syntax trees of all modules finds; the trees are not kept."""
    lists: dict[str, list[str]] = {"no docstring": [], "prints": [], "foreign code": []}
    for path in MODULES:
        name = name_of(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            lists["no docstring"].append(name)
        for node in ast.walk(tree):
            if prints(node):
                lists["prints"].append(name)
            if foreign_code(node):
                lists["foreign code"].append(f"{name}:{getattr(node, 'lineno', 0)}")
    return lists


def test_every_module_has_a_docstring() -> None:
    assert found()["no docstring"] == []


def test_text_is_printed_in_one_place_that_escapes_it() -> None:
    assert set(found()["prints"]) == {"hardware_profiles/terminal.py"}


def test_no_module_runs_foreign_code() -> None:
    assert found()["foreign code"] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "torch.load(path)",
        "os.popen('ls')",
        "np.load(path)",
        "import urllib.request",
        "from urllib.request import urlopen",
        "import requests",
        "dist.all_gather_object(found, mine)",
        "subprocess.run(words, shell=True)",
    ],
)
def test_foreign_code_is_recognised(text: str) -> None:
    assert any(map(foreign_code, ast.walk(ast.parse(text))))


def test_every_package_is_checked() -> None:
    assert len(MODULES) > 50
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("name", profile_names())
def test_every_number_of_a_software_profile_has_a_source(name: str) -> None:
    profile = software_profile(name)
    assert profile.name == name
    assert profile.description
    groups = [f for f in profile.__struct_fields__ if f not in Profile.__struct_fields__]
    figures = [f"{g}.{f}" for g in groups for f in getattr(profile, g).__struct_fields__]
    assert set(profile.sources) == set(figures)
    assert all(len(source) >= 4 for source in profile.sources.values())


def test_all_profiles_are_listed() -> None:
    assert {"shardplan", "megatron"} <= set(profile_names())
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(profile_names())
