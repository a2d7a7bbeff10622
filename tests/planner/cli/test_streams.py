"""The streams of a real process: closed pipes, ASCII terminals, a terminal of 60 columns."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

BASE = [sys.executable, "-m", "planner"]


@pytest.mark.parametrize("words", [["models"], ["--help"]])
def test_a_closed_pipe_is_silent(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)  # as if ``head`` had ended
    done = subprocess.run(
        [*BASE, *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("name", ["PYTHONIOENCODING", "LC_ALL"])
def test_an_ascii_terminal_gets_ascii(name: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONUTF8", "LC_ALL")}
    environment.pop("PYTHONIOENCODING", None)
    environment[name] = "ascii" if name == "PYTHONIOENCODING" else "C"
    program = (
        "import planner.cli.listings.listing as listing\n"
        "listing.models_text = lambda document: '✔ ██ 2 × 3 · 5'\n"
        "from planner.cli.app import main\n"
        "main(['models'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False
    )
    assert (done.stderr, done.returncode) == (b"", 0)
    assert done.stdout == b"* ## 2 x 3 . 5\n"


def test_commands_print_through_one_function() -> None:
    """So that the status line is erased first and closed pipes are handled."""
    import planner.cli

    for path in Path(str(planner.cli.__file__)).parent.rglob("*.py"):
        assert not re.search(r"\bprint\(", path.read_text()), path


SLOW = """
import time
from hardware_profiles.progress import report, tracked
import planner.cli.listings.listing as listing
def slow(document):
    for _ in tracked(range(10), 'pricing way out {number}'):
        time.sleep(0.15)
    return 'FITS'
listing.models_text = slow
from planner.cli.app import main
main(['models'])
"""


def on_a_terminal(program: str, **environment: str) -> tuple[str, bytes]:
    """Run a program whose stderr is a terminal; return its output and what the terminal got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60", **environment},
    )
    os.close(theirs)
    seen, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        try:
            found = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not found:
            break
        seen += found
    answer = process.communicate()[0].decode()
    assert process.returncode == 0
    os.close(ours)
    return answer, seen


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"LC_ALL": "C"}])
def test_a_terminal_shows_activity_and_time_left_and_erases_them(
    environment: dict[str, str],
) -> None:
    answer, seen = on_a_terminal(SLOW, **environment)
    assert re.search(rb"pricing way out \d+ \.\.\.", seen)
    assert re.search(rb"\d0 %, 1 s left", seen)
    assert seen.endswith(b"\r\x1b[K")
    assert b"\n" not in seen
    assert set(re.findall(rb"\x1b\[.", seen)) == {b"\x1b[K"}  # no colour
    seen.decode("ascii")
    assert answer == "FITS\n"


def test_a_dumb_terminal_shows_no_activity() -> None:
    assert on_a_terminal(SLOW, TERM="dumb") == ("FITS\n", b"")


@pytest.mark.parametrize("encoding", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_help_is_ascii_too(encoding: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planner", "plan", "--help"],
        env={**os.environ, **encoding},
        capture_output=True,
        check=True,
    )
    text = done.stdout.decode("ascii")
    assert "CLUSTER[,...]" in text
