"""The status line: after half a second, on a terminal, erased at the end."""

import contextlib
import io
import itertools
import subprocess
import sys
import time

import pytest

from hardware_profiles import progress

WAIT = 5.0  # seconds, at most


def wait_for(stream: io.StringIO, text: str) -> None:
    until = time.monotonic() + WAIT
    while text not in stream.getvalue():
        assert time.monotonic() < until, stream.getvalue()
        time.sleep(0.02)


def test_a_quick_command_shows_nothing() -> None:
    stream = io.StringIO()
    with progress.StatusLine(stream, "loading"):
        progress.report("pricing the plan")
    assert stream.getvalue() == ""


def test_a_slow_command_names_its_activity_and_erases_it() -> None:
    stream = io.StringIO()
    with progress.StatusLine(stream, "loading"):
        progress.report("searching 19,152 plans")
        wait_for(stream, "searching 19,152 plans ...")
        assert "loading" not in stream.getvalue()
        progress.report("pricing way out 3")
        wait_for(stream, "pricing way out 3 ...")
        progress.clear()  # before the answer
        assert stream.getvalue().endswith(progress.ERASE)
    assert stream.getvalue().endswith(progress.ERASE)
    assert "\n" not in stream.getvalue()


def test_without_a_terminal_lines_stay_and_are_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardware_profiles.progress.SELDOM", 0.1)
    stream = io.StringIO()
    with progress.StatusLine(stream, "loading", lasting=True):
        progress.report("searching 19,152 plans")
        wait_for(stream, "searching 19,152 plans ...")
        progress.report("pricing way out 3")
        wait_for(stream, "pricing way out 3 ...")
    assert progress.ERASE not in stream.getvalue()
    assert all("..." in line for line in stream.getvalue().splitlines())
    assert stream.getvalue().endswith("\n")


def test_the_line_keeps_within_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    with progress.StatusLine(stream, "x" * 100):
        wait_for(stream, "...")
    assert all(len(line) < 40 for line in stream.getvalue().split(progress.ERASE))


def test_reports_without_a_line_are_dropped() -> None:
    progress.report("nobody listens")
    progress.clear()


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
    assert progress.wants_status_line(words) is shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not progress.wants_status_line(words)


def test_nested_loops_tell_one_share_that_never_falls() -> None:
    seen: list[progress.Activity] = []
    with progress.passed_to(seen.append):
        for size in progress.tracked([1.0, 3.0], "model {number} of {total}", size=lambda one: one):
            for _ in progress.tracked(range(int(2 * size))):
                progress.report("pricing")
            progress.advance(1.0)
        shares = [one.share for one in seen]
        assert shares == sorted(shares)  # type: ignore[type-var]
        assert len({one.phase for one in seen}) == 1
        assert {0.0, 0.125, 0.25, 0.375, 0.875, 1.0} <= set(shares)
        assert "model 2 of 2, pricing" in [one.text for one in seen]
        progress.report("drawing")
    assert seen[-1].share is None
    assert seen[-1].phase > seen[0].phase


def test_parts_of_an_indivisible_item_tell_no_share() -> None:
    seen: list[progress.Activity] = []
    with progress.passed_to(seen.append):
        for _ in progress.tracked("ab", "part {number}", divisible=False):
            for _ in progress.tracked("cd"):
                progress.advance(0.9)
    assert {one.share for one in seen} == {0.0, 0.5}


def test_stages_are_parts_of_an_item_and_else_phases() -> None:
    seen: list[progress.Activity] = []
    with progress.passed_to(seen.append):
        with progress.stages(1.0, 1.0) as begin:
            begin("memory")
            progress.advance(0.5)
            begin("steps")
        first, *_, second = [(one.text, one.share, one.phase) for one in seen]
        assert first[:2] == ("memory", None)
        assert second == ("steps", None, first[2] + 1)
        seen.clear()
        for _ in progress.tracked("ab", "plan {number}"):
            with progress.stages(3.0, 1.0) as begin:
                begin("memory")
                progress.advance(0.5)
                begin("steps")
                progress.advance(1.0)
    shares = [one.share for one in seen]
    assert shares == sorted(shares)  # type: ignore[type-var]
    assert {0.0, 0.1875, 0.375, 0.5, 0.6875, 0.875, 1.0} <= set(shares)
    assert seen[2].text == "plan 1, memory"


def test_joint_stages_and_loops_without_words_keep_the_name_of_the_activity() -> None:
    seen: list[progress.Activity] = []
    with progress.passed_to(seen.append):
        progress.report("searching 12 plans")
        with progress.stages(3.0, 1.0, joint=True) as begin:
            begin()
            progress.advance(0.5)
            begin()
            list(progress.tracked([1, 2]))
    assert {activity.text for activity in seen} == {"searching 12 plans"}
    shares = [one.share or 0.0 for one in seen if one.phase == seen[-1].phase]
    assert shares == sorted(shares)
    assert 0.375 in shares
    assert shares[-1] == 1.0


def test_joint_stages_are_one_phase_which_an_error_ends() -> None:
    seen: list[progress.Activity] = []
    with progress.passed_to(seen.append):
        with contextlib.suppress(ValueError), progress.stages(1.0, 3.0, joint=True) as begin:
            begin("memory")
            begin("steps")
            raise ValueError
        progress.report("next")
    assert [one[:2] for one in seen[-2:]] == [("steps", 0.25), ("next", None)]
    assert seen[0].phase == seen[-2].phase < seen[-1].phase


def test_an_error_in_a_loop_leaves_no_trace() -> None:
    kept: list[ValueError] = []  # whose traceback keeps the loop alive
    with progress.passed_to(lambda _: None):
        try:
            for _ in progress.tracked("ab", "part {number}"):
                raise ValueError
        except ValueError as error:
            kept.append(error)
    seen: list[progress.Activity] = []
    with progress.passed_to(seen.append):
        progress.report("next")
    assert seen[0][:2] == ("next", None)


def left_at(*reports: tuple[float, float]) -> list[float | None]:
    """Return the time left after each report of (seconds, share)."""
    clock, found = progress.TimeLeft(), []
    for now, share in reports:
        clock.update(progress.Activity("pricing", share, 1), now)
        found.append(clock.seconds(now))
    return found


def test_the_time_left_is_extrapolated_from_the_share_done() -> None:
    assert left_at((0, 0.0), (0.1, 0.1), (2, 0.2), (5, 0.5)) == [None, None, 8, 5]


def test_a_wrong_time_left_grows_step_by_step() -> None:
    *_, before, later = left_at((0, 0.0), *((at, 0.9) for at in (9, 9.1)), (10, 0.91))
    assert before is not None
    assert later is not None
    assert later <= 2.0 * max(1.0, before)
    clock, shown = progress.TimeLeft(), []
    for step in range(1, 400):  # half of the work takes a tenth of the time
        done = 0.05 * step if step < 10 else 0.5 + 0.5 * (step - 10) / 390
        clock.update(progress.Activity("pricing", done, 1), 0.1 * step)
        shown.append(clock.seconds(0.1 * step))
    known = [left for left in shown if left is not None]
    assert max(known) > 5.0
    assert len(known) > 390
    assert all(b <= 1.2 * max(1.0, a) for a, b in itertools.pairwise(known))


def test_a_time_left_never_ends_before_the_work_and_is_given_up_long_after() -> None:
    clock = progress.TimeLeft()
    clock.update(progress.Activity("pricing", 0.0, 1), 0.0)
    clock.update(progress.Activity("pricing", 0.5, 1), 2.0)
    figures = [clock.seconds(2.0 + 0.1 * step) for step in range(45)]
    assert figures == sorted(figures, reverse=True)  # type: ignore[type-var]
    assert all(figures)
    assert clock.seconds(8.0) is None
    clock.update(progress.Activity("drawing", None, 2), 8.5)
    assert clock.seconds(9.0) is None


def test_the_line_shows_share_and_time_left() -> None:
    stream = io.StringIO()
    with progress.StatusLine(stream, "loading"):
        for _ in progress.tracked(range(100), "run {number} of {total}"):
            time.sleep(0.02)
            if "left" in stream.getvalue():
                break
    assert "s left" in stream.getvalue()


def test_a_process_reports_to_the_one_that_started_it() -> None:
    program = (
        "from hardware_profiles.progress import report, status_line, tracked\n"
        "with status_line('measuring'):\n"
        "    for _ in tracked(range(2), 'measurement {number} of {total}'): pass\n"
    )
    seen: list[progress.Activity] = []
    with progress.passed_to(seen.append), progress.reports_of_process() as channel:
        subprocess.run([sys.executable, "-c", program], check=True, **channel)
    texts = [(one.text, one.share) for one in seen]
    assert ("measurement 1 of 2", 0.0) in texts
    assert ("measurement 2 of 2", 0.5) in texts
