"""Settings that the terms in the cells of RUNS.csv stand for: look-ups in words.toml.

A section is a list of entries; of those whose conditions are met, the most specific one applies. A
condition is a column and terms of its vocabulary (vocabulary.toml): the cell must contain all of
them; ``anywhere`` is every cell that is read. In a column without a vocabulary the cell must
contain the words, and a number must equal one of them. An entry without conditions always applies.
"a | b" stands for two entries, one with each term, and "a?" for one with and one without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from cost_models.plan.plan import ContextMethod, Offload, Schedule
from cost_models.plan.workload import AdapterMethod, AttentionKernel, Optimizer, Quantisation
from cost_models.uncertainty import MemoryKind
from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert, read_toml
from planner.validation.rows.runs_file import COLUMNS, TEXTS, Row
from planner.validation.rows.vocabulary import ANYWHERE, terms_of, vocabulary

TABLE: Final = Path(__file__).parent / "words.toml"
OR: Final = " | "
NAMES: Final = frozenset({"presets", "kinds", "shapes"})  # sections by name

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=1, le=10**6)]


class Conditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of an entry of a section; a subclass adds what the terms stand for."""

    when: dict[str, tuple[str, ...]] = {}  # terms by column
    usual: bool = False  # counts only where no other entry applies

    @property
    def specificity(self) -> tuple[bool, int, int, int]:
        """Whether it is more than a default; conditions, terms, and those on a column's own."""
        own = sum(column != ANYWHERE for column in self.when)
        return not self.usual, len(self.when), sum(map(len, self.when.values())), own


class Name(Conditions, frozen=True, kw_only=True):
    """A name: of a node, a precision, a kind of adapter, or target matrices of adapters.

    ``note``: what it stands for, which is reported with the row.
    """

    value: str = field(name="is")
    note: str | None = None


class Flag(Conditions, frozen=True, kw_only=True):
    """Whether the trainer does what the section names."""

    value: bool = field(name="is")


class EndsEntry(Flag, frozen=True, kw_only=True):
    """Whether embedding and head are trained; ``copies``: as copies beside the frozen ones."""

    copies: bool = True


class ExpertsEntry(Flag, frozen=True, kw_only=True):
    """Whether ranks share the experts of a mixture; ``ranks``: how many, whatever a node holds."""

    ranks: Count | None = None


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


class ScheduleEntry(Conditions, frozen=True, kw_only=True):
    """Order of a pipeline's micro-batches."""

    value: Schedule = field(name="is")


class ZeroStageEntry(Conditions, frozen=True, kw_only=True):
    """ZeRO stage; ``always``: whatever the column zero_stage says."""

    value: Annotated[int, Meta(ge=0, le=3)] = field(name="is")
    always: bool = False


class AdapterEntry(Name, frozen=True, kw_only=True):
    """Kind of adapter, and the first layer that has one."""

    first_layer: Annotated[int, Meta(ge=0)] = 0


class MethodEntry(Conditions, frozen=True, kw_only=True):
    """What is trained in addition to a frozen matrix."""

    value: AdapterMethod = field(name="is")


class ArchitectureEntry(Conditions, frozen=True, kw_only=True):
    """Properties of models of which only sizes are given."""

    dropout: Fraction
    of_presets: bool = False  # that dropout is a preset's, too
    family: Literal["bloom"] | None = None
    activation: Literal["gelu", "gelu_new"] = "gelu"  # of GPT-2
    untied: bool = False  # the output projection is a matrix of its own
    narrows_gated: bool = False  # a gated MLP has two thirds of the width of its configuration


class AttentionEntry(Conditions, frozen=True, kw_only=True):
    """Attention kernel."""

    value: AttentionKernel = field(name="is")


class ContextEntry(Conditions, frozen=True, kw_only=True):
    """How context-parallel ranks share a sequence."""

    value: ContextMethod = field(name="is")


class FlopsEntry(Conditions, frozen=True, kw_only=True):
    """FLOP that a source counts: with or without recomputation, and the share of attention."""

    counts: Literal["model", "hardware"]
    attention: Fraction | None = None


class GpuEntry(Conditions, frozen=True, kw_only=True):
    """Accelerator of the catalogue; ``before_name``: tried before the name in the cell.

    ``smaller``: the one with less memory that the words leave open.
    """

    accelerator: str
    smaller: str = ""
    before_name: bool = False


class MemoryEntry(Conditions, frozen=True, kw_only=True):
    """Kind of measured memory, and the stage on which it was measured; stages: their sum.

    ``of_update``: the largest since the backward pass, not of the step.
    """

    value: MemoryKind = field(name="is")
    rank: Literal["first", "last", "fullest", "stages"] = "fullest"
    of_update: bool = False


class RecomputeEntry(Conditions, frozen=True, kw_only=True):
    """Recompute setting, the share of the layers that recompute, and what large models have.

    ``full_from``: parameters of the smallest model of which every layer recomputes.
    """

    value: str = field(name="is")
    layers: Fraction | None = None
    full_from: float | None = None


class EngineEntry(Conditions, frozen=True, kw_only=True):
    """An engine that a trainer's profile is composed with."""

    add: str


class ShardingEntry(Conditions, frozen=True, kw_only=True):
    """The group inside which weights are sharded."""

    within: Literal["node"]


class CountEntry(Conditions, frozen=True, kw_only=True):
    """A number: of an adapter's rank, of layers, or of tokens."""

    value: Count = field(name="is")


class TrainedLayers(CountEntry, frozen=True, kw_only=True):
    """Layers that alone are trained: copies or own ones; with embedding and head or without."""

    copies: bool = False
    ends: bool = False


class SuiteTrainer(Name, frozen=True, kw_only=True):
    """The trainer of a suite's case, and what its cell of adapters says besides their kind."""

    adapters: str


class SamplesEntry(Conditions, frozen=True, kw_only=True):
    """Samples that fill a sequence."""

    value: Annotated[float, Meta(ge=1.0, le=1e3)] = field(name="is")


class SoftwareEntry(Conditions, frozen=True, kw_only=True):
    """Software profile and its changed figures, by group; further defaults of the trainer."""

    profile: str
    figures: dict[str, dict[str, bool | float | str]] = field(name="with", default_factory=dict)
    without_sequence_parallel: bool = False
    takes_engines: bool = False  # ``[[engines]]`` count
    master_weights: bool = True


class Pattern(Struct, frozen=True, forbid_unknown_fields=True):
    """A regular expression with one group, a number, and the column in which it is searched."""

    column: str
    pattern: str


class WordsTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; a field is a section."""

    accumulation: tuple[EngineEntry, ...]
    adapter: tuple[AdapterEntry, ...]
    adapter_method: tuple[MethodEntry, ...]
    adapter_rank: tuple[Pattern, ...]
    usual_ranks: tuple[CountEntry, ...]
    optimizer_rank: tuple[Pattern, ...]
    usual_optimizer_ranks: tuple[CountEntry, ...]
    architecture: tuple[ArchitectureEntry, ...]
    attention: tuple[AttentionEntry, ...]
    capped_attention: tuple[AttentionEntry, ...]
    attention_bits: tuple[EngineEntry, ...]
    activation_inputs: tuple[EngineEntry, ...]
    autocast: tuple[EngineEntry, ...]
    context_parallelism: tuple[ContextEntry, ...]
    balance: tuple[EngineEntry, ...]
    dispatch: tuple[EngineEntry, ...]
    engines: tuple[EngineEntry, ...]
    expert_parallelism: tuple[ExpertsEntry, ...]
    experts: tuple[EngineEntry, ...]
    flash: tuple[EngineEntry, ...]
    flops: tuple[FlopsEntry, ...]
    gathers: tuple[EngineEntry, ...]
    messages: tuple[EngineEntry, ...]
    split_loss: tuple[EngineEntry, ...]
    projections: tuple[EngineEntry, ...]
    host_updates: tuple[EngineEntry, ...]
    widened_states: tuple[EngineEntry, ...]
    early_updates: tuple[EngineEntry, ...]
    batches: tuple[EngineEntry, ...]
    checkpoints: tuple[EngineEntry, ...]
    caches: tuple[EngineEntry, ...]
    clipping: tuple[EngineEntry, ...]
    host_masters: tuple[EngineEntry, ...]
    host_memory: tuple[EngineEntry, ...]
    gpu: tuple[GpuEntry, ...]
    gradients: tuple[StoredPrecision, ...]
    launches: tuple[EngineEntry, ...]
    linear_loss: tuple[EngineEntry, ...]
    master_weights: tuple[Flag, ...]
    megatron_casts: tuple[EngineEntry, ...]
    megatron_layers: tuple[EngineEntry, ...]
    memory: tuple[MemoryEntry, ...]
    host_offload: tuple[OffloadEntry, ...]
    offload: tuple[OffloadEntry, ...]
    older_attention: tuple[AttentionEntry, ...]
    older_grouped_attention: tuple[AttentionEntry, ...]
    normed_outputs: tuple[Flag, ...]
    rotary: tuple[Flag, ...]
    norms: tuple[EngineEntry, ...]
    optimizer: tuple[OptimizerEntry, ...]
    precision: tuple[Name, ...]
    suite_precision: tuple[Name, ...]
    tf32: tuple[Flag, ...]
    usual_precision: tuple[Name, ...]
    presets: dict[str, str]
    kinds: dict[str, str]  # kinds of models by the letters of a word for them
    shapes: dict[str, dict[str, bool | int | float | str]]  # columns by the letters of a name
    quantisation: tuple[QuantisationEntry, ...]
    recipes: tuple[EngineEntry, ...]
    rounding: tuple[EngineEntry, ...]
    recompute: tuple[RecomputeEntry, ...]
    reductions: tuple[EngineEntry, ...]
    reduction_precision: tuple[EngineEntry, ...]
    schedules: tuple[ScheduleEntry, ...]
    sequence_parallelism: tuple[Flag, ...]
    sharding: tuple[ShardingEntry, ...]
    sites: tuple[Name, ...]
    software: tuple[SoftwareEntry, ...]
    stages: tuple[EngineEntry, ...]
    states: tuple[StoredPrecision, ...]
    samples_a_sequence: tuple[SamplesEntry, ...]
    usual_length: tuple[CountEntry, ...]
    usual_stages: tuple[CountEntry, ...]
    suite_models: tuple[Name, ...]
    suite_trainers: tuple[SuiteTrainer, ...]
    targets: tuple[Name, ...]
    trained_ends: tuple[EndsEntry, ...]
    trained_layers: tuple[TrainedLayers, ...]
    trained_layers_count: tuple[Pattern, ...]
    tensor_traffic: tuple[EngineEntry, ...]
    unnamed: tuple[SoftwareEntry, ...]
    updates: tuple[EngineEntry, ...]
    weight_gathers: tuple[EngineEntry, ...]
    weighting: tuple[EngineEntry, ...]
    dense_layers: tuple[CountEntry, ...]
    whole_logits: tuple[EngineEntry, ...]
    written_out: tuple[EngineEntry, ...]
    zero_stage: tuple[ZeroStageEntry, ...]
    zeroed: tuple[EngineEntry, ...]
    frozen: tuple[EngineEntry, ...]


Entry = TypeVar("Entry", bound=Conditions)


def words_table() -> WordsTable:
    """Return the whole table."""
    return _REPLACED.get() or _own_table()


@cache
def _own_table() -> WordsTable:
    return words_table_from(TABLE)


_REPLACED: Final[ContextVar[WordsTable | None]] = ContextVar("words table", default=None)


@contextmanager
def without_trainers() -> Iterator[None]:
    """Read rows as if no software profile described a trainer (``[[unnamed]]`` alone)."""
    token = _REPLACED.set(replace(_own_table(), software=()))
    try:
        yield
    finally:
        _REPLACED.reset(token)


def words_table_from(path: Path) -> WordsTable:
    """Read and check a table."""
    values = read_toml(path, "the table of words")
    patterns = {name for name, kind in WordsTable.__annotations__.items() if "Pattern" in kind}
    sections: dict[str, Any] = {
        name: [one for entry in section for one in _written_out(entry)]
        if isinstance(section, list) and name not in patterns
        else section
        for name, section in values.items()
    }
    for name in NAMES & sections.keys():
        sections[name] = {
            one: value for names, value in sections[name].items() for one in names.split(OR)
        }
    table = convert(sections, WordsTable, str(path))
    for name in sections.keys() - patterns - NAMES:
        _check(getattr(table, name), f"{path}: [[{name}]]")
    return table


def _written_out(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries that one stands for, their conditions (lists of terms) under ``when``.

    >>> [one["when"] for one in _written_out({"precision": ["fp8 | fp4"], "peft": ["lora?"]})]
    ... # doctest: +NORMALIZE_WHITESPACE
    [{'precision': ['fp8'], 'peft': ['lora']}, {'precision': ['fp8']},
     {'precision': ['fp4'], 'peft': ['lora']}, {'precision': ['fp4']}]
    """
    columns = {*COLUMNS, ANYWHERE}
    when = {key: value for key, value in entry.items() if key in columns and type(value) is list}
    others = {key: value for key, value in entry.items() if key not in when}
    each = [[(column, one) for one in _terms(word)] for column in when for word in when[column]]
    for chosen in product(*each):
        found: dict[str, list[Any]] = {}
        for column, term in chosen:
            if term != "":
                found.setdefault(column, []).append(term)
        yield {"when": found, **others}


def _terms(word: Any) -> list[Any]:
    """Return the terms of which one must stand in a cell; the empty one: none need stand."""
    if not isinstance(word, str):
        return [word]
    return [*word.removesuffix("?").split(OR), *([""] if word.endswith("?") else [])]


def _check(section: Sequence[Conditions], where: str) -> None:
    """Refuse terms that no phrase stands for, and entries that tie on some row for certain."""
    for entry in section:
        for column, terms in entry.when.items():
            known = vocabulary().terms(column)
            for term in terms:
                if known and term not in known:
                    raise InputError(f"{where}: {column} = {term!r} is no term of the vocabulary")
    for one, other in combinations(section, 2):
        if not _tie(one, other) or replace(one, when=other.when) == other:  # they say the same
            continue
        if not any(_covers(third, one, other) for third in section):
            raise InputError(
                f"{where}: two entries are equally specific and apply to the same rows: "
                f"{_text(one) or 'without conditions'} and {_text(other) or 'without conditions'}"
            )


def _tie(one: Conditions, other: Conditions) -> bool:
    """Whether one phrase of each column fulfils both entries, which are equally specific."""
    if one.specificity != other.specificity or one.when.keys() != other.when.keys():
        return False
    return all(
        set(terms) == set(other.when[column])
        or any(
            found >= {*terms, *other.when[column]}
            for found in vocabulary().phrases(column).values()
        )
        for column, terms in one.when.items()
    )


def _covers(entry: Conditions, one: Conditions, other: Conditions) -> bool:
    """Whether a more specific entry applies wherever two others do."""
    return entry.specificity > one.specificity and all(
        set(terms) <= {*one.when.get(column, ()), *other.when.get(column, ())}
        for column, terms in entry.when.items()
    )


def _text(entry: Conditions) -> str:
    return ", ".join(f"{column} = {sorted(terms)}" for column, terms in sorted(entry.when.items()))


def look_up(section: Sequence[Entry], row: Row) -> Entry | None:
    """Return the most specific entry of a section that applies to a row; None if none does.

    Of equally specific ones: the one whose terms stand first in the cells.
    """
    cells = _Cells(row)
    found = [
        (entry.specificity, [-place for place in sorted(places)], _text(entry), entry)
        for entry in section
        if (places := _places(entry, cells)) is not None
    ]
    return max(found, key=lambda one: one[:-1])[-1] if found else None


def entry_of(section: Sequence[Entry], row: Row) -> Entry:
    """Return the entry that applies, of a section with an entry for every row."""
    found = look_up(section, row)
    assert found is not None
    return found


class _Cells(dict[str, Mapping[str, int] | None]):
    """Terms of a row's cells, each read once for all entries; None without a vocabulary."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def __missing__(self, column: str) -> Mapping[str, int] | None:
        found = terms_of(self.row, column) if vocabulary().terms(column) else None
        self[column] = found
        return found


def _places(entry: Conditions, cells: _Cells) -> list[int] | None:
    """Return where the terms of an entry stand in their cells; None if one is missing."""
    found = []
    for column, words in entry.when.items():
        terms = cells[column]
        for word in words:
            place = _place(column, word, cells.row) if terms is None else terms.get(word)
            if place is None:
                return None
            found.append(place)
    return found


def _place(column: str, word: str, row: Row) -> int | None:
    """Return where a word stands in a text, 0 of an equal number; None if it does not."""
    if column in TEXTS:  # an A1000 is no A100
        match = re.search(spelled(word) + _whole_number(word), row.words(column))
        return match.start() if match else None
    value = row.get(column)
    return 0 if value is not None and f"{value:g}" == word else None


def spelled(word: str) -> str:
    """Pattern of a word of a text, whose hyphens may be underscores."""
    return re.escape(word).replace(r"\-", "[-_]")


def _whole_number(word: str) -> str:
    """Pattern after a word: a final number must end there (after letters digits may follow).

    An encoder is no encoder-decoder.
    """
    return r"(?!\d)" if word[-1:].isdigit() else "(?!-decoder)"


def number_in(section: Sequence[Pattern], row: Row) -> int | None:
    """Return the number that a pattern of a section finds in its column; None without one."""
    for entry in section:
        found = re.search(entry.pattern, row.words(entry.column))
        if found:
            return int(found[1])
    return None


def kind_of(row: Row) -> str:
    """Return the kind of model that a row names: a dense one, or a mixture, where it names none."""
    word = row.words("model_kind")
    kind = words_table().kinds.get(re.sub(r"[^a-z0-9]", "", word), word) or "dense"
    return "moe" if kind == "dense" and word != "dense" and (row.num_experts or 1) > 1 else kind
