"""Vocabularies: bytes, or the tokens of a local tokenizer."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.errors import InputError

BYTE_VALUES: Final = 256
BYTE_END: Final = 0  # does not occur in text

Tokens = NDArray[Any]


class Vocabulary(ABC):
    """Maps text to token numbers."""

    name: str
    size: int  # tokens are 0 to size - 1
    end: int | None  # the token after every document
    mask: int | None = None  # the mask token
    sentinels: tuple[int, ...] = ()  # of removed spans, <extra_id_0> first
    fingerprint: str

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without an end token."""


class ByteVocabulary(Vocabulary):
    """Each byte of the UTF-8 text is a token; byte 0 ends a document."""

    name, size, end, fingerprint = "bytes", BYTE_VALUES, BYTE_END, "bytes"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class TokenizerVocabulary(Vocabulary):
    """A fast tokenizer of transformers from a local folder.

    Custom code in the folder is not executed.
    """

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise InputError(f"{folder}: no such folder (a local tokenizer is expected)")
        self.name = folder
        self._tokenizer = _load(folder)
        if not self._tokenizer.is_fast:
            raise InputError(f"{folder}: not a fast tokenizer (a folder with a tokenizer.json)")
        self.size = len(self._tokenizer)
        self.end = self._tokenizer.eos_token_id
        self.mask = self._tokenizer.mask_token_id
        self.sentinels = _sentinels(self._tokenizer.get_vocab())
        text = f"{self.end} {self._tokenizer.backend_tokenizer.to_str()}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without special tokens around it."""
        found = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return [np.array(ids, dtype=np.int64) for ids in found]


def open_vocabulary(tokenizer: str | None) -> Vocabulary:
    """Return the vocabulary of a local tokenizer, or of bytes if it is None."""
    return ByteVocabulary() if tokenizer is None else TokenizerVocabulary(tokenizer)


def _sentinels(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Return the leading run of T5's sentinels whose numbers are consecutive and descending."""
    found: list[int] = []
    while (token := vocabulary.get(f"<extra_id_{len(found)}>")) is not None:
        if found and token != found[-1] - 1:
            break
        found.append(token)
    return tuple(found)


def _load(folder: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError(
            f"{folder}: a tokenizer needs transformers: pip install 'shardplan[run]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ...
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{folder}: the tokenizer cannot be loaded: {reason}") from None
