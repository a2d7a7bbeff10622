"""Opening of training data by the names that the user gives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from executor.config.data_options import PACKINGS, SYNTHETIC, DataOptions
from executor.data.build import TokenizationOptions, cached
from executor.data.corpus import Corpus, MarkovCorpus, TokenCorpus
from executor.data.objectives import CorruptedSpans, MaskedTokens, span_sizes
from executor.data.packing import Samples
from executor.data.sources import TEXT_SUFFIXES, TOKEN_SUFFIXES, files_of
from executor.data.token_file import TokenFile, open_token_file
from executor.data.vocabulary import BYTE_VALUES, Vocabulary, open_vocabulary
from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError, did_you_mean


@names_arguments("executor.data.open_corpus")
def open_corpus(
    options: DataOptions,
    *,
    vocab_size: int,
    seq_len: int,
    seed: int,
    masked: bool = False,
    spans: bool = False,
    target_seq_len: int = 0,
) -> Corpus:
    """Open the data of a run; raises an InputError if it cannot be used.

    ``masked``: the objective is masked-token prediction (BERT). The tokenizer defines the mask
    token; without a tokenizer it is the last token of the vocabulary. ``spans``: the objective is
    span corruption (T5). The tokenizer defines the sentinels; without a tokenizer they are the last
    tokens of the vocabulary. ``target_seq_len``: tokens of its targets; 0: as many as of inputs.
    """
    sentinel = _first_sentinel(options, vocab_size, seq_len) if spans else None
    removed, number = span_sizes(seq_len)
    if target_seq_len and not removed + number < target_seq_len:
        raise InputError(
            f"target_seq_len = {target_seq_len:,}: span corruption of seq_len = {seq_len:,} tokens "
            f"has targets of {removed + number + 1:,} (must be at least these)"
        )
    corpus = _open(options, vocab_size, seq_len, seed)
    corpus.target_seq_len = target_seq_len
    if masked:
        mask = open_vocabulary(options.tokenizer).mask if options.tokenizer else None
        if options.tokenizer and mask is None:
            raise InputError(f"{options.tokenizer}: has no mask token (masked samples need one)")
        corpus.objective = MaskedTokens(vocab_size, vocab_size - 1 if mask is None else mask)
    if sentinel is not None:
        corpus.objective = CorruptedSpans(sentinel, target_seq_len)
    return corpus


def _first_sentinel(options: DataOptions, vocab_size: int, seq_len: int) -> int:
    if options.packing == "documents":
        raise InputError(
            "packing = documents: span corruption does not support it (must be concat or none)"
        )
    needed = span_sizes(seq_len)[1] + 1
    first, found, where = vocab_size - 1, vocab_size, f"vocab_size = {vocab_size}"
    if options.tokenizer:
        sentinels = open_vocabulary(options.tokenizer).sentinels
        first, found, where = (*sentinels, 0)[0], len(sentinels), options.tokenizer
    if found < needed:
        raise InputError(
            f"{where}: {found} sentinels (seq_len = {seq_len:,} needs {needed}, <extra_id_0> and "
            "so on)"
        )
    return first


def _open(options: DataOptions, vocab_size: int, seq_len: int, seed: int) -> Corpus:
    if options.packing not in PACKINGS:
        hint = did_you_mean(options.packing, PACKINGS)
        raise InputError(f"packing = {options.packing} (allowed: {', '.join(PACKINGS)}). {hint}")
    if SYNTHETIC in options.sources:
        if len(options.sources) > 1:
            raise InputError(
                f"data = {', '.join(options.sources)}: {SYNTHETIC} data cannot be combined"
            )
        if options.tokenizer is not None:
            raise InputError(
                f"tokenizer = {options.tokenizer}: synthetic data has no text to tokenize"
            )
        if options.packing != PACKINGS[0]:
            raise InputError(f"packing = {options.packing}: {SYNTHETIC} data has no documents")
        return MarkovCorpus(vocab_size, seq_len, seed)
    named = [_weighted(source) for source in options.sources]
    weights = [weight for _, weight in named if weight is not None]
    if weights and len(weights) < len(named):
        raise InputError(
            f"data = {', '.join(options.sources)}: a weight (PATH:0.7) for every source or for none"
        )
    vocabulary = open_vocabulary(options.tokenizer)
    tokenization = TokenizationOptions(
        vocabulary, vocab_size, options.text_field, options.skip_bad_rows
    )
    shape = (seq_len, options.packing, vocab_size)
    groups = [
        [Samples(file, *shape) for file in _token_files(path, tokenization)] for path, _ in named
    ]
    return TokenCorpus(
        " + ".join(options.sources), groups, seed, weights if len(weights) > 1 else None
    )


def _weighted(source: str) -> tuple[str, float | None]:
    """Split ``PATH:0.7`` into path and weight; an existing file of that full name has none."""
    path, colon, text = source.rpartition(":")
    try:
        weight = float(text)
    except ValueError:
        return source, None
    if not colon or Path(source).exists():
        return source, None
    if not 0 < weight < math.inf:
        raise InputError(f"{source}: weight {text} (must be a number above 0)")
    return path, weight


def _token_files(source: str, tokenization: TokenizationOptions) -> list[TokenFile]:
    """Return the token files of a source: existing ones, and one with all its documents."""
    files = files_of(source)
    ready = [open_token_file(file) for file in files if file.suffix in TOKEN_SUFFIXES]
    for file in ready:
        _check_vocabulary(file, tokenization.vocabulary)
    documents = [file for file in files if file.suffix not in TOKEN_SUFFIXES]
    if not documents:
        return ready
    bytes_are_tokens = tokenization.vocabulary.fingerprint == "bytes"
    has_text = any(file.suffix in TEXT_SUFFIXES for file in documents)
    if bytes_are_tokens and has_text and tokenization.vocab_size < BYTE_VALUES:
        raise InputError(
            f"vocab_size = {tokenization.vocab_size} (byte tokens need at least {BYTE_VALUES}; "
            f"specify a tokenizer, or use {SYNTHETIC} data)"
        )
    return [replace(cached(documents, tokenization), source=source), *ready]


def _check_vocabulary(file: TokenFile, vocabulary: Vocabulary) -> None:
    """Raise an InputError if the tokens come from a different tokenizer than the given one."""
    own = file.header.vocabulary_fingerprint
    if vocabulary.fingerprint == "bytes" or own in ("none", vocabulary.fingerprint):
        return
    raise InputError(
        f"{file.path}: tokens of {file.header.vocabulary} (not of the tokenizer {vocabulary.name})"
    )
