"""Errors are wrapped in a terminal and one line in a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hardware_profiles.message import NARROWEST, WIDEST, error_text, stderr_width, wrapped

LONG = "shardplan: tensor_parallel = 16 does not divide " + "a-long-word " * 20


def test_lines_are_wrapped_at_words() -> None:
    lines = wrapped(LONG, 60).split("\n")
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("shardplan: tensor_parallel = 16")
    assert all(line.startswith("  a-long-word") for line in lines[1:])
    assert " ".join("\n".join(lines).split()) == LONG.strip()
    assert wrapped(LONG, None) == LONG


def test_a_list_keeps_its_items_and_long_words_stay_whole() -> None:
    path = "/a/" + "very-long-folder/" * 10
    text = f"two errors\n  first {path}\n\n  second"
    assert wrapped(text, 60).split("\n") == ["two errors", "  first", f"    {path}", "", "  second"]


@pytest.mark.parametrize(
    ("columns", "width"), [("80", 80), ("20", NARROWEST), ("500", WIDEST), ("", None), ("x", None)]
)
def test_the_width_is_that_of_the_terminal(
    columns: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert stderr_width() == width
    assert error_text("short") == "short"


@pytest.mark.parametrize("words", [["planner", "fit", "gpt2"], ["executor", "export", "no-such"]])
def test_an_error_is_one_message(words: list[str]) -> None:
    def stderr(**columns: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        done = subprocess.run(
            [sys.executable, "-m", *words, "-o", "x", "--lerning-rate", "0.1"],
            env={**environment, **columns, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        return done.stderr

    one_line = stderr()
    assert one_line.count("\n") == 1
    assert len(one_line) > 62
    several = stderr(COLUMNS="60").splitlines()
    assert max(map(len, several)) <= 60
    assert " ".join(" ".join(several).split()) == one_line.strip()
