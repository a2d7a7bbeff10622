"""What the tests of data share."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tokens in a folder of the test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHARDPLAN_CACHE", str(folder))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """Return a function that saves a tokenizer of words and returns its folder."""

    def save(words: list[str], end: str | None = "<end>", name: str = "tokenizer") -> str:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        names = ["?", *([end] if end else []), *words]
        model = models.WordLevel({word: n for n, word in enumerate(names)}, unk_token="?")
        inner = Tokenizer(model)
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token=end)
        fast.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save
