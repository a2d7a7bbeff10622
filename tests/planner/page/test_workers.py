"""Worker processes: the same answer once, activity, a question that nobody waits for."""

import asyncio

import pytest

from hardware_profiles.errors import InputError
from hardware_profiles.progress import Activity
from planner.page import workers
from planner.page.question import PageQuestion
from planner.page.workers import Answers

pytestmark = pytest.mark.slow


async def questions() -> None:
    answers = Answers(1, 1)
    answers.start()
    try:
        small = PageQuestion.of({"model": "gpt2", "cluster": "2xL4"})
        first, second = await asyncio.gather(
            answers.get("price", small), answers.get("price", small)
        )
        assert first is second
        assert first.word == "FITS"
        with pytest.raises(InputError, match="not known"):
            await answers.get("price", PageQuestion.of({"model": "lama"}))
        large = PageQuestion.of({"model": "llama-3-70b", "cluster": "64x8xH100-SXM"})
        process = answers.searching.workers[0].process
        pending = answers.begin("best", large)
        waiting = asyncio.ensure_future(answers.get("best", large))
        while pending.activity.text == "waiting for a free worker":
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([pending.future])
        assert not process.is_alive()  # the search has ended with its process
        assert ("best", large) not in answers.kept
        assert (await answers.get("best", small)).rows  # by a new one
    finally:
        answers.stop()


def test_questions() -> None:
    asyncio.run(asyncio.wait_for(questions(), 300))


def test_an_activity_tells_the_share_done_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 0.0, 2.0, 3.5])
    monkeypatch.setattr(workers.time, "monotonic", lambda: next(clock))
    shown = workers.ShownActivity()
    shown.update(Activity("searching", 0.0, 1))
    assert shown.to_dict() == {"text": "searching", "share": None, "left": None}
    shown.update(Activity("searching", 0.25, 1))
    assert shown.to_dict() == {"text": "searching", "share": 0.25, "left": "5 s"}
