"""What commands print: nothing wider than 80 or 60 columns, colour on a terminal only."""

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import planner.validation
from planner.cli import app
from planner.cli.listings import doctor
from planner.cli.outputs import shows_colours

PUBLISHED = Path(str(planner.validation.__file__)).with_name("published_runs.csv")
PATTERN = re.compile(r"https?://\S+|/\S+")  # an address or a path is not broken


def printed(
    words: Sequence[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        app.main(list(words))
    out, err = capsys.readouterr()
    assert stop.value.code in (0, None, 3), err
    lines: list[str] = out.splitlines()
    assert lines
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan.json and a RUNS.csv."""
    folder = tmp_path_factory.mktemp("widths")
    head, *rows = PUBLISHED.read_text(encoding="utf-8").splitlines(keepends=True)
    measured = [row for row in rows if row.startswith("megatron-sc21")]
    (folder / "RUNS.csv").write_text(head + "".join(measured[:3]), encoding="utf-8")
    with pytest.raises(SystemExit):
        app.main(["plan", "gpt2-xl", "2x8xA100-80GB", "-o", str(folder / "plan.json")])
    return folder


@pytest.mark.sampled(8)
@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(
    "words",
    [
        "models",
        "models deepseek-v3",
        "models bert-base",
        "hardware",
        "hardware h100",
        "hardware gb200",
        "doctor",
        "fit llama-3-70b 8xA100-80GB",
        "fit mixtral-8x7b 4x8xH100-SXM --verbose",
        "compare plan.json plan.json",
        "trace plan.json --force",
        "validate RUNS.csv",
    ],
)
def test_no_line_is_wider_than_the_terminal(
    words: str,
    columns: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(doctor, "torch_facts", lambda: {"problem": "torch cannot be imported"})
    for line in printed(words.split(), columns, monkeypatch, capsys):
        assert len(PATTERN.sub("", line)) <= columns, line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "environment", "colours"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_only_a_terminal_gets_colours(
    out: io.StringIO,
    environment: dict[str, str],
    colours: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)
    assert shows_colours() is colours
