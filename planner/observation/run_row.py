"""A measured run as a row of RUNS.csv, next to the prediction."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from cost_models.model.spec import ModelSpec
from cost_models.units import GIB
from hardware_profiles.errors import InputError
from hardware_profiles.fields import write_text_atomically
from planner.answer.fit_answer import FitAnswer
from planner.validation.rows.runs_file import COLUMNS, csv_lines, without_formula

Cells = dict[str, Any]
# values of the column memory_definition
ALLOCATED: Final = "torch max_memory_allocated"
RESERVED: Final = "torch max_memory_reserved"
DEVICE: Final = "nvidia-smi"


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run; None: not measured. Memory is the peak of one rank, in bytes."""

    step_seconds: float | None = None  # of an optimizer step, without warm-up
    steps: int = 0  # that were measured
    allocated: float | None = None
    reserved: float | None = None
    device: float | None = None  # used on the accelerator by all processes
    out_of_memory: bool = False

    @property
    def peak(self) -> tuple[float, str] | None:
        """Bytes and definition of the peak that is compared: reserved where it is known."""
        for size, definition in (
            (self.reserved, RESERVED),
            (self.allocated, ALLOCATED),
            (self.device, DEVICE),
        ):
            if size:
                return size, definition
        return None


def run_row(answer: FitAnswer, measured: Measured, versions: str) -> Cells:
    """Return the cells of a run: model, cluster, plan and software of a prediction, measurements.

    ``versions``: trainer, torch and others with their versions.
    """
    scenario, plan, workload = answer.scenario, answer.plan, answer.scenario.workload
    cluster = scenario.cluster
    now = datetime.now().astimezone()
    cells: Cells = {
        "row_id": f"{scenario.model.name.rpartition('/')[2]}-{now:%Y%m%d-%H%M%S-%f}",
        "source": "recorded by shardplan",
        "framework": versions.split(",")[0],
        "software": scenario.software.name,
        **model_cells(scenario.model),
        "seq_len": workload.seq_len,
        "target_seq_len": workload.target_seq_len or None,
        "gpu": "here" if cluster.accelerator.device == "cpu" else cluster.accelerator.name,
        "num_gpus": cluster.num_gpus,
        "gpus_per_node": min(cluster.gpus_per_node, cluster.num_gpus),
        "tensor_parallel": plan.tensor_parallel,
        "sequence_parallel": int(plan.sequence_parallel),
        "pipeline_parallel": plan.pipeline_parallel,
        "context_parallel": plan.context_parallel,
        "expert_parallel": plan.expert_parallel,
        "data_parallel": plan.data_parallel,
        "zero_stage": plan.zero_stage,
        "recompute": plan.recompute,
        "offload": plan.offload,
        "micro_batch_size": plan.micro_batch_size,
        "global_batch_size": workload.global_batch_size,
        "precision": workload.precision,
        "optimizer": workload.optimizer.replace("_", " "),
        "master_weights": int(workload.master_weights),
        "flash_attention": int(workload.attention_kernel == "flash"),
        **measured_cells(measured, workload.tokens_per_step / cluster.num_gpus),
        "check": comparison(answer, measured),
        "derived": f"{versions}; {measured.steps} steps measured",
    }
    if plan.dp_replicate > 1:
        cells["dp_shard"] = plan.data_parallel // plan.dp_replicate
    if workload.adapter != "none":
        kind = workload.quantisation if workload.adapter == "qlora" else ""
        name, rank, targets = workload.adapter_name, workload.adapter_rank, workload.adapter_targets
        cells["peft"] = f"{name} r={rank} {targets} {kind}".strip()
    if workload.freeze:
        cells["not_priced"] = f"frozen parts: {workload.freeze}"
    return {name: value for name, value in cells.items() if value not in (None, "")}


def model_cells(model: ModelSpec) -> Cells:
    """Return the columns of an architecture."""
    kind = max(model.kinds, key=lambda one: one.feed_forward.num_experts)
    attention, feed = kind.attention, kind.feed_forward
    cells: Cells = {
        "model": model.name,
        "model_kind": "moe" if feed.num_experts else "dense" if attention.causal else "encoder",
        "params_billion": model.num_parameters / 1e9,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "ffn_hidden_size": feed.ffn_hidden_size,
        "gated_mlp": int(feed.gated),
        "vocab_size": model.vocab_size,
        "tie_embeddings": int(model.tie_embeddings),
        "dropout": model.hidden_dropout,
    }
    if attention.kv_lora_rank:
        cells["model_kind"] = "moe-mla"
    if feed.num_experts:
        expert = feed.ffn_hidden_size
        cells |= {
            "num_experts": feed.num_experts,
            "experts_per_token": feed.experts_per_token,
            "num_shared_experts": feed.shared_ffn_hidden_size // expert if expert else 0,
            "moe_ffn_hidden_size": expert,
        }
    return cells


def measured_cells(measured: Measured, tokens_each: float | None) -> Cells:
    """Return the columns of a measurement; ``tokens_each``: of a step, on one accelerator."""
    cells: Cells = {"outcome": "oom" if measured.out_of_memory else "ok"}
    if measured.out_of_memory:
        return cells
    if measured.step_seconds:
        cells["step_time_s"] = measured.step_seconds
        if tokens_each:
            cells["tokens_per_second_per_gpu"] = tokens_each / measured.step_seconds
    if measured.peak is not None:
        size, cells["memory_definition"] = measured.peak
        cells["peak_memory_gib"] = size / GIB
    return cells


def comparison(answer: FitAnswer, measured: Measured) -> str:
    """Return prediction and measurement in words; step times and peaks of all definitions."""
    memory, time = answer.assessment.memory, answer.assessment.time
    pairs = (
        ("step s", time.step_seconds, measured.step_seconds, 1.0),
        ("live GiB", memory.peak_allocated_bytes, measured.allocated, GIB),
        ("reserved GiB", memory.peak_reserved_bytes, measured.reserved, GIB),
        ("device GiB", memory.device_used_bytes, measured.device, GIB),
    )
    words = [
        f"{name}: predicted {expected / unit:.4g}"
        + (f", measured {seen / unit:.4g}" if seen else "")
        for name, expected, seen, unit in pairs
    ]
    return "; ".join(words)


def append_row(path: Path, cells: Mapping[str, Any]) -> None:
    """Add a row to a RUNS.csv, which is made if it does not exist; other rows stay as they are."""
    header: list[str] = []
    rows: list[dict[str, str]] = []
    if path.exists() and path.stat().st_size:
        first, *others = [cells for _, cells in csv_lines(path) if cells] or [[]]
        header = [name.strip() for name in first]
        rows = [dict(zip(header, cells, strict=False)) for cells in others]
        unknown = [name for name in header if name not in COLUMNS]
        if unknown or "seq_len" not in header:
            wrong = f"unknown column {unknown[0]!r}" if unknown else "no column seq_len"
            raise InputError(f"{path}: {wrong}: not a table of runs, nothing was added")
    elif not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")
    wanted = set(header) | set(cells) | {"seq_len"}
    names = [*header, *(name for name in COLUMNS if name in wanted and name not in header)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    writer.writerow({name: _text(value) for name, value in cells.items()})
    write_text_atomically(path, text.getvalue(), force=True)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(without_formula(value))
