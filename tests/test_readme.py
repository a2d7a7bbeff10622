"""Outputs and the picture in the README are what the commands print."""

from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("page", readme.PAGES, ids=lambda path: path.name)
def test_every_console_block_is_what_its_command_prints(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert any(match[2] for match in readme.BLOCK.finditer(text))
    assert readme.differences(text, tutorial=readme.is_tutorial(page)) == []


@pytest.mark.slow
def test_a_block_that_says_something_else_is_found() -> None:
    text = readme.README.read_text(encoding="utf-8")
    block = next(match[0] for match in readme.BLOCK.finditer(text) if match[2])
    assert "fit" in block
    assert len(readme.differences(block.replace("FITS", "FITS EASILY", 1))) == 1


def test_the_picture_is_what_the_command_draws() -> None:
    assert readme.PICTURE.read_text(encoding="utf-8") == readme.picture()


def test_there_are_two_set_up_commands_and_ci_reads_them() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert text.count("<!-- set-up: ") == 2
    assert text.count("```sh\n") == 2
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name in ("set-up: main job", "set-up: tests"):
        assert f"<!-- {name} -->" in text
        assert name in ci
