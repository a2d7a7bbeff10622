"""The status line: after half a second, on a terminal, erased at the end."""

from __future__ import annotations

import io
import sys
import time

import pytest

from hardware_profiles.progress import ERASE, StatusLine, clear, report, wants_status_line

WAIT = 5.0  # seconds, at most


def wait_for(stream: io.StringIO, text: str) -> None:
    until = time.monotonic() + WAIT
    while text not in stream.getvalue():
        assert time.monotonic() < until, stream.getvalue()
        time.sleep(0.02)


def test_a_quick_command_shows_nothing() -> None:
    stream = io.StringIO()
    with StatusLine(stream, "loading"):
        report("pricing the plan")
    assert stream.getvalue() == ""


def test_a_slow_command_names_its_activity_and_erases_it() -> None:
    stream = io.StringIO()
    with StatusLine(stream, "loading"):
        report("searching 19,152 plans")
        wait_for(stream, "searching 19,152 plans ...")
        assert "loading" not in stream.getvalue()
        report("pricing way out 3")
        wait_for(stream, "pricing way out 3 ...")
        clear()  # before the answer
        assert stream.getvalue().endswith(ERASE)
    assert stream.getvalue().endswith(ERASE)
    assert "\n" not in stream.getvalue()


def test_the_line_keeps_within_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    with StatusLine(stream, "x" * 100):
        wait_for(stream, "...")
    assert all(len(line) < 40 for line in stream.getvalue().split(ERASE))


def test_reports_without_a_line_are_dropped() -> None:
    report("nobody listens")
    clear()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "out", "shown"),
    [
        (["fit"], io.StringIO(), True),
        (["fit", "--json"], Terminal(), True),
        (["fit", "--json"], io.StringIO(), False),
    ],
)
def test_json_to_a_pipe_has_no_line(
    monkeypatch: pytest.MonkeyPatch, words: list[str], out: io.StringIO, shown: bool
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert wants_status_line(words) is shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not wants_status_line(words)
