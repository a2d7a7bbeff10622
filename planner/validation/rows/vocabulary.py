"""Vocabulary of RUNS.csv: phrases in the text of a cell become terms (vocabulary.toml).

A cell is normalised (case, punctuation, plurals, "8-bit"), and its phrases are read from left to
right, the longest first, so that "NeMo AutoModel" is no "NeMo". A phrase after "no", "not" or
"without", or before "=0", "=false", "off", is a term that starts with "not ". Words outside every
phrase are not understood.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct

from hardware_profiles.fields import convert, names_in, read_toml
from planner.validation.rows.runs_file import Row

TABLE: Final = Path(__file__).parent / "vocabulary.toml"
# columns with settings, all of which ``anywhere`` stands for
READ_COLUMNS: Final = names_in("framework notes recompute optimizer peft precision offload")
# of quantised bases
BITS: Final = frozenset({"nf4", "int2", "int4", "int8", "double quantisation"})
FOUR_BITS: Final = ("nf4", "int4")  # of methods by default, where a row does not say two
OF_BASE: Final = BITS | {"qlora", "gptq", "hqq", "kept in 16 bits"}
ANYWHERE: Final = "anywhere"  # the section of phrases that every column may contain
NEGATIONS: Final = frozenset(
    {"no", "not", "without", "non", "never", "nor", "neither", "disable", "disabled"}
)
USED: Final = frozenset({"use", "using", "any", "the", "a", "with"})  # after a negation
OFF: Final = frozenset({"off", "false", "disabled", "unused"})
NOTHING: Final = frozenset({"none", "null"})
ON: Final = frozenset({"on", "true", "enabled"})
LAST: Final = MappingProxyType({"no": True, "disable": True, "yes": False, "enable": False})
LINKING: Final = frozenset({"is", "are", "was", "were", "turned", "switched", "left"})
DONE: Final = frozenset(
    {"used", "enabled", "needed", "available", "supported"}
)  # after "not", and after what is not
NOT_PLURAL: Final = frozenset({"transformers", "ops", "bias", "axis"})
GAP, STAGE = r"[\s_=:\"'-]*", r"(?=[0-3](?![a-z0-9]))"
REPLACED: Final = (
    (r"\bw/o(?:ut)?\b", "without"),
    (r"\bw/(?![a-z]/)", "with "),
    # "FSDP/HSDP not used", "no FSDP/HSDP": of both
    # "tried FSDP but report DDP", "moved from DDP to FSDP"
    (
        r"(?<![\w/])([\w-]+)/([\w-]+)((?: is| are| was| were)? not (?:used|enabled|needed)\b)",
        r"\1\3, \2\3",
    ),
    (r"\b(no|without|neither) ([\w-]+)(?:/| n?or )([\w-]+)(?![\w/])", r"\1 \2, \1 \3"),
    (r"\b(?:tried|tested|attempted)\b[^,;.]*?\bbut\b", ""),
    (r"\b(?:switched|moved|changed|migrated) from\b[^,;.]*?\bto\b", ""),
    (r"(?:\bturn(?:ing)?|(?:^|[,;(]\s*|\b(?:we|i|have|had) )turned) off (?=[a-z])", "no "),
    # accelerate's configuration (src/accelerate/utils/dataclasses.py, fsdp_version; torch's enum)
    (r"\bfsdp_version[\"']?\s*[=:]\s*(?=[12]\b)", "fsdp"),
    *(
        (rf"\b(?:fsdp_)?sharding_strategy[\"']?\s*[=:]\s*[\"']?{number}\b", word)
        for number, word in enumerate(
            ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"), 1
        )
    ),
    (r"""["']stage["']\s*:\s*(?=[0-3]\b)""", "zero "),  # JSON of DeepSpeed
    (r"c\+\+", "cpp"),
    (r"^\s*with\s*$", "yes"),  # a column "AC": with, without
    # "--fp16 True", "bf16: true" switch it on; "bf16-true" is Lightning's name of 16-bit weights
    (r"(?:--((?:bf|fp)16)\s+|\b((?:bf|fp)16)\s*[=:]\s*)true\b", r"\1\2 enabled"),
    # "zero3_offload", "zero_optimization: {stage: 3}", "Z3", "DeepSpeed stage 3", "stage 3 offload"
    (
        rf"(?<![a-z0-9])(?:zero{GAP}(?:optimization{GAP}[.{{]?{GAP})?(?:stage{GAP})?|z){STAGE}",
        "zero ",
    ),
    (rf"\b(ds|deepspeed){GAP}(?:config{GAP})?stage{GAP}{STAGE}", r"\1 zero "),
    (rf"(?<![a-z0-9])stage{GAP}(?=[0-3][\s+,_-]*(?:with )?offload)", "zero "),
    (r"\b((?:q|ga|do)?lora|galore)(?=\d|adam)", r"\1 "),  # "LoRA8", "galore128", "GaLoreAdamW"
    (r"\b(?:float8|fp8)_?(?=linear)", "fp8 "),  # "Float8Linear", enable_float8_linear
    (r"\bsel[.]?(?=[\s,;)]|$)", "selective"),
    (r"(\d+)[\s_-]*bits?\b", r"\1bit"),
    (r"\bmp_(?=(?:bf|fp)16)", ""),  # mp_bf16_autocast
    # "compile; AC", "w/ AC", but not "on AC power", "AC, on wall power" or "selective AC"
    (
        r"(^(?=ac\s*[,;+|])|[,;+|(]\s*|\b(?:with(?:out)?|no)\s+)ac(?=\s*(?:[,;+|)]|$))"
        r"(?!.*\b(?:power|battery)\b)",
        r"\1activation checkpointing",
    ),
    (r"(offload\w*)\s*[,;+]\s*(?=activations? (?:checkpoint|recomput))", r"\1 and "),
    (r"\b(bf|fp)[_-](?=(?:4|8|16|32)(?:_|\b))", r"\1"),  # BF_16
    (r"\bfloat[\s_-]?(?=(?:16|32|64)\b)", "fp"),
    (r"^\s*(half|single|double)(?=\s*(?:[,;(/]|$))", r"\1 precision"),
    (r"\b2nd\b", "second"),
    (r"\bevery (?:[3-9]|\d\d|third|fourth|sixth|eighth)(?:rd|th)?\b", "every nth"),
    (r"\b(?:[a-z0-9]+block|[a-z0-9]*decoderlayer)\b", "block"),  # GPT2Block
    (r"\bddp_size[ =:]*1\b", ""),  # of one replica
    (r"\bddp_size(?=[ =:]*\d)", "ddp"),
    (r"\bddp_(?=[a-z])", ""),  # ddp_bucket_cap_mb: a setting, which says nothing of the stage
    (r"\b(optim|quant|parallel|normal|initial|util)is(?=e|ing|ation)", r"\1iz"),  # British
    # containers of NVIDIA and their year: "PyTorch 22.08", "NGC PyTorch 23.10-py3"
    (
        r"(\b(?:ngc\b\D{0,20}|container\b\D{0,3}|pytorch[\s:(]{1,2}))"
        r"(1[7-9]|2\d)[.](?:0[1-9]|1[0-2])\b",
        r"\1ngc 20\2",
    ),
    (r"(?<=[a-z0-9])[.](?!x\b)(?=[a-z])", " "),  # torch.compile; a release keeps its dots
)
SPELLINGS: Final = MappingProxyType(
    {
        **{name[:3]: name for name in ("january", "february", "march", "april", "june", "july")},
        **{name[:3]: name for name in ("august", "september", "october", "november", "december")},
        "sept": "september",
        "parameter": "param",
        "comm": "communication",
        "grad": "gradient",
        "attn": "attention",
        "ckpt": "checkpoint",
        "float8": "fp8",
        "bfloat16": "bf16",
        "recomputation": "recompute",
        "offloading": "offload",
        "offloaded": "offload",
    }
)
TOKEN: Final = re.compile(
    r"(?P<part>[,;|]\s*)?(?P<bracket>\(\s*)?(?P<equals>[=:]\s*)?"
    r"(?P<word>[a-z0-9][a-z0-9.?]*)"
)


class Token(NamedTuple):
    """A normalised word, whether it follows an equals sign or a colon, and its own spelling.

    ``parted``: a comma, a semicolon or a bar stands before it, into which no phrase runs.
    ``bracketed``: a bracket does.
    """

    word: str
    is_value: bool
    text: str
    parted: bool = False
    bracketed: bool = False


def tokens_of(text: str) -> tuple[Token, ...]:
    """Return the normalised words of a text.

    >>> [token.word for token in tokens_of("8-bit Optimisers, w/o torch.compile")]
    ['8bit', 'optimizer', 'without', 'torch', 'compile']
    """
    text = text.lower()
    for pattern, english in () if text.isascii() else _document().chinese.items():
        text = re.sub(pattern, f" {english} ", text)
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    return tuple(
        Token(
            _normalised(found["word"].rstrip(".")),
            found["equals"] is not None,
            found["word"].rstrip("."),
            found["part"] is not None,
            found["bracket"] is not None,
        )
        for found in TOKEN.finditer(text)
    )


def _normalised(word: str) -> str:
    """Return the singular of a word, in one spelling: "grad" is "gradient"."""
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    word = word[:-1] if plural and word not in NOT_PLURAL else word
    return SPELLINGS.get(word, word)


@dataclass(frozen=True, slots=True)
class CellTerms:
    """Terms of a cell, each with the position of its first phrase, and the words in no phrase."""

    terms: Mapping[str, int]
    rest: tuple[Token, ...]


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    """The file: phrases by column and term; words without any effect on a price; translations."""

    phrases: dict[str, dict[str, tuple[str, ...]]]
    without_effect: tuple[str, ...]
    chinese: dict[str, str]  # regular expressions, and their English
    releases: dict[str, tuple[tuple[str, str], ...]]  # of a term: software, and its first release
    older: dict[str, tuple[tuple[str, str], ...]]  # the first release that no longer has it


class CellVocabulary:
    """Phrases of every column."""

    def __init__(self, document: Document) -> None:
        self._phrases = {
            column: _by_words(document.phrases, column)
            for column in {*document.phrases, *READ_COLUMNS}
        }
        self._parted = {  # phrases with a comma, into which no other one runs
            tuple(token.word for token in tokens)
            for terms in document.phrases.values()
            for phrases in terms.values()
            for tokens in map(tokens_of, phrases)
            if any(token.parted for token in tokens)
        }
        self._longest = max(len(words) for one in self._phrases.values() for words in one)
        self._without_effect = frozenset(
            token.word for text in document.without_effect for token in tokens_of(text)
        )
        self._releases = [
            (term, tuple(token.word for token in tokens_of(name)), _release(number), has)
            for releases, has in ((document.releases, True), (document.older, False))
            for term, every in releases.items()
            for name, number in every
        ]
        self._terms = {
            column: _with_negations(phrases) | {term for term, *_ in self._releases}
            for column, phrases in self._phrases.items()
        }
        self._read = cache(self._read_text)
        self.of_framework = cache(self._of_framework)

    def terms(self, column: str) -> frozenset[str]:
        """Return the terms that a column may contain; none of a column without a vocabulary."""
        return self._terms.get(column, frozenset())

    def phrases(self, column: str) -> Mapping[tuple[str, ...], frozenset[str]]:
        """Return the terms of every phrase (normalised words) of a column."""
        return self._phrases.get(column, {})

    def read(self, column: str, text: str) -> CellTerms:
        """Return the terms in a cell."""
        return self._read(column, text)

    def _of_framework(self, text: str, notes: str) -> Mapping[str, int]:
        """Return the terms of a framework, with those of releases that notes alone state."""
        tokens, own = tokens_of(text), self.read("framework", text).terms
        stated = {name for _, name, _ in self._by_release(tokens)}
        noted = {
            term: len(tokens) + at
            for term, name, at in self._by_release(tokens_of(notes))
            if name not in stated
        }
        return MappingProxyType({**noted, **own}) if noted else own

    def _read_text(self, column: str, text: str) -> CellTerms:
        tokens = tokens_of(text)
        terms: dict[str, int] = {}
        rest: list[Token] = []
        at = 0
        while at < len(tokens):
            start, end, names = self._phrase_at(column, tokens, at)
            if not names:
                rest.append(tokens[at])
                at += 1
                continue
            (off, last), negated = _switch(tokens, end), start > at
            if negated and off and tokens[last - 1].is_value:  # "disable_compile: false"
                off = negated = False
            end = last
            for name in names:
                term, opposite = (name, f"not {name}")[:: -1 if off or negated else 1]
                if opposite not in terms:  # the first mention counts
                    terms.setdefault(term, at)
            at = end
        terms |= {term: at for term, _, at in self._by_release(tokens) if term not in terms}
        return CellTerms(
            MappingProxyType(terms), tuple(token for token in rest if not self._is_filler(token))
        )

    def _phrase_at(
        self, column: str, tokens: Sequence[Token], at: int
    ) -> tuple[int, int, frozenset[str]]:
        """Return start, end and terms of the longest phrase, which a negation may precede."""
        starts = [at]
        if tokens[at].word in NEGATIONS:  # "do not use FSDP"
            skipped = itertools.takewhile(lambda token: token.word in USED, tokens[at + 1 :])
            starts += [at + 1 + number for number in range(1 + len(list(skipped)))]
        for size in range(min(len(tokens) - at, self._longest), 0, -1):
            for start in starts:
                words = tuple(token.word for token in tokens[start : start + size])
                parted = any(token.parted for token in tokens[start + 1 : start + size])
                if parted and words not in self._parted:
                    continue
                if len(words) == size and words in self._phrases[column]:
                    return start, start + size, self._phrases[column][words]
        return at, at, frozenset()

    def _by_release(self, tokens: Sequence[Token]) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Terms of releases that are as new, or as old, as stated, and of which software."""
        words = tuple(token.word for token in tokens)
        for term, name, limit, has in self._releases:
            size = len(name)
            for at in range(len(words) - size):
                if words[at : at + size] != name:
                    continue
                number = words[at + size].removeprefix("v")
                if number[:1].isdigit() and _is_since(number, limit) == has:
                    yield term, name, at

    def _is_filler(self, token: Token) -> bool:
        """Whether a word is a number, a release, a commit or a word without effect."""
        known = token.word in self._without_effect or token.word in NEGATIONS
        return known or any(map(str.isdigit, token.word))


def _by_words(
    sections: Mapping[str, Mapping[str, Sequence[str]]], column: str
) -> dict[tuple[str, ...], frozenset[str]]:
    found: dict[tuple[str, ...], frozenset[str]] = {}
    for name in {ANYWHERE, column}:
        for term, phrases in sections.get(name, {}).items():
            for phrase in phrases:
                words = tuple(token.word for token in tokens_of(phrase))
                found[words] = found.get(words, frozenset()) | {term}
    return found


def _with_negations(phrases: Mapping[tuple[str, ...], frozenset[str]]) -> frozenset[str]:
    terms = frozenset(term for found in phrases.values() for term in found)
    return terms | {f"not {term}" for term in terms}


def _switch(tokens: Sequence[Token], end: int) -> tuple[bool, int]:
    """Return whether a switch after a phrase is off, and the end of the switch."""
    at = end
    while at < len(tokens) and tokens[at].word in LINKING:
        at += 1
    if at + 1 < len(tokens) and tokens[at].word == "enabled" and tokens[at + 1].is_value:
        at += 1  # "bf16": {"enabled": false}
    if at == len(tokens):
        return False, end
    word, is_value, _, parted, bracketed = tokens[at]
    last = at + 1 == len(tokens) or tokens[at + 1].parted
    if word in LAST and last and not parted:  # "CPU offload no, checkpointing yes"
        return LAST[word], at + 1
    if word == "not" and at + 1 < len(tokens) and tokens[at + 1].word in DONE:
        return True, at + 2
    nothing = word in NOTHING and not bracketed
    if word in OFF or nothing or (is_value and word in ("0", "0.0", "no")):
        return True, at + 1
    if word in ON or (is_value and word in ("1", "yes")):
        return False, at + 1
    return False, end


def _is_since(number: str, limit: tuple[int, ...]) -> bool:
    """Whether a release is a first one or later; "2.x" is 2.0 or later."""
    found = _release(number)
    return found + (0,) * (len(limit) - len(found)) >= limit


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a release.

    >>> _release("0.34.2"), _release("2.9rc1")
    ((0, 34, 2), (2, 9))
    """
    numbers = (re.match(r"\d+", part) for part in text.split("."))
    return tuple(int(number[0]) for number in numbers if number)


@cache
def _document() -> Document:
    return convert(read_toml(TABLE, "the vocabulary"), Document, str(TABLE))


@cache
def vocabulary() -> CellVocabulary:
    """Return the vocabulary that comes with shardplan."""
    return CellVocabulary(_document())


def _adapter_terms(row: Row) -> Mapping[str, int]:
    """Return the terms of adapters and of the bits of their base."""
    found = _adapters_and_bits(row)
    if "int2" not in found:
        return found
    return {name: at for name, at in found.items() if name not in FOUR_BITS}


def _adapters_and_bits(row: Row) -> Mapping[str, int]:
    """Return the terms of adapters, with those of the bits of their base from other cells.

    Bits in a model's name and in notes are of LoRA; what else quantised weights serve, is not said.
    """
    text = row.words("peft")
    own = vocabulary().read("peft", text).terms
    if is_rounded(row):  # in the bits to which weights are rounded, nothing is stored
        return {name: at for name, at in own.items() if name not in OF_BASE}
    if "hqq" in own and "int2" in vocabulary().read("notes", row.words("notes")).terms:
        return {**own, "int2": len(text)}
    cells = [("precision", row.words("precision"))]
    if "lora" in own and not own.keys() & {"adapter", "qlora", *BITS}:
        cells += [("peft", row.words("model")), ("notes", row.words("notes"))]
        cells += [("framework", row.words("framework"))]
    for column, words in cells:
        found = vocabulary().read(column, words).terms
        if found.keys() & {"qlora", *BITS}:
            return {name: len(text) + found[name] for name in OF_BASE & found.keys()} | dict(own)
    return own


def is_rounded(row: Row) -> bool:
    """Whether weights are rounded to few bits as they are used: quantisation-aware training."""
    said = terms_of(row, ANYWHERE)
    return "qat" in said and "not qat" not in said


@lru_cache(maxsize=1024)  # a row is looked up in some sixty sections
def terms_of(row: Row, column: str) -> Mapping[str, int]:
    """Return the terms of a cell, or of all cells ("anywhere"), each with its first position."""
    if column == "peft":
        return _adapter_terms(row)
    if column == "framework":
        return vocabulary().of_framework(row.words(column), row.words("notes"))
    if column != ANYWHERE:
        return vocabulary().read(column, row.words(column)).terms
    found: dict[str, int] = {}
    for name in READ_COLUMNS:
        for term, at in vocabulary().read(name, row.words(name)).terms.items():
            found.setdefault(term, at)
    return found
