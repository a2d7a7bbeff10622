"""Batches: the same on every layout and after every interruption, packed as asked for."""

import dataclasses
import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.data import SYNTHETIC, Corpus, DataOptions, open_corpus, require_same
from executor.data.batch import IGNORED, Batch
from executor.data.build import tokenize
from executor.data.packing import TokenSequence
from hardware_profiles.errors import InputError

TEXT = "The keeper lit the lamp at dusk. Für alle Fälle.\n" * 40
DOCUMENTS = ["abcdefgh", "ij", "k", "lmnopqrstuvwxyz", "ABC"]  # and an end of a byte each


def _open(
    *sources: Any, vocab_size: int = 256, seq_len: int = 16, seed: int = 0, **options: Any
) -> Corpus:
    return open_corpus(
        DataOptions(tuple(str(source) for source in sources), **options),
        vocab_size=vocab_size,
        seq_len=seq_len,
        seed=seed,
    )


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def _same(first: Batch, second: Batch) -> bool:
    pairs = [(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(Batch)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def _text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).decode("latin-1")


def test_bytes_are_tokens_and_labels_are_the_next_ones(text_file: Path):
    batch = _open(text_file).batch(step=3, global_batch_size=5)
    assert batch.inputs.shape == batch.labels.shape == (5, 16)
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.labels[:, :-1])
    assert bytes(batch.inputs[0].tolist()) in TEXT.encode()
    assert batch.tokens == 80
    assert batch.starts is None


@pytest.mark.parametrize("kind", ["text", SYNTHETIC])
def test_a_batch_depends_on_seed_and_step_alone(kind: str, text_file: Path):
    source = text_file if kind == "text" else SYNTHETIC
    first = _open(source, seed=7).batch(2, 8)
    other = _open(source, seed=7)
    other.batch(0, 4)  # what was read before does not matter
    assert _same(first, other.batch(2, 8))
    assert not torch.equal(first.inputs, other.batch(3, 8).inputs)
    assert not torch.equal(first.inputs, _open(source, seed=8).batch(2, 8).inputs)


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        ("documents", "concat"),
        ("documents", "documents"),
        ("documents", "none"),
        (SYNTHETIC, "concat"),
    ],
)
def test_ranks_that_read_their_own_rows_see_the_same_batch(
    kind: str, packing: str, documents: Path
):
    source = documents if kind == "documents" else SYNTHETIC
    corpus = _open(source, seq_len=4, packing=packing)
    whole = corpus.batch(5, 8)
    assert whole.tokens == int((whole.labels != IGNORED).sum())
    for ranks in (1, 2, 4, 8):
        share = 8 // ranks
        for rank in range(ranks):
            rows = range(rank * share, (rank + 1) * share)
            assert _same(corpus.batch(5, 8, rows), whole.rows(rows.start, rows.stop))


def test_a_rank_reads_no_rows_but_its_own(documents: Path, monkeypatch: pytest.MonkeyPatch):
    from executor.data.packing import Samples

    read: list[int] = []
    original = Samples.row

    def watched(self: Samples, sample: int) -> TokenSequence:
        read.append(sample)
        return original(self, sample)

    monkeypatch.setattr(Samples, "row", watched)
    _open(documents, seq_len=4, packing="documents").batch(0, 8, range(2, 4))
    assert len(read) == 2


def test_an_epoch_reads_every_sequence_once(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(16 * 100 + 1, dtype=np.uint16))
    corpus = _open(tmp_path / "a.npy", vocab_size=2000)
    firsts = [int(row[0]) for step in range(25) for row in corpus.batch(step, 8).inputs]
    assert sorted(firsts[:100]) == sorted(firsts[100:]) == list(range(0, 1600, 16))
    assert firsts[:100] != firsts[100:]


def test_concat_goes_over_the_ends_of_documents(documents: Path):
    corpus = _open(documents, seq_len=8)
    batches = list(corpus.evaluation(4))
    rows = [_text(row) for batch in batches for row in batch.inputs]
    assert rows == ["abcdefgh", "\0ij\0k\0lm", "nopqrstu", "vwxyz\0AB"]
    assert [_text(row) for row in batches[0].labels][1] == "ij\0k\0lmn"
    assert batches[0].tokens == 32
    assert batches[0].starts is None


def test_documents_are_kept_apart(documents: Path):
    (batch,) = _open(documents, seq_len=8, packing="documents").evaluation(4)
    assert _text(batch.inputs[1]) == "\0ij\0k\0lm"
    assert batch.starts is not None
    assert batch.starts.tolist() == [
        [0] * 8,
        [0, 1, 1, 1, 4, 4, 6, 6],
        [0] * 8,
        [0, 0, 0, 0, 0, 0, 6, 6],
    ]
    ignored = (batch.labels == IGNORED).nonzero().tolist()
    assert ignored == [[1, 0], [1, 3], [1, 5], [3, 5]]  # the ends of documents
    assert batch.tokens == 28


def test_without_packing_every_document_has_a_row(documents: Path):
    corpus = _open(documents, seq_len=8, packing="none")
    (batch,) = corpus.evaluation(5)
    rows = [_text(row) for row in batch.inputs]
    assert rows == ["abcdefgh", "ij\0" + "\0" * 5, "k" + "\0" * 7, "lmnopqrs", "ABC" + "\0" * 5]
    assert batch.labels[1].tolist() == [*b"j\0", *[IGNORED] * 6]
    assert batch.labels[3].tolist() == [*b"mnopqrst"]
    assert batch.starts is None  # a causal mask hides what fills a row up
    assert batch.tokens == 8 + 2 + 1 + 8 + 3
    assert corpus.notes == (
        "1 of 5 documents are longer than seq_len + 1 tokens: only their beginnings are used "
        "(--packing none)",
    )


def test_an_evaluation_is_fixed_and_counts_every_sample_once(text_file: Path):
    corpus = _open(text_file)
    first, again = list(corpus.evaluation(16)), list(_open(text_file).evaluation(16))
    assert all(map(_same, first, again))
    rest = corpus.count % 16
    assert rest
    assert len(first) == corpus.count // 16 + 1
    assert first[-1].tokens == rest * 16
    assert (first[-1].labels[rest:] == IGNORED).all()
    text = TEXT.encode()
    assert b"".join(bytes(r.tolist()) for b in first for r in b.inputs).startswith(text[:900])
    for rank in range(4):
        rows = range(rank * 4, rank * 4 + 4)
        own = list(corpus.evaluation(16, rows))
        shares = [batch.rows(rows.start, rows.stop) for batch in first]
        assert all(map(_same, own, shares))
    assert len(list(corpus.evaluation(16, batches=3))) == 3
    assert len(list(_open(SYNTHETIC).evaluation(512))) == 2


def test_a_folder_of_many_kinds(tmp_path: Path, documents: Path):
    (tmp_path / "a.txt").write_text("a text")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["in a table"]}), tmp_path / "b.parquet")
    np.save(tmp_path / "z.npy", np.frombuffer(b"an array", dtype=np.uint8))
    (tmp_path / "c.md").write_text("not data")
    corpus = _open(tmp_path, seq_len=12, packing="none")
    rows = [_text(row).rstrip("\0") for batch in corpus.evaluation(4) for row in batch.inputs]
    cut = [text[:12] for text in DOCUMENTS]
    assert [row for row in rows if row] == ["a text", "in a table", *cut, "an array"]


def test_a_token_file_gives_what_its_source_gives(text_file: Path, tmp_path: Path):
    tokenize([str(text_file)], tmp_path / "tokens.bin")
    assert _same(_open(tmp_path / "tokens.bin").batch(3, 8), _open(text_file).batch(3, 8))
    assert _open(tmp_path / "tokens.bin").fingerprint() == _open(text_file).fingerprint()


def test_several_sources_are_mixed_by_weight(tmp_path: Path):
    for name, letter in (("a.txt", "a"), ("b.txt", "b")):
        (tmp_path / name).write_text(letter * 999)
    corpus = _open(f"{tmp_path / 'a.txt'}:3", f"{tmp_path / 'b.txt'}:1", seq_len=9)
    letters = "".join(_text(row)[0] for row in corpus.batch(0, 1000).inputs)
    assert letters.count("a") == 750
    assert letters.count("b") == 250
    assert len(set(letters[:20])) == 2
    share = corpus.batch(0, 1000, range(100, 200)).inputs
    assert "".join(_text(row)[0] for row in share) == letters[100:200]
    both = _open(tmp_path / "a.txt", tmp_path / "b.txt", seq_len=9)
    assert both.count == 2 * _open(tmp_path / "a.txt", seq_len=9).count
    (tmp_path / "odd:3").write_text("a file that is called so" * 9)
    assert _open(tmp_path / "odd:3").count > 3


def test_a_local_tokenizer_is_used_and_its_tokens_must_be_in_the_vocabulary(
    text_file: Path, tokenizer: Any
):
    folder = tokenizer(sorted(set(TEXT.split())))
    corpus = _open(text_file, vocab_size=16, tokenizer=folder)
    assert corpus.batch(0, 4).inputs.max() < 16
    with pytest.raises(
        InputError, match=r"text\.txt, line 1: token \d+ \(vocab_size = 4 allows 0 to 3"
    ):
        _open(text_file, vocab_size=4, tokenizer=folder)
    with pytest.raises(InputError, match=r"text\.txt: is empty \(1 rows were skipped\)"):
        _open(text_file, vocab_size=4, tokenizer=folder, skip_bad_rows=True)


def test_a_tokenizer_without_an_end_puts_none(documents: Path, tokenizer: Any):
    folder = tokenizer(DOCUMENTS, end=None)
    (batch,) = _open(documents, vocab_size=6, seq_len=4, tokenizer=folder).evaluation(1)
    assert batch.inputs.tolist() == [[1, 2, 3, 4]]


def test_tokens_of_another_tokenizer_or_a_larger_vocabulary_are_refused(
    documents: Path, tokenizer: Any, tmp_path: Path
):
    folder, other = tokenizer(DOCUMENTS), tokenizer(DOCUMENTS[:3], name="other")
    tokenize([str(documents)], tmp_path / "t.bin", tokenizer=folder)
    assert _open(tmp_path / "t.bin", seq_len=4, tokenizer=folder).count == 2
    assert _open(tmp_path / "t.bin", seq_len=4).count == 2
    with pytest.raises(InputError, match=r"t\.bin: tokens of .* \(not of the tokenizer .*other\)"):
        _open(tmp_path / "t.bin", seq_len=4, tokenizer=other)
    with pytest.raises(
        InputError, match=r"t\.bin: token 6 \(the model's vocab_size = 6 allows 0 to 5"
    ):
        _open(tmp_path / "t.bin", seq_len=4, vocab_size=6)
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4, 70, 1, 2, 3, 4], dtype=np.uint16))
    corpus = _open(tmp_path / "a.npy", seq_len=8, vocab_size=70)
    with pytest.raises(InputError, match=r"a\.npy: token 70"):
        corpus.batch(0, 1)


def test_code_beside_a_tokenizer_is_not_run(text_file: Path, tmp_path: Path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        _open(text_file, tokenizer=str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"text\.txt: no such file"),
        (b"", r"text\.txt: is empty"),
        (b"\xff\xfe\x00 not text", r"text\.txt, line 1: not UTF-8 text"),
        (b"halb\n" + b"\xc3", r"text\.txt, line 2: not UTF-8 text"),
        (
            b"fifteen letters",
            r"text\.txt: 16 tokens \(seq_len = 16 needs at least 17; --packing none",
        ),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        _open(path)


def test_other_bad_input(tmp_path: Path, text_file: Path):
    with pytest.raises(InputError, match=r"vocab_size = 255 \(byte tokens need at least 256"):
        _open(text_file, vocab_size=255)
    with pytest.raises(InputError, match="no such folder"):
        _open(text_file, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="synthetic data has no text"):
        _open(SYNTHETIC, tokenizer=str(tmp_path))
    with pytest.raises(InputError, match="packing = none: synthetic data has no documents"):
        _open(SYNTHETIC, packing="none")
    with pytest.raises(InputError, match="synthetic data cannot be combined"):
        _open(SYNTHETIC, text_file)
    with pytest.raises(InputError, match=r"a weight .* for every source or for none"):
        _open(text_file, f"{text_file}:2")
    with pytest.raises(InputError, match=r"weight -1 \(must be a number above 0\)"):
        _open(f"{text_file}:-1", f"{text_file}:2")
    with pytest.raises(InputError, match=r"packing = document .*Did you mean documents\?"):
        _open(text_file, packing="document")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(text_file: Path):
    text_file.chmod(0)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        _open(text_file)


def test_the_identity_says_what_the_batches_depend_on(text_file: Path, tmp_path: Path):
    corpus = _open(text_file)
    saved = json.loads(json.dumps(corpus.identity()))
    require_same(saved, corpus)
    moved = tmp_path / "moved.txt"
    moved.write_bytes(text_file.read_bytes())
    require_same(saved, _open(moved))  # where it lies does not matter
    for other, what in (
        (_open(text_file, seed=1), "seed was 0, is 1"),
        (_open(text_file, seq_len=8), "seq_len was 16, is 8"),
        (_open(text_file, packing="documents"), 'packing was "concat", is "documents"'),
        (_open(SYNTHETIC), "packing was"),
    ):
        with pytest.raises(
            InputError, match=f"differs from the data at the start of the run: .*{what}"
        ):
            require_same(saved, other)
    moved.write_text(TEXT.replace("dusk", "dawn"))
    with pytest.raises(InputError, match=r"files was .* \(sha256 .*\), is "):
        require_same(saved, _open(moved))


def test_skipped_rows_are_the_same_again(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two three"}\n{\n{"text": "four five six"}\n')
    corpus = _open(path, skip_bad_rows=True, seq_len=4)
    assert corpus.skipped_rows == 1
    assert corpus.notes == ("1 bad rows of the data were skipped",)
    again = _open(path, skip_bad_rows=True, seq_len=4)  # from the cache
    assert again.skipped_rows == 1
    assert again.summary() == corpus.summary()
    assert corpus.summary()["skipped_rows"] == 1
    assert _same(corpus.batch(1, 4), again.batch(1, 4))


def test_an_objective_makes_its_own_rows(text_file: Path):
    """Where each row is masked depends on its place alone; what counts is counted."""

    def masked(row: TokenSequence, random: np.random.Generator) -> TokenSequence:
        hidden = random.random(len(row.inputs)) < 0.3
        return TokenSequence(np.where(hidden, 0, row.inputs), np.where(hidden, row.inputs, IGNORED))

    corpus = _open(text_file)
    corpus.objective = masked
    whole = corpus.batch(3, 8)
    assert whole.tokens == int((whole.labels != IGNORED).sum()) < 80
    assert _same(corpus.batch(3, 8, range(4, 8)), whole.rows(4, 8))


def test_synthetic_language_can_be_learnt():
    corpus = _open(SYNTHETIC, vocab_size=64, seq_len=512)
    batch = corpus.batch(0, 32)
    inputs, labels = batch.inputs.numpy(), batch.labels.numpy()
    assert inputs.min() >= 0
    assert inputs.max() < 64
    pairs = np.zeros((64, 64))
    np.add.at(pairs, (inputs, labels), 1)
    chance = pairs / pairs.sum(1, keepdims=True).clip(1)
    entropy = -(pairs / pairs.sum() * np.log(chance, where=chance > 0, out=0 * chance)).sum()
    assert 0.8 < entropy < 1.07
    assert _open(SYNTHETIC, vocab_size=2).batch(0, 2).inputs.max() < 2


def test_the_example_corpus_is_what_its_script_writes():
    examples = Path(__file__).parents[3] / "examples"
    script = runpy.run_path(str(examples / "make_corpus.py"))
    assert script["chronicle"]() == (examples / "corpus.txt").read_text(encoding="utf-8")
    corpus = _open(examples / "corpus.txt", seq_len=128)
    assert 200_000 < corpus.count * 128 < 400_000
