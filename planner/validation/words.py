"""Meaning of the words in the cells of RUNS.csv: look-ups in words.toml.

A section is a list of entries; the first entry whose conditions are met applies. A condition is a
column and words: a text cell must contain all of them (ignoring case), a number must equal one of
them. ``without`` lists words that none of these cells may contain. An entry without conditions
always applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from msgspec import Meta, Struct, field

from cost_models.plan.plan import Offload
from cost_models.plan.workload import AttentionKernel, Optimizer, Quantisation
from cost_models.uncertainty import MemoryKind
from hardware_profiles.fields import convert, read_toml
from planner.validation.runs_file import COLUMNS, TEXTS, Row

TABLE: Final = Path(__file__).parent / "words.toml"

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=1, le=10**6)]


class Conditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of an entry of a section; a subclass adds the meaning of the words."""

    when: dict[str, tuple[str, ...]] = {}  # words by column
    without: tuple[str, ...] = ()


class Name(Conditions, frozen=True, kw_only=True):
    """A name: of a node, a precision, a kind of adapter, or target matrices of adapters."""

    value: str = field(name="is")


class Flag(Conditions, frozen=True, kw_only=True):
    """Whether the trainer does what the section names."""

    value: bool = field(name="is")


class OffloadEntry(Conditions, frozen=True, kw_only=True):
    """Offloaded parts of the model state."""

    value: Offload = field(name="is")


class OptimizerEntry(Conditions, frozen=True, kw_only=True):
    """The optimizer."""

    value: Optimizer = field(name="is")


class QuantisationEntry(Conditions, frozen=True, kw_only=True):
    """The number format of quantised weights."""

    value: Quantisation = field(name="is")


class StoredPrecision(Conditions, frozen=True, kw_only=True):
    """Precision of gradients or of optimizer states."""

    value: Literal["fp32", "bf16"] = field(name="is")


class ZeroStageEntry(Conditions, frozen=True, kw_only=True):
    """ZeRO stage."""

    value: Annotated[int, Meta(ge=0, le=3)] = field(name="is")


class AdapterEntry(Name, frozen=True, kw_only=True):
    """Kind of adapter, and the first layer that has one."""

    first_layer: Annotated[int, Meta(ge=0)] = 0


class ArchitectureEntry(Conditions, frozen=True, kw_only=True):
    """Properties of models of which only sizes are given."""

    dropout: Fraction
    family: Literal["bloom"] | None = None
    untied: bool = False  # the output projection is a matrix of its own
    vocabulary: Count | None = None
    drops_in_every_family: bool = False  # dropout, even where the family has none


class AttentionEntry(Conditions, frozen=True, kw_only=True):
    """Attention kernel; ``always``: whatever the column flash_attention says."""

    value: AttentionKernel = field(name="is")
    always: bool = False


class DocumentsEntry(Conditions, frozen=True, kw_only=True):
    """Tokens of a packed document."""

    length: Count


class FlopsEntry(Conditions, frozen=True, kw_only=True):
    """FLOP that a source counts: with or without recomputation, and the share of attention."""

    counts: Literal["model", "hardware"]
    attention: Fraction | None = None


class GpuEntry(Conditions, frozen=True, kw_only=True):
    """Accelerator of the catalogue; ``before_name``: tried before the name in the cell."""

    accelerator: str
    before_name: bool = False


class InterleavedEntry(Conditions, frozen=True, kw_only=True):
    """Layers of a virtual stage."""

    layers: Count


class MemoryEntry(Conditions, frozen=True, kw_only=True):
    """Kind of measured memory, and the pipeline rank on which it was measured."""

    value: MemoryKind = field(name="is")
    rank: Literal["first", "last", "fullest"] = "fullest"


class Reason(Conditions, frozen=True, kw_only=True):
    """Why a row is not priced, or not compared."""

    why: str


class RecomputeEntry(Conditions, frozen=True, kw_only=True):
    """Recompute setting, and the share of the layers that recompute."""

    value: Literal["none", "full"] = field(name="is")
    layers: Fraction | None = None


class ShardingEntry(Conditions, frozen=True, kw_only=True):
    """The group inside which weights are sharded."""

    within: Literal["node"]


class SoftwareEntry(Conditions, frozen=True, kw_only=True):
    """Software profile and its changed figures, by group; further defaults of the trainer."""

    profile: str
    figures: dict[str, dict[str, bool | float | str]] = field(name="with", default_factory=dict)
    without_sequence_parallel: bool = False
    master_weights: bool = True
    batch: Count | None = None  # sequences


class StagesEntry(Conditions, frozen=True, kw_only=True):
    """Layers of every pipeline stage."""

    layers: tuple[Count, ...]


class Pattern(Struct, frozen=True, forbid_unknown_fields=True):
    """A regular expression with one group, a number, and the column in which it is searched."""

    column: str
    pattern: str


class LeftOut(Struct, frozen=True, forbid_unknown_fields=True):
    """Source groups that are not part of the means over groups, with the reason."""

    time: dict[str, str]
    memory: dict[str, str]


class WordsTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; a field is a section."""

    adapter: tuple[AdapterEntry, ...]
    adapter_rank: tuple[Pattern, ...]
    architecture: tuple[ArchitectureEntry, ...]
    attention: tuple[AttentionEntry, ...]
    batch: tuple[Pattern, ...]
    documents: tuple[DocumentsEntry, ...]
    expert_tensor: tuple[Pattern, ...]
    expert_tensor_parallel: tuple[Flag, ...]
    flops: tuple[FlopsEntry, ...]
    gpu: tuple[GpuEntry, ...]
    gradients: tuple[StoredPrecision, ...]
    interleaved: tuple[InterleavedEntry, ...]
    left_out: LeftOut
    master_weights: tuple[Flag, ...]
    memory: tuple[MemoryEntry, ...]
    node: tuple[Name, ...]
    offload: tuple[OffloadEntry, ...]
    optimizer: tuple[OptimizerEntry, ...]
    partial: tuple[Reason, ...]
    precision: tuple[Name, ...]
    presets: dict[str, str]
    quantisation: tuple[QuantisationEntry, ...]
    recompute: tuple[RecomputeEntry, ...]
    recompute_layers: tuple[Pattern, ...]
    shard_ranks: tuple[Pattern, ...]
    sharding: tuple[ShardingEntry, ...]
    software: tuple[SoftwareEntry, ...]
    stages: tuple[StagesEntry, ...]
    states: tuple[StoredPrecision, ...]
    targets: tuple[Name, ...]
    unpriced: tuple[Reason, ...]
    zero_stage: tuple[ZeroStageEntry, ...]


Entry = TypeVar("Entry", bound=Conditions)


def words_table() -> WordsTable:
    """Return the whole table."""
    return _REPLACED.get() or _own_table()


@cache
def _own_table() -> WordsTable:
    return words_table_from(TABLE)


_REPLACED: Final[ContextVar[WordsTable | None]] = ContextVar("words table", default=None)


@contextmanager
def reading_with(table: WordsTable) -> Iterator[None]:
    """Read the rows of tables of runs with other entries."""
    token = _REPLACED.set(table)
    try:
        yield
    finally:
        _REPLACED.reset(token)


def words_table_from(path: Path) -> WordsTable:
    """Read and check a table."""
    values = read_toml(path, "the table of words")
    patterns = {name for name, kind in WordsTable.__annotations__.items() if "Pattern" in kind}
    sections = {
        name: [_with_conditions(entry) for entry in section]
        if isinstance(section, list) and name not in patterns
        else section
        for name, section in values.items()
    }
    return convert(sections, WordsTable, str(path))


def _with_conditions(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its columns under ``when``."""
    conditions = {key: value for key, value in entry.items() if key in COLUMNS}
    rest = {key: value for key, value in entry.items() if key not in COLUMNS}
    return {"when": conditions, **rest}


def look_up(section: Sequence[Entry], row: Row) -> Entry | None:
    """Return the first entry of a section that applies to a row; None if none does."""
    return next((entry for entry in section if _applies(entry, row)), None)


def entry_of(section: Sequence[Entry], row: Row) -> Entry:
    """Return the first entry that applies, of a section whose last entry applies to every row."""
    found = look_up(section, row)
    assert found is not None
    return found


def _applies(entry: Conditions, row: Row) -> bool:
    if entry.without:
        cells = [row.words(column) for column in entry.when]
        if any(word in cell for word in entry.without for cell in cells):
            return False
    return all(_matches(column, words, row) for column, words in entry.when.items())


def _matches(column: str, words: Sequence[str], row: Row) -> bool:
    """Whether a text contains all words ("": is empty), or a number equals one of them."""
    if column == "gpu":  # an A1000 is no A100
        text = row.words(column)
        return all(re.search(re.escape(word) + _whole_number(word), text) for word in words)
    if column in TEXTS:
        cell = row.words(column)
        return all(word in cell if word else not cell for word in words)
    value = row.get(column)
    return value is not None and f"{value:g}" in words


def _whole_number(word: str) -> str:
    """Pattern after a word: a final number must end there (after letters digits may follow)."""
    return r"(?!\d)" if word[-1:].isdigit() else ""


def number_in(section: Sequence[Pattern], row: Row) -> int | None:
    """Return the number that a pattern of a section finds in its column; None without one."""
    for entry in section:
        found = re.search(entry.pattern, row.words(entry.column))
        if found:
            return int(found[1])
    return None
