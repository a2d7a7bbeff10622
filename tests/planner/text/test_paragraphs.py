import shlex

import pytest

from planner.text.paragraphs import next_command


def test_a_shell_reads_a_command_over_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    options = " ".join(f"--option-{name} {name}" for name in "abcd")
    command = f"shardplan fit llama-3-8b 8xA100-80GB {options}"
    lines = next_command(command, "append the options of a fix to ")
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    text = "\n".join(lines).replace("\\\n", "")  # as a shell does
    assert shlex.split(text[text.index("shardplan") :]) == shlex.split(command)
