"""Lines about the steps of a run: not too many, and never a long silence."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from executor.records import progress
from executor.records.progress import ProgressDisplay


def _shown(capsys, steps, seconds_a_step, monkeypatch):
    clock = iter(seconds_a_step * count for count in range(1, 10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    event = {"loss": 1.0, "gradient_norm": None, "learning_rate": 1e-3, "tokens_per_second": 10.0}
    with ProgressDisplay(steps) as show:
        for step in range(1, steps + 1):
            show({**event, "step": step})
    return [
        int(line.split("/")[0].removeprefix("step"))
        for line in capsys.readouterr().err.splitlines()
    ]


def test_a_short_run_shows_every_step_and_a_long_one_some(capsys, monkeypatch):
    assert _shown(capsys, 3, 1e-3, monkeypatch) == [1, 2, 3]
    shown = _shown(capsys, 1000, 1e-6, monkeypatch)
    assert shown == [1, *range(50, 1001, 50)]


def test_slow_steps_are_not_waited_for_in_silence(capsys, monkeypatch):
    shown = _shown(capsys, 1000, 20.0, monkeypatch)
    assert all(after - before <= 2 for before, after in pairwise(shown))


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_the_bar_and_the_values_share_one_line_of_a_terminal(width, monkeypatch):
    clock = iter(range(1, 10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: 10.0 * next(clock))
    stream = io.StringIO()
    shown = ProgressDisplay(12_000)
    shown._add_bar(Console(file=stream, force_terminal=True, width=width, color_system=None))
    event = {"loss": 10.8271, "gradient_norm": 1.2345, "learning_rate": 6e-4}
    with shown as show:
        for step in (1, 2, 11_000):
            show({**event, "tokens_per_second": 1_234_567.0, "step": step})
            show.bar.refresh()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", stream.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in lines.split("\n") if "11000/12000" in line]
    assert lines
    for line in lines:
        assert len(line) <= width
        assert "loss 10.8271" in line
        assert line.endswith(" left")  # not cut
        assert ("tokens/s" in line) == (width >= 80)
        assert ("gradient norm" in line) == (width >= 120)
        assert ("lr " in line) == (width >= 160)
