"""Token files: what is written is read back; what is damaged is refused."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.__main__ import main
from executor.data.build import KEPT_SECONDS, MAX_BYTES, TokenizationOptions, build, cached
from executor.data.token_file import HEADER_BYTES, new_token_file, open_token_file, smallest_dtype
from executor.data.vocabulary import ByteVocabulary, open_vocabulary
from hardware_profiles.errors import InputError, RunError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Für alle Fälle", encoding="utf-8")
    return path


def _built(text: Path, vocab_size: int = 256) -> Path:
    path = text.with_suffix(".bin")
    build([text], TokenizationOptions(ByteVocabulary(), vocab_size), path, force=True)
    return path


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**32, "uint32")],
)
def test_the_smallest_dtype_is_taken(text: Path, vocab_size: int, dtype: str):
    assert smallest_dtype(vocab_size) == dtype
    file = open_token_file(_built(text, vocab_size))
    assert file.tokens.dtype == np.dtype(dtype)
    assert bytes(file.tokens.astype(np.uint8)) == "Für alle Fälle\0".encode()
    assert file.ends.tolist() == [17]
    assert file.header.largest == 0xC3
    assert isinstance(file.tokens, np.memmap)


def test_a_token_file_can_be_read_by_whom_other_files_can(text: Path):
    assert _built(text).stat().st_mode == text.stat().st_mode


def test_the_same_documents_give_the_same_hash(text: Path):
    first = open_token_file(_built(text)).header
    assert open_token_file(_built(text)).header == first
    text.write_text("Für alle Fallen")
    assert open_token_file(_built(text)).header.sha256 != first.sha256


def test_where_documents_end_is_in_the_hash(tmp_path: Path):
    hashes = set()
    for rows in ([[1, 2], [3]], [[1], [2, 3]]):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        hashes.add(
            build(
                [path], TokenizationOptions(ByteVocabulary(), 9), tmp_path / "a.bin", force=True
            ).sha256
        )
    assert len(hashes) == 2


def _damaged(path: Path, change: str) -> None:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[:HEADER_BYTES])
    if change == "short":
        path.write_bytes(data[:-1])
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "raw":
        path.write_bytes(bytes(range(256)) * 100)
    else:
        name, value = change.split("=")
        header[name] = json.loads(value)
        line = json.dumps(header).encode().ljust(HEADER_BYTES)
        path.write_bytes(line + data[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("short", r"bytes \(expected from its header: .*\): incomplete"),
        ("empty", r"not a token file \(made with: shardplan tokenize\)"),
        ("raw", "not a token file"),
        ("version=2", r"version 2 \(supported: 1\)"),
        ('tokens="17"', r"invalid header: tokens = \"17\" \(must be a whole number"),
        ('dtype="int8"', r"invalid header: dtype = \"int8\" \(must be one of uint8, "),
        ("surprise=1", r"invalid header: unknown key 'surprise'"),
        ("documents=0", r"invalid header: documents = 0 \(must be a whole number from 1 "),
        ("tokens=18", r"its last document ends at 17, not at its number of tokens"),
        ("tokens=1000", r"incomplete"),
    ],
)
def test_what_is_damaged_is_refused(text: Path, change: str, message: str):
    path = _built(text)
    _damaged(path, change)
    with pytest.raises(InputError, match=rf"text\.bin: .*{message}"):
        open_token_file(path)


@pytest.mark.parametrize("ends", [[2, 1, 4], [0, 4], [1, 1, 4], [2**64 - 1, 4]])
def test_documents_that_end_before_they_begin_are_refused(ends: list[int], tmp_path: Path):
    path = tmp_path / "a.bin"
    with new_token_file(path, "uint8") as writer:
        for token in range(len(ends)):
            writer.add(np.arange(4 if token == len(ends) - 1 else 0))
            writer.documents += 1
            writer._ends.write(np.array([ends[token]], dtype="<u8").tobytes())
        writer.finish(None)
    with pytest.raises(InputError, match=r"a\.bin: the ends of its documents do not ascend"):
        open_token_file(path)


@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
@pytest.mark.parametrize("text", [b"", b"[" * 4000, b"PK\3\4", b"\x93NUMPY\1\0\x10\0((((((((("])
def test_a_header_of_something_else_is_refused(name: str, text: bytes, tmp_path: Path):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(InputError, match=r"not a (token|\.npy) file"):
        open_token_file(tmp_path / name)


def test_a_plain_array_is_one_document(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    file = open_token_file(tmp_path / "a.npy")
    assert file.tokens[7] == 7
    assert file.ends.tolist() == [100]
    for array, shown in ((np.zeros(3), "float64"), (np.zeros((2, 2), np.uint16), r"\(2, 2\)")):
        np.save(tmp_path / "b.npy", array)
        with pytest.raises(InputError, match=rf"b\.npy: .*{shown}.*one dimension of"):
            open_token_file(tmp_path / "b.npy")
    old = (tmp_path / "a.npy").read_bytes().replace(b"(100,), ", b"(100L,),")  # of Python 2
    (tmp_path / "a.npy").write_bytes(old)
    assert open_token_file(tmp_path / "a.npy").tokens[7] == 7
    np.save(tmp_path / "c.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(InputError, match=r"c\.npy: not a \.npy file of numbers"):
        open_token_file(tmp_path / "c.npy")


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path):
    def interrupted() -> None:
        with new_token_file(tmp_path / "a.bin", "uint8") as writer:
            writer.add(np.zeros(10, dtype=np.int64))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_error(text: Path, monkeypatch: pytest.MonkeyPatch):
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"text\.bin: cannot be written: No space left on device"):
        _built(text)
    assert sorted(path.name for path in text.parent.iterdir()) == ["text.txt"]


def test_the_cache_is_made_once_and_again_when_a_file_changes(text: Path, cache: Path):
    reading = TokenizationOptions(ByteVocabulary(), 256)
    first = cached([text], reading).path
    made = first.stat().st_ino
    assert cached([text], reading).path.stat().st_ino == made
    assert first.parent == cache / "tokens"
    text.write_text("other")
    second = cached([text], reading)
    assert bytes(second.tokens) == b"other\0"
    assert second.path != first
    second.path.write_bytes(b"damaged")
    assert bytes(cached([text], reading).tokens) == b"other\0"


def test_what_no_run_opened_for_a_month_is_deleted(text: Path):
    reading = TokenizationOptions(ByteVocabulary(), 256)
    first = cached([text], reading).path
    text.write_text("other")
    second = cached([text], reading).path
    old = time.time() - KEPT_SECONDS - 60
    os.utime(first, (old, old))
    os.utime(second, (old, old))
    cached([text], reading)  # used again
    text.write_text("a third one")
    cached([text], reading)
    assert not first.exists()
    assert second.exists()


def test_a_huge_source_is_refused_by_a_run(tmp_path: Path):
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # sparse: takes no room
    with pytest.raises(InputError, match=r"tokenize them in advance: shardplan tokenize"):
        cached([tmp_path / "huge.txt"], TokenizationOptions(ByteVocabulary(), 256))


def test_an_unwritable_cache_says_what_to_set(text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHARDPLAN_CACHE", str(text / "below a file"))
    with pytest.raises(InputError, match="Set SHARDPLAN_CACHE to a writable folder"):
        cached([text], TokenizationOptions(ByteVocabulary(), 256))


def test_the_command_tokenizes(tmp_path: Path, tokenizer: Any, capsys: Any):
    folder = tokenizer(["a", "b", "c"])
    rows = [{"body": "a b"}, {"body": 7}, {"body": "c c c"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", folder, "--text-field", "body"]
    command += ["-o", str(tmp_path / "out.bin")]
    assert main(command) == 2
    assert "a.jsonl, line 2: 'body' is a number (text expected)" in capsys.readouterr().err
    assert main([*command, "--skip-bad-rows", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == 7
    assert answer["skipped_rows"] == 1
    file = open_token_file(tmp_path / "out.bin")
    assert file.tokens.tolist() == [2, 3, 1, 4, 4, 4, 1]
    assert file.header.vocabulary_fingerprint == open_vocabulary(folder).fingerprint
    assert main([*command, "--skip-bad-rows"]) == 2
    assert "exists already (--force replaces it)" in capsys.readouterr().err
    assert main([*command, "--skip-bad-rows", "--force"]) == 0
    assert "7 tokens of 2 documents" in capsys.readouterr().out


def test_what_the_command_refuses(tmp_path: Path, text: Path, capsys: Any):
    for arguments, message in (
        ([str(text), "-o", str(tmp_path / "a.txt")], "must end in .bin"),
        ([str(text), "-o", str(tmp_path / "no" / "a.bin")], "no such folder"),
        ([str(_built(text)), "-o", str(tmp_path / "a.bin")], "is already tokenized"),
        (["/dev/zero", "-o", str(tmp_path / "a.bin")], "is a character device"),
    ):
        assert main(["tokenize", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path: Path):
    import tracemalloc

    path = tmp_path / "a.jsonl"
    row = json.dumps({"text": "word " * 2000}) + "\n"
    path.write_text(row * 4000)  # 40 MB
    tracemalloc.start()
    build([path], TokenizationOptions(ByteVocabulary(), 256), tmp_path / "out.bin")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6
