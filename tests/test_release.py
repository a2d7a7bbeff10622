"""What a release says about itself: one version, and metadata that readers of it accept."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import planner
from planner.cli import app

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_place_has_the_version_of_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    version = PROJECT["version"]
    assert importlib.metadata.version("shardplan") == version
    assert planner.__version__ == version
    with pytest.raises(SystemExit):
        app.main(["--version"])
    assert capsys.readouterr().out == f"shardplan {version}\n"
    answer = planner.plan("gpt2", "1xL4")
    assert answer.plan_file().created_by == f"shardplan {version}"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


def test_the_citation_agrees_with_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]
    # what version 1.2.0 of the format requires
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"


def test_every_dependency_has_an_oldest_version() -> None:
    names = ("run", "data", "page", "tensorboard")
    extras = [line for name in names for line in PROJECT["optional-dependencies"][name]]
    for line in [*PROJECT["dependencies"], *extras]:
        operators = [one.operator for one in Requirement(line).specifier]
        assert operators.count(">=") == 1, line
