"""What ``module:package.path:factory`` may name, and what the process that imports it may do."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles.errors import InputError, RunError
from planner.request import executor_process


def traced(name: str) -> Any:
    return executor_process.trace(name, precision="bf16", device="cuda")


@pytest.mark.parametrize("path", ["", ":", "json", "no_such_package.x:f", "../json:f", "$(id):f"])
def test_what_cannot_be_imported_starts_no_process(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(InputError, match=r"not a module|cannot be imported"):
        traced(f"module:{path}")


@pytest.mark.parametrize("printed", ["", "done\n", "{}]\n"])
def test_a_module_that_ends_its_process_is_refused(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").touch()
    monkeypatch.chdir(tmp_path)
    ended = subprocess.CompletedProcess((), 0, printed, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(InputError, match="module:own_model:f: its code ended Python"):
        traced("module:own_model:f")


@pytest.mark.parametrize(("code", "words"), [(-6, "signal 6"), (3, "exit code 3")])
def test_a_module_that_ends_its_process_without_a_word(
    code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").touch()
    monkeypatch.chdir(tmp_path)
    ended = subprocess.CompletedProcess((), code, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(RunError, match=f"module:own_model:f: tracing failed: {words}"):
        traced("module:own_model:f")
