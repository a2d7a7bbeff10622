"""Batches are reproducible; what cannot be read is one clear error."""

import os
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.data import SYNTHETIC, open_corpus
from hardware_profiles.errors import InputError

TEXT = "The keeper lit the lamp at dusk. Für alle Fälle.\n" * 40


def _open(source, *, vocab_size=256, seq_len=16, seed=0, tokenizer=None):
    return open_corpus(
        str(source), vocab_size=vocab_size, seq_len=seq_len, seed=seed, tokenizer=tokenizer
    )


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_bytes_are_tokens_and_labels_are_the_next_ones(text_file):
    batch = _open(text_file).batch(step=3, global_batch_size=5)
    inputs, labels = batch.inputs, batch.labels
    assert inputs.shape == labels.shape == (5, 16)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert bytes(inputs[0].tolist()) in TEXT.encode()


@pytest.mark.parametrize("kind", ["text", SYNTHETIC])
def test_a_batch_depends_on_seed_and_step_alone(kind, text_file):
    source = text_file if kind == "text" else SYNTHETIC
    first = _open(source, seed=7).batch(2, 8)
    other = _open(source, seed=7)
    other.batch(0, 4)  # what was drawn before does not matter
    again = other.batch(2, 8)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.inputs, other.batch(3, 8).inputs)
    assert not torch.equal(first.inputs, _open(source, seed=8).batch(2, 8).inputs)


def test_every_window_of_the_shortest_text_can_be_drawn(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(range(10)))
    batch = _open(path, seq_len=8).batch(0, 50)
    assert set(batch.inputs[:, 0].tolist()) == {0, 1}
    assert batch.labels.max() == 9


def test_a_folder_is_joined_in_order_of_names(tmp_path):
    (tmp_path / "b.txt").write_text("bbbb")
    (tmp_path / "a.txt").write_text("aaaa")
    (tmp_path / "c.md").write_text("cccc")
    corpus = _open(tmp_path, seq_len=8)
    assert bytes(corpus.batch(0, 1).inputs[0].tolist()) == b"aaaa\nbbb"


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


def _tokenizer(folder, words):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["?", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return str(folder)


def test_a_local_tokenizer_is_used_and_its_tokens_must_be_in_the_vocabulary(text_file, tmp_path):
    folder = _tokenizer(tmp_path / "tokenizer", sorted(set(TEXT.replace(".", " .").split())))
    corpus = _open(text_file, vocab_size=16, tokenizer=folder)
    assert corpus.batch(0, 4).inputs.max() < 16
    with pytest.raises(
        InputError, match=r"gives the token \d+ \(the model's vocab_size = 4 allows"
    ):
        _open(text_file, vocab_size=4, tokenizer=folder)


def test_code_beside_a_tokenizer_is_not_run(text_file, tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(InputError, match="no tokenizer that can be loaded"):
        _open(text_file, tokenizer=str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"text\.txt: no such file"),
        (b"", r"text\.txt: is empty"),
        (b"\xff\xfe\x00 not text", r"text\.txt: not UTF-8 text"),
        (b"halb" + b"\xc3", r"text\.txt: not UTF-8 text"),
        (b"sixteen letters.", r"text\.txt: 16 tokens \(seq_len = 16 needs at least 17\)"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        _open(path)


def test_other_bad_input(tmp_path, text_file):
    (tmp_path / "sub").mkdir()
    with pytest.raises(InputError, match=r"no \.txt file in this folder"):
        _open(tmp_path / "sub")
    with pytest.raises(InputError, match=r"vocab_size = 255 \(byte tokens need at least 256"):
        _open(text_file, vocab_size=255)
    with pytest.raises(InputError, match="no such folder"):
        _open(text_file, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="synthetic data has no text"):
        _open(SYNTHETIC, tokenizer=str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(text_file):
    text_file.chmod(0)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        _open(text_file)


def test_the_example_corpus_is_what_its_script_writes():
    examples = Path(__file__).parents[2] / "examples"
    script = runpy.run_path(str(examples / "make_corpus.py"))
    assert script["chronicle"]() == (examples / "corpus.txt").read_text(encoding="utf-8")
    corpus = _open(examples / "corpus.txt", seq_len=128)
    assert 200_000 < len(corpus.tokens) < 400_000
