"""Lines about the steps of a run: not too many, and never a long silence."""

from itertools import pairwise

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
