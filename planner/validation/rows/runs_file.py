"""RUNS.csv: one measured run per row. An empty cell means that the source does not give the value.

So do a dash and "n/a".

Sizes of the architecture, the cluster and the plan have the names that ``ModelSpec``, ``Cluster``
and ``Plan`` give them; batch sizes are in sequences.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, inspect

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import read_text
from hardware_profiles.message import escaped

PUBLISHED: Final = Path(__file__).parents[1] / "published_runs.csv"  # comes with shardplan
MAX_ROWS: Final = 100_000
MAX_ERRORS: Final = 50  # printed; the others are counted
# words of options and of other tools, and the columns that they mean
SHORT_COLUMNS: Final = {
    word: column
    for column, words in {
        "tensor_parallel": "tp tp_size",
        "pipeline_parallel": "pp pp_size",
        "context_parallel": "cp cp_size",
        "expert_parallel": "ep ep_size",
        "data_parallel": "dp",
        "virtual_stages": "num_chunks vp vpp vp_size interleaving_size",
        "expert_tensor_parallel": "etp etp_size",
        "zero_stage": "zero zero1",
        "recompute": "ac checkpoint recompute_layer",
        "micro_batch_size": "mbs micro_bsz",
        "global_batch_size": "gbs grad_accum gradient_accumulation_steps "
        "batch_accumulation_per_replica micro_num",
        "gpu and num_gpus": "cluster",
        "framework": "trainer",
        "peft": "lora",
        "step_time_s": "step_ms iteration_time iteration_time_(ms) iteration_time_(s) "
        "elapsed_time_per_iteration_(ms) samples/s samples_per_second seconds_per_step",
        "tokens_per_second_per_gpu": "tgs tok/s/gpu tokens/s/gpu",
        "mfu_pct": "mfu",
        "peak_memory_gib": "memory peak_memory max_memory",
        "seq_len": "sequence_length",
        "precision": "dtype",
        "num_gpus": "gpus",
    }.items()
    for word in words.split()
}
THOUSANDS: Final = re.compile(r"\d{1,3}(,\d{3})+")
UNITS: Final = re.compile(
    r"(\d{1,9}(?:\.\d+)?) ?(?:([km])(?: ?tok(?:en)?s)?| tok(?:en)?s)", re.IGNORECASE
)
POWERS: Final = {None: 1.0, "k": 1024.0, "m": 1024.0**2}
EMPTY: Final = frozenset({"", "-", "–", "—", "n/a", "na"})
FLAGS: Final = {  # besides true, false, 1 and 0
    **dict.fromkeys(("1.0", "yes", "y", "on", "enabled"), "1"),
    **dict.fromkeys(("0.0", "no", "n", "off", "disabled"), "0"),
}
MARKS: Final = {  # of tables
    **dict.fromkeys("\N{CHECK MARK}\N{HEAVY CHECK MARK}\N{WHITE HEAVY CHECK MARK}", " yes "),
    **dict.fromkeys("\N{BALLOT X}\N{HEAVY BALLOT X}\N{MULTIPLICATION X}\N{CROSS MARK}", " no "),
}
# in a cell of zero_stage: words that notes may have as well
SHARDED: Final = re.compile(
    r"(?:(?:deepspeed|ds|z(?:ero)?|stage)[ _-]*)*[0-3](?![0-9.])"
    r"|(?:pytorch |torch )?(?:[fh]sdp|ddp)|_?(?:full|fully|hybrid|no)[ _-]*shard|shard[ _-]grad",
    re.IGNORECASE,
)
PRODUCTS: Final = ("num_gpus", "global_batch_size")  # "2 x 8": nodes, or micro-batches and ranks

Small = Annotated[int, Meta(ge=1, le=10_000)] | None  # layers, heads, experts
Ranks = Annotated[int, Meta(ge=1, le=1_000_000)] | None
Width = Annotated[int, Meta(ge=1, le=10_000_000)] | None
Count = Annotated[int, Meta(ge=1, le=100_000_000)] | None
Number = Annotated[float, Meta(ge=0.0, le=1e12)] | None
Share = Annotated[float, Meta(ge=0.0, le=1000.0)] | None  # per cent
Rate = Annotated[float, Meta(ge=0.0, le=1e6)] | None
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)] | None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a typed field per column, None where the cell is empty."""

    line: int = 0  # in the file, from 1
    row_id: str | None = None
    source: str | None = None  # document that was read
    source_group: str | None = None  # owner of the measurements; errors are averaged by it
    source_quote: str | None = None  # the figure as printed
    framework: str | None = None  # the trainer, chooses the software profile
    software: str | None = None  # profile or engines; "; group.figure=value" for each that differs
    model: str | None = None  # a preset, or any name next to the sizes
    # dense, encoder, encoder-classifier, encoder-decoder, vision, moe, moe-mla, or a word for one
    model_kind: str | None = None
    params_billion: Rate = None  # parameters, 1e9; the shape of an unknown model is a typical one
    active_params_billion: Rate = None  # parameters used by one token, 1e9
    num_layers: Small = None
    hidden_size: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    num_heads: Small = None
    num_kv_heads: Small = None
    head_dim: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    ffn_hidden_size: Width = None
    gated_mlp: bool | None = None
    vocab_size: Width = None
    tie_embeddings: bool | None = None  # the output projection is the embedding
    num_experts: Small = None  # routed experts
    experts_per_token: Small = None
    num_shared_experts: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    moe_ffn_hidden_size: Width = None  # width of an expert
    num_dense_layers: Annotated[int, Meta(ge=0, le=10_000)] | None = None  # before the mixtures
    # latent attention (model_kind moe-mla): ranks, 0: queries are not compressed; head sizes
    q_lora_rank: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    kv_lora_rank: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    rope_head_dim: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None  # of ``head_dim``
    value_head_dim: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    dropout: Fraction = None  # of hidden state and attention
    seq_len: Count = None
    target_seq_len: Count = None  # of an encoder-decoder's targets; seq_len is of its inputs
    gpu: str | None = None
    gpu_mem_gb: Annotated[float, Meta(ge=0.0, le=1e5)] | None = None  # nominal, GB
    num_gpus: Ranks = None
    gpus_per_node: Ranks = None
    power: Annotated[float, Meta(ge=1.0, le=1e5)] | None = None  # watts that a board is held to
    node: str | None = None  # kind of node, where it is not the accelerator's usual one
    intra_link: str | None = None  # link inside a node
    inter_link_gbps_per_gpu: Rate = None  # network, Gb/s one way per accelerator
    tensor_parallel: Ranks = None
    sequence_parallel: bool | None = None
    pipeline_parallel: Ranks = None
    virtual_stages: Small = None
    context_parallel: Ranks = None
    expert_parallel: Ranks = None
    expert_tensor_parallel: Ranks = None
    # of every pipeline stage, e.g. "2 4 4 2"; embedding and head may count as a layer each
    layers_by_stage: str | None = None
    data_parallel: Ranks = None
    dp_shard: Ranks = None  # ranks of a sharding group (HSDP)
    zero_stage: Annotated[int, Meta(ge=0, le=3)] | None = None
    recompute: str | None = None  # none, selective, full
    recompute_layers: Annotated[int, Meta(ge=0, le=10_000)] | None = None  # of a pipeline stage
    offload: str | None = None
    micro_batch_size: Count = None  # sequences
    global_batch_size: Count = None  # sequences
    precision: str | None = None  # bf16, fp16, fp8, fp32
    optimizer: str | None = None
    master_weights: bool | None = None  # weights are updated in fp32
    gradient_precision: Literal["fp32", "bf16"] | None = None  # of gradients that are reduced
    document_length: Count = None  # mean tokens of documents that are packed and masked
    peft: str | None = None  # none, lora r=16 ..., qlora ...
    flash_attention: Literal["1", "0", "unknown"] | None = None
    outcome: Literal["ok", "oom"] | None = None
    step_time_s: Number = None
    tokens_per_second_per_gpu: Number = None
    tflops_per_gpu: Rate = None  # under flops_definition
    flops_definition: str | None = None
    mfu_pct: Share = None  # model FLOP utilisation
    hfu_pct: Share = None  # hardware FLOP utilisation
    peak_memory_gib: Rate = None
    memory_definition: str | None = None  # torch allocated, torch reserved, nvidia-smi
    notes: str | None = None  # settings in words
    derived: str | None = None  # fields computed from others
    assumed: str | None = None  # fields the source does not give
    check: str | None = None  # how the figures agree
    usable: Literal["time", "mem", "time+mem", "oom", "partial"] | None = None
    not_priced: str | None = None  # why the row cannot be priced
    set_apart: str | None = None  # why the cells cannot be those of the measured run
    left_out: str | None = None  # why the source's step times stay out of the mean over sources

    def get(self, column: str) -> Any:
        """Return a value by the name of its column; None where the cell is empty."""
        return getattr(self, column)

    def words(self, column: str) -> str:
        """Return a text in lower case, "" where the cell is empty."""
        return str(getattr(self, column) or "").lower()

    @property
    def name(self) -> str:
        """``row_id``, or the line in the file."""
        return self.row_id or f"line {self.line}"

    @property
    def group(self) -> str:
        """``source_group``, or ``runs``."""
        return self.source_group or "runs"


def _cell_type(field: inspect.Field) -> inspect.Type:
    """Return the type of a column without None."""
    kind = field.type
    if isinstance(kind, inspect.UnionType):
        return next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    return kind


def _columns() -> dict[str, tuple[inspect.Type, Any]]:
    described = inspect.type_info(Row)
    assert isinstance(described, inspect.StructType)
    kinds = {field.name: _cell_type(field) for field in described.fields}
    types = {field.name: field.type for field in msgspec.structs.fields(Row)}
    return {name: (kind, types[name]) for name, kind in kinds.items() if name != "line"}


# of every column: its kind and bounds, and the annotation that msgspec converts a cell to
COLUMNS: Final[Mapping[str, tuple[inspect.Type, Any]]] = _columns()
TEXTS: Final = frozenset(
    name
    for name, (kind, _) in COLUMNS.items()
    if isinstance(kind, (inspect.StrType, inspect.LiteralType))
)


class BadCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell, or a whole line (``column`` None), that cannot be read."""

    line: int  # in the file, from 1
    column: str | None
    value: str | None
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}" + (f", column {self.column}" if self.column else "")
        value = "" if self.value is None else f"{self.value[:60]!r} "
        return f"{where}: {value}{self.message}"


class RunsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a RUNS.csv that can be read, and every cell that cannot."""

    path: Path
    rows: tuple[Row, ...]
    bad_cells: tuple[BadCell, ...]


def read_runs(path: Path) -> list[Row]:
    """Read RUNS.csv; the error names every bad cell with line, column, value and allowed values."""
    found = read_runs_file(path)
    if found.bad_cells:
        raise InputError(bad_cells_text(path, found.bad_cells))
    return list(found.rows)


def read_runs_file(path: Path) -> RunsFile:
    """Read the rows of RUNS.csv without bad cells, and list the bad cells of the others.

    A header that cannot be read, or a file without any readable row, is an InputError.
    """
    lines = csv_lines(path)
    header = [_column(name) for name in next(lines, (0, []))[1]]
    if not header:
        raise InputError(f"{path}: is empty (a line of columns and rows expected)")
    _check_header(path, header)
    rows: list[Row] = []
    bad: list[BadCell] = []
    first_line: dict[str, int] = {}  # of a row_id
    for number, cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        if len(rows) >= MAX_ROWS:
            raise InputError(f"{path}: more than {MAX_ROWS:,} rows")
        if len(cells) != len(header):
            message = f"{len(cells)} cells for {len(header)} columns"
            bad.append(BadCell(line=number, column=None, value=None, message=message))
            continue
        row, wrong = _row(number, zip(header, cells, strict=True))
        earlier = first_line.setdefault(row.name, row.line)
        if earlier != row.line:
            message = f"stands twice (first in line {earlier})"
            wrong.append(BadCell(line=number, column="row_id", value=row.name, message=message))
        bad += wrong
        if not wrong:
            rows.append(row)
    if not rows:
        raise InputError(bad_cells_text(path, bad) if bad else f"{path}: no rows")
    return RunsFile(path=path, rows=tuple(rows), bad_cells=tuple(bad))


def _column(name: str) -> str:
    """Return a column as it is known, from a name such as ``Num GPUs``."""
    name = name.strip()
    plain = re.sub(r"[\s-]+", "_", name.lower())
    return plain if plain in COLUMNS else name


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of every line of a table of runs, with the line's number.

    A header without commas may be divided by semicolons or tabs, as spreadsheets write them.
    """
    text = read_text(path, "a table of runs (CSV)")
    header = text.partition("\n")[0]
    mark = next((mark for mark in ",;\t" if mark in header), ",")
    lines = csv.reader(io.StringIO(text), delimiter=mark)
    try:
        for cells in lines:
            yield lines.line_num, cells
    except csv.Error as error:
        raise InputError(f"{path}: line {lines.line_num}: not CSV: {error}") from None


def without_formula(value: Any) -> Any:
    """Return a cell that no spreadsheet computes and no terminal obeys.

    A text that begins like a formula is quoted; control characters are escaped.

    >>> without_formula("=HYPERLINK(A1)"), without_formula(-1.5)
    ("'=HYPERLINK(A1)", -1.5)
    """
    if not isinstance(value, str):
        return value
    begins = value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{escaped(value)}" if begins else escaped(value)


def bad_cells_text(path: Path, cells: Sequence[BadCell]) -> str:
    """Return the bad cells of a file: one on a single line, several as a list."""
    return _report(path, [str(cell) for cell in cells])


def _report(path: Path, errors: list[str]) -> str:
    """Return the errors of a file: one on a single line, several as a list."""
    if len(errors) == 1:
        return f"{path}: {errors[0]}"
    shown = errors[:MAX_ERRORS]
    more = len(errors) - len(shown)
    rest = [f"and {more:,} more (--json lists them)"] if more else []
    return "\n  ".join([f"{path}: {len(errors):,} errors", *shown, *rest])


def _check_header(path: Path, header: list[str]) -> None:
    if len(header) == 1 and (mark := next((m for m in ";\t" if m in header[0]), None)):
        raise InputError(f"{path}: cells are separated by {mark!r} (must be by commas)")
    errors, known = [], f"Known: {', '.join(COLUMNS)}"
    for name in dict.fromkeys(header):
        if name not in COLUMNS:
            other = SHORT_COLUMNS.get(re.sub(r"[\s-]+", "_", name.lower()))
            hint = f"Did you mean {other}?" if other else did_you_mean(name, COLUMNS)
            if not hint:  # the list is printed once
                hint, known = known, ""
            errors.append(f"unknown column {name[:60]!r}. {hint}".rstrip(". "))
        elif header.count(name) > 1:
            errors.append(f"the column {name} stands twice")
    if not {"seq_len", "notes", "framework"} & set(header):  # words may say it
        errors.append("the column seq_len is missing")
    if errors:
        raise InputError(_report(path, errors))


def _whole(text: str) -> str:
    """Return the digits of a whole number.

    >>> _whole("4k"), _whole("4,096"), _whole("4,5"), _whole("0.5M tokens"), _whole("16 (2 nodes)")
    ('4096', '4096', '4,5', '524288', '16')
    """
    text = re.sub(
        r" *\([^)]*\)$| *(?:gpu|card|layer|rank|sequence|sample)s?$", "", text, flags=re.I
    )
    if THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    found = UNITS.fullmatch(text)
    return str(round(float(found[1]) * POWERS[found[2] and found[2].lower()])) if found else text


def _product(text: str) -> str:
    """Return the product of whole numbers.

    >>> _product("2 x 8"), _product("4"), _product("8 x H100")
    ('16', '4', '8 x H100')
    """
    factors = re.split(r" *[x*\N{MULTIPLICATION SIGN}] *", text)
    return str(prod(map(int, factors))) if all(map(str.isdecimal, factors)) else text


def _stage(text: str) -> tuple[str, str]:
    """Return the number of a stage of ZeRO, and words that say how weights are sharded.

    >>> _stage("ZeRO-3"), _stage("zero_stage 2"), _stage("z1"), _stage("none")
    (('3', ''), ('2', ''), ('1', ''), ('0', ''))
    >>> _stage("SHARD_GRAD_OP"), _stage("zero3_offload"), _stage("-1")
    (('', 'SHARD_GRAD_OP'), ('', 'zero3_offload'), ('-1', ''))
    """
    found = re.fullmatch(
        r"(?:deepspeed[ _-]*)?(?:z(?:ero)?[ _-]*)?(?:stage[ _-]*)?([0-3])(?:[.]0)?", text, re.I
    )
    if found:
        return found[1], ""
    if text.lower() in ("none", "no", "off"):
        return "0", ""
    return ("", text) if SHARDED.match(text) else (text, "")


def _flash(text: str) -> str:
    """Return whether scores are never stored, from a flag or the name of a kernel.

    >>> _flash("yes"), _flash("fa2"), _flash("torch sdpa"), _flash("triton"), _flash("sdpa (math)")
    ('1', '1', '1', '1', '0')
    """
    word = text.lower()
    if re.search(
        r"\b(?:eager|math|naive|vanilla|unfused|none|w/o|(?:no|not|without)[ _-]?flash)|^without$",
        word,
    ):
        return "0"
    if re.search(
        r"\bfa[ _-]?\d|flash|sdpa|xformers|mem\w*[ _-]eff|cudnn|flex|triton|splash|pallas|fused"
        r"|\bte\b|transformer[ _-]engine",
        word,
    ):
        return "1"
    if word in ("auto", "default"):
        return "unknown"
    return {"true": "1", "false": "0", **FLAGS}.get(word, text)


def _is_flag(text: str) -> bool:
    return text.lower() in {"1", "0", "true", "false", *FLAGS}


def _row(line: int, cells: Iterable[tuple[str, str]]) -> tuple[Row, list[BadCell]]:
    """Return a row with the cells that can be read, and an error for each of the others."""
    marks = str.maketrans(MARKS)
    tidied = ((name, " ".join(cell.translate(marks).split())) for name, cell in cells)
    given = {name: text for name, text in tidied if text.lower() not in EMPTY}
    kernel = given.get("flash_attention", "")
    for name, text in given.items():
        if isinstance(COLUMNS[name][0], inspect.BoolType):
            given[name] = FLAGS.get(text.lower(), text)
        elif name == "flash_attention":
            given[name] = _flash(text)
        elif isinstance(COLUMNS[name][0], inspect.IntType):
            given[name] = _whole(_product(text) if name in PRODUCTS else text)
    if given.get("flash_attention") == "1" and not _is_flag(kernel):
        given["notes"] = f"{given.get('notes', '')}; attention: {kernel}".removeprefix("; ")
    if "zero_stage" in given:
        given["zero_stage"], words = _stage(given["zero_stage"])
        if words:
            del given["zero_stage"]
            given["notes"] = f"{given.get('notes', '')}; zero_stage: {words}".removeprefix("; ")
    try:
        return msgspec.convert({"line": line, **given}, Row, strict=False), []
    except msgspec.ValidationError:
        return _cell_by_cell(line, given)


def _cell_by_cell(line: int, given: Mapping[str, str]) -> tuple[Row, list[BadCell]]:
    """Convert each cell on its own: msgspec stops at the first error of a struct."""
    values: dict[str, Any] = {}
    errors: list[BadCell] = []
    for name, text in given.items():
        kind, type_ = COLUMNS[name]
        try:
            values[name] = msgspec.convert(text, type_, strict=False)
        except msgspec.ValidationError:
            message = f"(must be {_allowed(kind)})"
            errors.append(BadCell(line=line, column=name, value=text, message=message))
    return Row(line=line, **values), errors


def _allowed(kind: inspect.Type) -> str:
    """Return the allowed values of a column that is not free text."""
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}, or empty"
    if isinstance(kind, inspect.BoolType):
        return "1, 0 or empty"
    assert isinstance(kind, (inspect.IntType, inspect.FloatType))
    whole = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    return f"{whole} from {kind.ge:,g} to {kind.le:,g}, or empty"
