"""RUNS.csv: one measured run a row. An empty cell means that the source does not say.

Sizes of the architecture, the cluster and the plan are as ``ModelSpec``, ``Cluster`` and ``Plan``
name them; batch sizes are in sequences.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import read_text

PUBLISHED: Final = Path(__file__).parent / "published_runs.csv"  # comes with shardplan
MAX_ROWS: Final = 100_000
_TRUE: Final = {"1", "1.0", "true", "yes"}
_FALSE: Final = {"0", "0.0", "false", "no"}


@dataclass(frozen=True, slots=True)
class Column:
    """What a cell may hold."""

    kind: Literal["text", "count", "number", "flag"]
    meaning: str
    low: float = 0.0
    high: float = 1e12
    choices: tuple[str, ...] = ()


def _text(meaning: str, *choices: str) -> Column:
    return Column("text", meaning, choices=choices)


def _count(meaning: str, low: int = 1, high: float = 1e8) -> Column:
    return Column("count", meaning, low, high)


def _number(meaning: str, high: float = 1e12) -> Column:
    return Column("number", meaning, 0.0, high)


def _flag(meaning: str) -> Column:
    return Column("flag", meaning)


COLUMNS: Final[Mapping[str, Column]] = {
    "row_id": _text("name of the row"),
    "source": _text("where it was read"),
    "source_group": _text("whose measurements these are"),
    "source_quote": _text("the figure as printed"),
    "framework": _text("the trainer, chooses the software profile"),
    "model": _text("a preset, or any name beside the sizes"),
    "model_kind": _text("dense, encoder, moe, moe-mla"),
    "params_billion": _number("parameters, 1e9", 1e6),
    "active_params_billion": _number("parameters that a token meets, 1e9", 1e6),
    "num_layers": _count("layers", high=10_000),
    "hidden_size": _count("width", high=1e6),
    "num_heads": _count("query heads", high=10_000),
    "num_kv_heads": _count("key and value heads", high=10_000),
    "head_dim": _count("width of a head", high=1e6),
    "ffn_hidden_size": _count("width of the MLP", high=1e7),
    "gated_mlp": _flag("the MLP has a gate"),
    "vocab_size": _count("vocabulary", high=1e7),
    "tie_embeddings": _flag("the output projection is the embedding"),
    "num_experts": _count("routed experts", high=10_000),
    "experts_per_token": _count("experts that a token visits", high=10_000),
    "num_shared_experts": _count("experts that every token visits", 0, 10_000),
    "moe_ffn_hidden_size": _count("width of an expert", high=1e7),
    "seq_len": _count("tokens of a sequence"),
    "gpu": _text("accelerator"),
    "gpu_mem_gb": _number("memory on its box, GB", 1e5),
    "num_gpus": _count("accelerators", high=1e6),
    "gpus_per_node": _count("accelerators of a node", high=1e6),
    "intra_link": _text("link inside a node"),
    "inter_link_gbps_per_gpu": _number("network, Gb/s one way for one accelerator", 1e6),
    "tensor_parallel": _count("tensor-parallel ranks", high=1e6),
    "sequence_parallel": _flag("Megatron's sequence parallelism"),
    "pipeline_parallel": _count("pipeline ranks", high=1e6),
    "virtual_stages": _count("stages of a pipeline rank", high=1e4),
    "context_parallel": _count("context-parallel ranks", high=1e6),
    "expert_parallel": _count("expert-parallel ranks", high=1e6),
    "data_parallel": _count("data-parallel ranks", high=1e6),
    "dp_shard": _count("ranks of a sharding group (HSDP)", high=1e6),
    "zero_stage": _count("what data ranks shard", 0, 3),
    "recompute": _text("none, selective, full"),
    "offload": _text("what lives in host memory"),
    "micro_batch_size": _count("sequences of a micro-batch"),
    "global_batch_size": _count("sequences of a step"),
    "precision": _text("bf16, fp16, fp8, fp32"),
    "optimizer": _text("adamw and others"),
    "peft": _text("none, lora r=16 ..., qlora ..."),
    "flash_attention": _text("1, 0, unknown", "1", "0", "unknown"),
    "outcome": _text("ok, or out of memory", "ok", "oom"),
    "step_time_s": _number("seconds of a step"),
    "tokens_per_second_per_gpu": _number("tokens a second and accelerator"),
    "tflops_per_gpu": _number("TFLOP/s under flops_definition", 1e6),
    "flops_definition": _text("what the source counts"),
    "mfu_pct": _number("model FLOP utilisation, %", 1000.0),
    "hfu_pct": _number("hardware FLOP utilisation, %", 1000.0),
    "peak_memory_gib": _number("peak memory, GiB", 1e6),
    "memory_definition": _text("whose peak: torch allocated, torch reserved, nvidia-smi"),
    "notes": _text("words that choose the software profile"),
    "derived": _text("fields computed from others"),
    "assumed": _text("fields the source does not say"),
    "check": _text("how the figures agree"),
    "usable": _text("what the row can test", "time", "mem", "time+mem", "oom", "partial"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row: values by column, None where the cell is empty."""

    line: int
    values: Mapping[str, Any]

    def get(self, column: str) -> Any:
        """Return a value; None where the source does not say."""
        return self.values.get(column)

    def words(self, column: str) -> str:
        """Return a text in lower case, "" where the source does not say."""
        return str(self.values.get(column) or "").lower()

    @property
    def row_id(self) -> str:
        """Name of the row, or its line."""
        return str(self.get("row_id") or f"line {self.line}")

    @property
    def source_group(self) -> str:
        """Whose measurement it is."""
        return str(self.get("source_group") or "runs")


def read_runs(path: Path) -> list[Row]:
    """Read RUNS.csv; a bad header or value is one line with row and column."""
    text = read_text(path, "a table of runs (CSV)")
    lines = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(lines, [])]
    _check_header(path, header)
    rows: list[Row] = []
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        where = f"{path}: line {lines.line_num}"
        if len(cells) != len(header):
            raise InputError(f"{where}: {len(cells)} cells for {len(header)} columns")
        if len(rows) >= MAX_ROWS:
            raise InputError(f"{path}: more than {MAX_ROWS:,} rows")
        values = {
            name: _value(name, cell.strip(), where)
            for name, cell in zip(header, cells, strict=True)
        }
        rows.append(Row(lines.line_num, values))
    if not rows:
        raise InputError(f"{path}: no rows")
    return rows


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS) or f"Known: {', '.join(COLUMNS)}"
            raise InputError(f"{path}: unknown column {name[:60]!r}. {hint}")
        if header.count(name) > 1:
            raise InputError(f"{path}: the column {name} stands twice")
    if "seq_len" not in header:
        raise InputError(f"{path}: the column seq_len is missing")


def _value(name: str, cell: str, where: str) -> Any:
    if not cell:
        return None
    column = COLUMNS[name]
    if column.kind == "text":
        if column.choices and cell not in column.choices:
            raise _wrong(name, cell, f"one of {', '.join(column.choices)}, or empty", where)
        return cell
    if column.kind == "flag":
        if cell.lower() not in _TRUE | _FALSE:
            raise _wrong(name, cell, "1, 0 or empty", where)
        return cell.lower() in _TRUE
    whole = "a whole number" if column.kind == "count" else "a number"
    allowed = f"{whole} from {column.low:g} to {column.high:g}, or empty"
    try:
        number = float(cell)
    except ValueError:
        raise _wrong(name, cell, allowed, where) from None
    if not math.isfinite(number) or not column.low <= number <= column.high:
        raise _wrong(name, cell, allowed, where)
    if column.kind == "number":
        return number
    if number != int(number):
        raise _wrong(name, cell, allowed, where)
    return int(number)


def _wrong(name: str, cell: str, allowed: str, where: str) -> InputError:
    return InputError(f"{where}, column {name}: {cell[:60]!r} (must be {allowed})")
