"""``shardplan doctor`` answers on every machine, and names what to install."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest

from hardware_profiles.errors import InputError
from planner.cli import app as cli
from planner.cli.listings import doctor

ROOT = Path(__file__).parents[4]


def refuse() -> None:
    raise InputError("nvidia-smi: failed")


@pytest.mark.parametrize("torch", ["2.9.1", None])
def test_it_names_what_is_missing_and_ends_well(
    torch: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: torch if n == "torch" else real(n))
    required = ["torch>=2.11; extra == 'run'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: required)
    monkeypatch.setattr(doctor, "visible_gpus", refuse)
    monkeypatch.setattr(doctor.sys, "executable", "/does/not/exist")
    for words in (["doctor", "--json"], ["doctor"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert not stop.value.code
    shown, text = capsys.readouterr().out.split("\n}\n")
    found = json.loads(f"{shown}\n}}")
    assert "pip install 'shardplan[run]'" in found["install"]
    assert found["gpu_problem"] == "nvidia-smi: failed"
    assert (found["torch"] is None) == (torch is None)
    assert ("missing" if torch is None else "needs >=2.11") in text
    assert found["shardplan"] == importlib.metadata.version("shardplan")
    assert max(map(len, text.splitlines())) <= 100


def test_the_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    wanted = {
        (re.match(r"[\w-]+", line)[0], extra)  # type: ignore[index]
        for extra in ("", *{extra for extra, _ in doctor.DISTRIBUTIONS.values()})
        for line in lists[extra]
    }
    assert {(name, extra) for name, (extra, _) in doctor.DISTRIBUTIONS.items()} == wanted
