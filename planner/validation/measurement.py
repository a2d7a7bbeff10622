"""Measured step time (s) and peak memory (bytes) of a row, each under its own definition."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from cost_models.compute.flops import model_flops_per_step
from cost_models.model.target_length import with_target_length
from cost_models.uncertainty import MemoryKind
from planner.validation.rows.case import Case
from planner.validation.rows.counts import spaced
from planner.validation.rows.plan import takes_layers_in_turn
from planner.validation.rows.runs_file import Row
from planner.validation.rows.words import MemoryEntry, look_up, words_table

GIB: Final = 2.0**30
# The best matmul of a card over its data sheet: RTX 5090, whose clocks are above the sheet's
# (zzc0721/torch-performance-test-data: database.md)
MOST_OF_PEAK: Final = 1.13
# "max_memory_reserved summed over devices", "total of 2 GPUs"
SUMMED: Final = re.compile(
    r"\b(?:sum(?:med)?|total|combined|aggregated?)\b(?:(?! (?:max|mean|average)|[,;.]).)*? "
    r"(?:of|over|across) (?:all )?(?:the )?"
    r"(?:\d+ )?(?:gpu|card|device|accelerator)s\b"
)
# what a trainer logs beside the peak, such as allocated_after_model_wrap (AnswerDotAI/fsdp_qlora:
# train.py), but for a peak that is reset then; and memory of the host
NO_PEAK: Final = re.compile(
    r"^(?!.*\breset\b).*\b(?:before (?:the )?(?:training|forward)"
    r"|after (?:the )?(?:model )?(?:wrap(?:ping)?|load(?:ing)?|creation|init(?:iali[sz]\w*)?))\b"
    r"|(?<!no )(?<!not )(?<!without )(?<!excluding )\b(?:cpu|host) (?:memory|ram)\b(?! not\b)"
)
ALLOCATED_THEN: Final = re.compile(
    r"^(?!.*\b(?:max|peak)).*\b(?:after|before) (?:the )?(?:forward|backward)\b"
)


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """A measured peak."""

    size: float  # bytes
    kind: MemoryKind
    rank: str  # first, last, or fullest stage; their sum (stages), that of all accelerators (all)
    of_update: bool  # the largest since the backward pass, not of the step
    is_stated: bool = True  # which kind it is; otherwise the usual one


def tests_time(row: Row) -> bool:
    """Whether the row's time may be compared."""
    usable = row.get("usable") in (None, "time", "time+mem") and not denied_by(row)
    return usable and row.get("outcome") != "oom"


def tests_memory(row: Row) -> bool:
    """Whether the row's memory may be compared."""
    return row.get("usable") in (None, "mem", "time+mem", "oom") and not denied_by(row)


def is_partial(row: Row) -> bool:
    """Whether the row is reported separately: the source is incomplete or contradicts itself."""
    return bool(row.get("usable") == "partial" or denied_by(row))


def denied_by(row: Row) -> str | None:
    """Return why the described run cannot have produced the measurement; None if it can."""
    return row.set_apart


def measured_memory(row: Row) -> MeasuredMemory | None:
    """Return the measured peak; None without one, or if its definition is unknown or no peak's."""
    gib, entry = row.get("peak_memory_gib"), look_up(words_table().memory, row)
    if gib is None or not entry or row.get("outcome") == "oom" or _is_no_peak(row, entry):
        return None
    rank = "all" if SUMMED.search(spaced(row.words("memory_definition"))) else entry.rank
    return MeasuredMemory(gib * GIB, entry.value, rank, entry.of_update, not entry.usual)


def _is_no_peak(row: Row, entry: MemoryEntry | None) -> bool:
    """Whether the words of memory are of a moment beside the peak, or of the host.

    ``entry``: what the words were looked up as.
    """
    words = spaced(row.words("memory_definition"))
    allocated = entry is not None and entry.value == "allocated"
    return bool(NO_PEAK.search(words) or (allocated and ALLOCATED_THEN.search(words)))


def measured_step(row: Row, case: Case | None) -> float | None:
    """Return the step time in seconds: measured, or derived from tokens/s, TFLOP/s or MFU.

    An MFU is a share of the peak in the precision that the row states.
    """
    if row.get("outcome") == "oom":
        return None
    if row.get("step_time_s") is not None:
        return float(row.get("step_time_s")) * _share_of_step(row, case)
    if case is None:
        return None
    workload, gpus = case.scenario.workload, case.scenario.cluster.num_gpus
    rate = row.get("tokens_per_second_per_gpu")
    if rate:
        return float(workload.tokens_per_step / (rate * gpus))
    definition = look_up(words_table().flops, row)
    if definition is None or definition.counts != "model":
        return None
    model = with_target_length(case.scenario.model, workload)
    sizes = (model, workload.seq_len, workload.global_batch_size)
    flops = float(model_flops_per_step(*sizes, masked=definition.attention != 1.0))
    if row.get("tflops_per_gpu"):
        return flops / (float(row.get("tflops_per_gpu")) * 1e12 * gpus)
    stated = look_up(words_table().precision, row)
    precision: Any = workload.precision if stated is None else stated.value
    peak = case.scenario.cluster.accelerator.peak_flops.get(precision)
    if row.get("mfu_pct") and peak is not None:
        return flops / (0.01 * float(row.get("mfu_pct")) * peak.value * gpus)
    return None


def lacks_definition(row: Row, tested: Collection[str] = ("time", "memory")) -> str | None:
    """Return which measurement is not compared because the row does not say what it counts."""
    if row.get("outcome") == "oom":
        return None
    has_peak = "memory" in tested and row.get("peak_memory_gib") is not None
    if has_peak and row.get("memory_definition") is None:
        return "no memory_definition: the peak is not compared"
    if has_peak and _is_no_peak(row, look_up(words_table().memory, row)):
        return f"memory_definition {row.memory_definition!r}: no peak of an accelerator"
    if "time" not in tested or row.get("step_time_s") or row.get("tokens_per_second_per_gpu"):
        return None
    for column in ("tflops_per_gpu", "mfu_pct"):
        if row.get(column) is not None and look_up(words_table().flops, row) is None:
            return f"no flops_definition: {column} is not compared"
    return None


def _share_of_step(row: Row, case: Case | None) -> float:
    """Return the share of a measured step that is priced: of one micro-batch where cards wait."""
    if case is None or row.global_batch_size is None or not takes_layers_in_turn(row):
        return 1.0
    return min(1.0, case.scenario.workload.global_batch_size / row.global_batch_size)


def rates(case: Case, step: float, *, masked: bool = False) -> tuple[float, float | None]:
    """Return tokens a second of one accelerator, and MFU; None where no peak is known.

    ``masked``: without the scores that causal masks drop.
    """
    workload, cluster = case.scenario.workload, case.scenario.cluster
    tokens = workload.tokens_per_step / (step * cluster.num_gpus)
    peak = cluster.accelerator.peak_flops.get(workload.precision)
    if peak is None:
        return tokens, None
    model = with_target_length(case.scenario.model, workload)
    sizes = model, workload.seq_len, workload.global_batch_size
    flops = float(model_flops_per_step(*sizes, masked=masked))
    return tokens, flops / (step * peak.value * cluster.num_gpus)


def faster_than_peak(case: Case, step: float | None) -> str | None:
    """Return why a measured step cannot be that of the described run; None if it can.

    It is shorter than the model's FLOP take at the accelerator's peak.
    """
    utilisation = None if not step else rates(case, step, masked=True)[1]
    if utilisation is None or utilisation <= MOST_OF_PEAK:
        return None
    return f"measured: {utilisation:.2f} times the accelerator's peak FLOP/s"


def measured_mfu(row: Row) -> float | None:
    """Return the measured MFU as a fraction; None where its definition is another one."""
    definition = look_up(words_table().flops, row)
    if row.get("mfu_pct") is None or definition is None or row.get("outcome") == "oom":
        return None
    if (definition.counts, definition.attention) != ("model", 1.0):
        return None
    return 0.01 * float(row.get("mfu_pct"))
