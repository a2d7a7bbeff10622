"""Reading of words.toml: checks of the table, and which entry of a section applies."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hardware_profiles.errors import InputError
from planner.validation.rows import words
from planner.validation.rows.runs_file import PUBLISHED, Row, read_runs
from planner.validation.rows.words import (
    TABLE,
    Conditions,
    Name,
    WordsTable,
    look_up,
    words_table,
    words_table_from,
)


def sections(table: WordsTable) -> dict[str, tuple[Conditions, ...]]:
    found = {name: getattr(table, name) for name in table.__struct_fields__}
    return {
        name: section
        for name, section in found.items()
        if isinstance(section, tuple) and isinstance(section[0], Conditions)
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('profile = "nemo"', "profile = 3", ": profile = 3 (must be a string)"),
        ('framework = ["megatron"]', 'framwork = ["megatron"]', "unknown key 'framwork'"),
        ('framework = ["megatron"]', "framework = [1]", "framework[0] = 1 (must be a string)"),
        ('is = "device"', 'is = "devices"', "Did you mean device?"),
        ('peft = ["qlora"]', 'peft = ["qqlora"]', "peft = 'qqlora' is no term of the vocabulary"),
        (
            'optimizer = ["lamb"]',
            'optimizer = ["sgd"]',
            "two entries are equally specific and apply to the same rows: optimizer = ['sgd']",
        ),
        (  # one phrase, "unsloth", stands for both
            'framework = ["hugging face", "unsloth"]',
            'framework = ["unsloth"]',
            "two entries are equally specific",
        ),
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


def test_no_entry_states_a_fact_about_one_source() -> None:
    """Accelerators and models are conditions of what they are called in the catalogue alone."""
    for name, section in sections(words_table()).items():
        for entry in section:
            columns = set(entry.when)
            assert not columns & {"source", "source_group", "row_id", "outcome", "num_gpus"}, entry
            assert "gpu" not in columns or name == "gpu", entry
            # Qwen's script looks for "chat" in a model's name; attention, and the operators that a
            # checkpoint keeps, are a model's code; a suite of benchmarks, and some trainers, have a
            # configuration for each model
            of_code = ("architecture", "attention", "checkpoints")
            by_model = name in (*of_code, "trained_ends", "suite_models")
            of_suite = {"flagperf", "mlperf"} & set(entry.when.get("framework", ()))
            assert "model" not in columns or by_model or of_suite, entry


def name(value: str, **when: tuple[str, ...]) -> Name:
    return Name(value=value, when=when)


@pytest.mark.parametrize(
    ("section", "cells", "expected"),
    [
        ([name("general"), name("one", recompute=("full",))], {"recompute": "full"}, "one"),
        ([name("general"), name("one", recompute=("full",))], {"recompute": "none"}, "general"),
        (
            [
                name("words", framework=("megatron", "deepspeed")),
                name("conditions", framework=("megatron",), precision=("fp16",)),
            ],
            {"framework": "Megatron and DeepSpeed", "precision": "fp16"},
            "conditions",
        ),
        (
            [name("one", peft=("nf4",)), name("two", peft=("nf4", "double quantisation"))],
            {"peft": "qlora, nested nf4"},
            "two",
        ),
        (  # a cell's own word before a word anywhere
            [name("anywhere", anywhere=("recompute",)), name("own", recompute=("none",))],
            {"recompute": "none", "notes": "without gradient checkpointing; recompute tried"},
            "own",
        ),
        (  # equally specific: the name that stands first
            [name("composer", framework=("composer",)), name("nemo", framework=("nemo",))],
            {"framework": "NeMo on Composer"},
            "nemo",
        ),
    ],
)
def test_the_most_specific_entry_applies(
    section: list[Name], cells: dict[str, Any], expected: str
) -> None:
    for entries in (section, section[::-1]):
        found = look_up(entries, Row(**cells))
        assert found is not None
        assert found.value == expected


def test_the_order_of_entries_is_of_no_account() -> None:
    table = words_table()
    rows = read_runs(PUBLISHED)[::5]
    for section in sections(table).values():  # backwards, so that any two change places
        backwards = section[::-1]
        assert [look_up(backwards, row) for row in rows] == [look_up(section, row) for row in rows]


def test_without_trainers_all_rows_are_of_one() -> None:
    with words.without_trainers():
        assert words_table().software == ()
    assert words_table().software
    assert replace(words_table(), software=()) != words_table()
