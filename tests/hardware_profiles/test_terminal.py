"""Output streams: ASCII where a stream has no more, and pipes that nobody reads."""

import errno
import io
import json
import sys
from pathlib import Path

import pytest

from hardware_profiles.errors import InputError
from hardware_profiles.terminal import ASCII, prepare_streams, say, show, transliterate

SOURCES = Path(__file__).parents[2]


def test_every_character_of_a_message_has_an_ascii_form() -> None:
    """No question mark stands for a character of the sources."""
    used: set[str] = set()
    for package in ("hardware_profiles", "cost_models", "planner", "executor"):
        for path in (SOURCES / package).rglob("*.py"):
            used |= {one for one in path.read_text(encoding="utf-8") if not one.isascii()}
    assert used > {"✔", "·", "–", "×", "█"}
    assert {one for one in used if "?" in transliterate(one)} == set()
    assert all(text.isascii() for text in ASCII.values())


def test_characters_of_tables_keep_their_width() -> None:
    for one in "█▓▒░▚▪▏│✔·–×":
        assert len(transliterate(one)) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_without_a_character_gets_another_one(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    monkeypatch.delenv("LC_ALL", raising=False)
    prepare_streams()
    show("✔ ██ 2 × 3")
    times = "×" if encoding == "latin-1" else "x"
    assert raw.getvalue().decode(encoding) == f"* ## 2 {times} 3\n"


def test_lc_all_c_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    prepare_streams()
    show("3 °")
    assert raw.getvalue() == b"3  deg\n"


def test_control_characters_are_escaped_and_colours_are_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "\x1b]0;title\x07\x1b[31m\x9b2J\u202efdp\r\x08é"
    show(f"FITS {name}\n\ttwo", lambda text: text.replace("FITS", "\x1b[32mFITS\x1b[0m"))
    say(name)
    out, err = capsys.readouterr()
    plain = r"\u001b]0;title\u0007\u001b[31m\u009b2J\u202efdp\u000d\u0008é"
    assert out == f"\x1b[32mFITS\x1b[0m {plain}\n\ttwo\n"
    assert err == f"{plain}\n"


def test_the_escapes_keep_a_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"a\x9bb": "\u202e\x1b"}
    show(json.dumps(names, indent=2, ensure_ascii=False))
    assert json.loads(capsys.readouterr().out) == names


@pytest.mark.parametrize(
    ("number", "raises"), [(errno.EPIPE, False), (errno.EIO, False), (errno.ENOSPC, True)]
)
def test_output_that_goes_nowhere(
    number: int, raises: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A closed terminal or pipe ends nothing; a full disk is one line."""

    def fail(*_: object) -> None:
        raise OSError(number, "No space left on device")

    for name in ("stdout", "stderr"):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "write", fail)
        monkeypatch.setattr(sys, name, stream)
    say("a message")
    if raises:
        with pytest.raises(InputError, match="standard output: cannot be written: No space left"):
            show("text")
    else:
        show("text")
