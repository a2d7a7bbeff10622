"""The questions of ``questions.toml``: exit code, words, first fix, and size of each answer."""

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from planner.cli.app import main

COLUMNS = 80
LINES = 15
QUESTIONS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "questions.toml").read_text()
)["question"]
# answers in the order in which they take the longest
SLOW = ("plan", "deepseek", "kimi", "glm", "llama-4", "t5", "mixtral", "405b")


def question(given: dict[str, Any]) -> Any:
    """Return a question as a parameter: slow ones are asked in the slow suite."""
    slow = any(word in given["command"] for word in SLOW)
    return pytest.param(given, id=given["command"], marks=[pytest.mark.slow] if slow else [])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("given", [question(one) for one in QUESTIONS])
def test_a_question_is_answered_as_an_expert_would(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit) as ended:
        main(given["command"].split())
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert (ended.value.code or 0) == given.get("code", 0), text
    words = " ".join(text.split())
    for said in given["says"]:
        assert " ".join(said.split()) in words, text
    lines = text.splitlines()
    assert max(map(len, lines)) <= COLUMNS, text
    assert len(lines) <= given.get("most", LINES), text
    if "fix" in given:
        (first,) = [line for line in lines if line.startswith("Fixes")]
        assert given["fix"] in first, text


def test_there_are_sixty_questions_and_no_two_are_alike() -> None:
    commands = [given["command"] for given in QUESTIONS]
    assert len(commands) == len(set(commands)) >= 60


# Fixes of an answer as shown: peak, and options that are appended to the command
FIX = re.compile(r"^(?:Fixes)? +([\d.,]+) GiB  .*?((?:\d+x[\w-]+ )?--.*?)(?:  .*)?$")


def answer_to(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0), capsys.readouterr().out


def fixes_of(text: str) -> list[tuple[str, str]]:
    """Peak and options of the fixes that an answer shows with their options."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Fixes ")]
    shown = itertools.takewhile(
        lambda line: line.startswith(("Fixes ", " ")), lines[starts[0] :] if starts else []
    )
    return [(found[1], found[2]) for line in shown if (found := FIX.match(line))]


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(given, id=given["command"])
        for given in QUESTIONS
        if given["command"].startswith("fit ") and given.get("code", 0) in (3, 4, 7)
    ],
)
def test_a_fix_that_is_appended_fits_with_the_peak_that_was_said(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    words = given["command"].split()
    _, text = answer_to(words, capsys)
    fixes = fixes_of(text)
    assert fixes, text
    for peak, options in fixes:
        code, again = answer_to([*words, *options.split()], capsys)
        assert code == 0, again
        assert f"FITS       peak {peak} of" in again, (options, again)
