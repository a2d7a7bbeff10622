"""Reading of words.toml: a damaged table gives one message that names the wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_profiles.errors import InputError
from planner.validation.words import TABLE, words_table_from


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('profile = "nemo"', "profile = 3", ": software[6]: profile = 3 (must be a string)"),
        ('framework = ["megatron-core"', 'framwork = ["megatron-core"', "unknown key 'framwork'"),
        ('framework = ["megatron-lm"]', "framework = [1]", "framework[0] = 1 (must be a string)"),
        ('is = "device"', 'is = "devices"', "Did you mean device?"),
        ("[left_out.memory]", "", "left_out: memory is missing"),
    ],
)
def test_damaged_tables(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "words.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as error:
        words_table_from(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
