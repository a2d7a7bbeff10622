"""The command ``tokenize``: writes a token file that runs map into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from executor.data.build import TokenizationOptions, build
from executor.data.sources import TOKEN_SUFFIXES, files_of
from executor.data.token_file import Header
from executor.data.vocabulary import open_vocabulary
from hardware_profiles.errors import InputError


def tokenize(
    sources: Sequence[str],
    output: Path,
    *,
    tokenizer: str | None = None,
    text_field: str = "text",
    skip_bad_rows: bool = False,
    vocab_size: int | None = None,
    force: bool = False,
) -> Header:
    """Write the documents of all sources to one token file; return its header."""
    if output.suffix != ".bin":
        raise InputError(f"{output}: must end in .bin, the suffix of token files")
    if output.exists() and not force:
        raise InputError(f"{output}: exists already (--force replaces it)")
    if not output.parent.is_dir():
        raise InputError(f"{output}: no such folder: {output.parent}")
    files = [file for source in sources for file in files_of(source)]
    for file in files:
        if file.suffix in TOKEN_SUFFIXES:
            raise InputError(f"{file}: is already tokenized (text, JSONL or Parquet expected)")
    vocabulary = open_vocabulary(tokenizer)
    allowed = vocabulary.size if vocab_size is None else vocab_size
    tokenization = TokenizationOptions(vocabulary, allowed, text_field, skip_bad_rows)
    return build(files, tokenization, output, force=force)
