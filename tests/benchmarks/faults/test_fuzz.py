"""Strangers' files: mutated ones, and those that were found to break a reader."""

import tempfile
from pathlib import Path

import pytest

from benchmarks.faults.fuzz import fuzz, read_case
from benchmarks.faults.fuzz_readers import readers

BY_NAME = {one.name: one for one in readers()}
LAUGH = b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9)
)
FOUND = {
    "digits of a size": ("out-of-memory error", b"Tried to allocate " + b"9" * 5000 + b" GiB"),
    "terabytes": ("out-of-memory error", b"Tried to allocate 2 TB. 1 iB free"),
    "a long number in TOML": ("software.toml", b"x = " + b"9" * 5000),
    "a long key": ("cluster.toml", b"nodes = 2\n" + b"x" * 70000 + b" = 1"),
    "a name of two lines": ("cluster words", b"8xA100\n/x.toml"),
    "a range of two lines": ("cluster words", b"1..2xL40\r\nS"),
    "a word for a number": ("trainer's config", b"lora_r: x\nper_device_train_batch_size: 1\n"),
    "a name of no file": ("weight index", b'{"weight_map": {"w": "\\ud800"}}'),
    "a very long name": ("weight index", b'{"weight_map": {"w": "' + b"x" * 5000 + b'"}}'),
    "a version of two lines": ("checkpoint index", b'{"schema_version": "a\\nb"}'),
    "a deep log": ("log", b'{"a": ' + b"[" * 3000),
    "open expansions": ("trainer's config", b"torchrun a.py --tp 2\nA=" + b"${x-" * 40_000),
    "a laugh": ("trainer's config", b"base_model: x\na0: &a0 [1]\n" + LAUGH),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_broke_a_reader_once(name: str, tmp_path: Path) -> None:
    reader, data = FOUND[name]
    assert read_case(BY_NAME[reader], data, tmp_path) is None


def test_the_harness_sees_what_a_reader_must_not_do(tmp_path: Path) -> None:
    import os
    import subprocess

    from benchmarks.faults.fuzz_readers import Reader

    def caught(read: object) -> str:
        return str(read_case(Reader("", list, lambda *_: read()), b"", tmp_path))  # type: ignore[operator]

    assert caught(lambda: subprocess.run(["true"])).startswith("Trespass")
    assert caught(lambda: os.system("true")).startswith("Trespass")
    assert caught(lambda: Path(tempfile.gettempdir(), "elsewhere").touch()).startswith("Trespass")
    assert caught(lambda: {}["x"]).startswith("KeyError")
    assert caught(lambda: Path(tmp_path, "here").touch()) == "None"


@pytest.mark.slow(seconds=20)
def test_ten_thousand_mutated_files() -> None:
    assert [str(one) for one in fuzz(10_000)] == []
