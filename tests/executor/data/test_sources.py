"""Rows of text, JSONL and Parquet; what is wrong is named by file and row."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.data import sources
from executor.data.build import TokenizationOptions, build
from executor.data.sources import BadRow, Piece, files_of, rows_of
from executor.data.token_file import open_token_file
from executor.data.vocabulary import ByteVocabulary
from hardware_profiles.errors import InputError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def _rows(path: Path, field: str = "text") -> list[Any]:
    return [
        str(row) if isinstance(row, BadRow) else (row.content, row.place, row.last)
        for row in rows_of(path, field)
    ]


def _jsonl(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def test_jsonl_rows_with_their_lines(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", {"text": "one"}, "", {"n": 1, "text": "zwei ü"})
    assert _rows(path) == [("one", "line 1", True), ("zwei ü", "line 3", True)]
    assert _rows(_jsonl(tmp_path / "b.ndjson", {"body": "x"}), "body") == [("x", "line 1", True)]


def test_a_byte_order_mark_and_a_missing_line_end_do_no_harm(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert [row[0] for row in _rows(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", r"not JSON: Expecting property name .* \(column \d\)"),
        (b"hello", r"not JSON: Expecting value \(column 1\)"),
        (b"[1]", r"a list \(an object expected\)"),
        (b'{"a": 1, "b": 2}', r"no field 'text' \(fields: a, b; --text-field names another\)"),
        (b"{}", r"no field 'text' \(fields: none;"),
        (b'{"text": 3}', r"'text' is a number \(text expected\)"),
        (b'{"text": null}', r"'text' is null"),
        (b'{"text": [1]}', r"'text' is a list"),
        (b'{"text": "\xff"}', r"not UTF-8 text: invalid start byte"),
        (b'{"text": "\\ud800"}', r".text. holds half a character"),
        (b"[" * 100_000, r"not JSON: "),
        (b'{"text": ' + b"1" * 5000 + b"}", r"not JSON: "),
        (b'{"input_ids": [1, -1]}', r"'input_ids' holds '-1' \(token numbers expected\)"),
        (b'{"input_ids": [1, true]}', r"'input_ids' holds 'True'"),
        (b'{"input_ids": 5}', r"'input_ids' is a number \(token numbers expected\)"),
    ],
    ids=range(15),
)
def test_bad_json_rows(tmp_path: Path, line: bytes, problem: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "again"}\n')
    good, bad, again = _rows(path)
    assert good[0] == "good"
    assert again[0] == "again"
    with pytest.raises(InputError, match=rf"a\.jsonl, line 2: {problem}"):
        build([path], TokenizationOptions(ByteVocabulary(), 256), tmp_path / "out.bin")
    assert bad.startswith(f"{path}, line 2: ")
    assert not (tmp_path / "out.bin").exists()


def test_rows_that_are_tokens_already(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", {"input_ids": [5, 6]}, {"input_ids": []})
    assert _rows(path)[0][0].tolist() == [5, 6]
    with pytest.raises(InputError, match=r"line 1: token 6 \(vocab_size = 6 allows 0 to 5\)"):
        build([path], TokenizationOptions(ByteVocabulary(), 6), tmp_path / "out.bin")


def _parquet(path: Path, rows_per_group: int = 2, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


def test_parquet_rows_with_their_places(tmp_path: Path):
    path = _parquet(tmp_path / "a.parquet", text=["a", "b", "ü"], n=[1, 2, 3])
    assert _rows(path) == [
        ("a", "row 1 of row group 1", True),
        ("b", "row 2 of row group 1", True),
        ("ü", "row 1 of row group 2", True),
    ]
    ids = _parquet(tmp_path / "b.parquet", input_ids=[[1, 2], [3]])
    assert [row[0].tolist() for row in _rows(ids)] == [[1, 2], [3]]


def test_bad_parquet_rows(tmp_path: Path):
    path = _parquet(tmp_path / "a.parquet", text=["a", None, "c"])
    assert _rows(path)[1] == f"{path}, row 2 of row group 1: 'text' is null (text expected)"
    numbers = _parquet(tmp_path / "b.parquet", text=[1, 2])
    assert "row 1 of row group 1: 'text' is a number" in _rows(numbers)[0]
    binary = pyarrow.array([b"ok", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    broken = _parquet(tmp_path / "c.parquet", text=binary)
    assert "row 2 of row group 1: 'text' is bytes that are not UTF-8" in _rows(broken)[1]
    with pytest.raises(InputError, match=r"no field 'body' \(columns: text"):
        _rows(path, "body")
    (tmp_path / "d.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(InputError, match=r"d\.parquet: not a Parquet file"):
        _rows(tmp_path / "d.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"Parquet needs pyarrow: pip install 'shardplan\[data\]'"):
        _rows(tmp_path / "a.parquet")


def test_a_long_text_comes_in_pieces_cut_at_line_ends(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(sources, "CHUNK", 10)
    path = tmp_path / "a.txt"
    text = "Für alle\nFälle\n" * 5 + "x" * 95 + "ä\nend"
    path.write_text(text, encoding="utf-8")
    pieces = [row for row in rows_of(path, "text") if isinstance(row, Piece)]
    assert "".join(str(piece.content) for piece in pieces) == text
    assert max(len(piece.content) for piece in pieces) <= 60
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].place == "line 12"
    path.write_bytes(b"one\ntwo\n" * 5 + b"\xff\n")
    assert _rows(path)[-1] == f"{path}, line 11: not UTF-8 text: invalid start byte"


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(sources, "MAX_LINE", 50)
    path = _jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": "x" * 100})
    with pytest.raises(InputError, match=r"line 2: longer than 50 bytes"):
        _rows(path)


def test_bad_rows_are_skipped_counted_and_leave_no_trace(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(sources, "CHUNK", 8)
    (tmp_path / "a.txt").write_bytes(b"a good line\nand\xff more of it\n")
    (tmp_path / "b.txt").write_bytes(b"good\n")
    _jsonl(tmp_path / "c.jsonl", {"text": "one"}, "{", {"text": 1}, {"text": ""}, {"text": "two"})
    files = files_of(str(tmp_path))
    header = build(
        files, TokenizationOptions(ByteVocabulary(), 256, "text", True), tmp_path / "out.bin"
    )
    file = open_token_file(tmp_path / "out.bin")
    assert bytes(file.tokens) == b"good\n\0one\0two\0"
    assert file.ends.tolist() == [6, 10, 14]
    assert (header.skipped_rows, header.documents) == (3, 3)
    with pytest.raises(InputError, match=r"a\.txt, line 2: not UTF-8"):
        build(files, TokenizationOptions(ByteVocabulary(), 256), tmp_path / "other.bin")


def test_nothing_left_is_an_error(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", "{", {"text": ""})
    with pytest.raises(InputError, match=r"a\.jsonl: is empty \(1 rows were skipped\)"):
        build(
            [path], TokenizationOptions(ByteVocabulary(), 256, "text", True), tmp_path / "out.bin"
        )


def test_files_of_a_folder_come_in_order_of_their_paths(tmp_path: Path):
    for name in ("b.txt", "a.jsonl", "sub/c.parquet", "sub/d.md", "z.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(file.relative_to(tmp_path)) for file in files_of(str(tmp_path))]
    assert found == ["a.jsonl", "b.txt", "sub/c.parquet", "z.npy"]


def test_special_files_are_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(InputError, match=r"pipe\.txt: is a FIFO \(a regular file expected\)"):
        files_of(str(tmp_path / "pipe.txt"))
    with pytest.raises(InputError, match="is a FIFO"):
        files_of(str(tmp_path))
    with pytest.raises(InputError, match="/dev/zero: is a character device"):
        files_of("/dev/zero")
    with pytest.raises(InputError, match="nowhere: no such file"):
        files_of(str(tmp_path / "nowhere"))
    (tmp_path / "pipe.txt").unlink()
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"link\.txt: no such file"):
        files_of(str(tmp_path))
    (tmp_path / "link.txt").unlink()
    with pytest.raises(InputError, match=r"no file of \.txt, \.jsonl, .* in this folder"):
        files_of(str(tmp_path))


def test_rows_of_tokens_get_the_end_of_a_named_tokenizer(tmp_path: Path, tokenizer: Any):
    from executor.data.vocabulary import open_vocabulary

    path = _jsonl(
        tmp_path / "a.jsonl", {"input_ids": [2, 3]}, {"input_ids": [2, 1]}, {"text": "x y"}
    )
    vocabulary = open_vocabulary(tokenizer(["x", "y"]))
    build([path], TokenizationOptions(vocabulary, 4), tmp_path / "out.bin")
    file = open_token_file(tmp_path / "out.bin")
    assert np.asarray(file.tokens).tolist() == [2, 3, 1, 2, 1, 2, 3, 1]
    assert file.ends.tolist() == [3, 5, 8]
