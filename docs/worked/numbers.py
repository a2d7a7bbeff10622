"""Worked numbers of the book of formulas: formulas as they are called while jobs are priced.

``worked_calls`` prices the jobs of ``JOBS`` and keeps, of each function that it is given, the first
call whose results can be printed and are not all zero: the book follows a few steps of training
through all formulas, and no number of it is typed by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs

import planner
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.model.parameters import active_parameters
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import PlanTable
from cost_models.units import format_bytes, format_seconds
from planner.reports.simulated_step import simulated_step

MOST: Final = 6  # numbers of a result that are printed
# job -> arguments of planner.fit; micro-batches of one sequence
JOBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "A": {
        "model": "llama-3-8b",
        "cluster": "2x8xA100-80GB",
        "seq_len": 8192,
        "global_batch_size": 64,
        "data_parallel": 2,
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "context_parallel": 2,
        "zero_stage": 1,
        "recompute": "selective",
        "tokens": "1B",
    },
    "B": {
        "model": "mixtral-8x7b",
        "cluster": "4x8xH100-SXM",
        "seq_len": 4096,
        "global_batch_size": 256,
        "data_parallel": 8,
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "pipeline_parallel": 2,
        "virtual_stages": 2,
        "pipeline_schedule": "interleaved_1f1b",
        "expert_parallel": 8,
        "zero_stage": 1,
        "recompute": "full",
        "precision": "fp8",
        "software": "megatron",
    },
    "C": {
        "model": "llama-3-8b",
        "cluster": "4x8xA100-80GB",
        "seq_len": 8192,
        "global_batch_size": 64,
        "data_parallel": 32,
        "zero_stage": 3,
        "secondary_ranks": 8,
        "quantised_weights": True,
        "quantised_gradients": True,
        "recompute": "full",
        "offload": "weights+activations",
        "optimizer": "adafactor",
    },
    "D": {
        "model": "llama-3-8b",
        "cluster": "1xH100-SXM",
        "seq_len": 4096,
        "qlora": 16,
        "data_parallel": 1,
        "zero_stage": 0,
        "recompute": "selective_ops",
        "optimizer": "paged_adamw_8bit",
    },
    "E": {
        "model": "qwen3-next-80b-a3b",
        "cluster": "4x8xH100-SXM",
        "seq_len": 4096,
        "data_parallel": 32,
        "zero_stage": 3,
        "recompute": "none",
        "software": "fsdp1",
    },
    "F": {
        "model": "gpt2-xl",
        "cluster": "8xA100-80GB",
        "seq_len": 1024,
        "data_parallel": 8,
        "zero_stage": 0,
        "recompute": "none",
        "software": "hf-trainer-autocast+checkpointed-fp32-loss",
    },
    "G": {
        "model": "llama-3-8b",
        "cluster": "8xA100-80GB",
        "seq_len": 4096,
        "global_batch_size": 32,
        "data_parallel": 2,
        "pipeline_parallel": 4,
        "pipeline_schedule": "gpipe",
        "zero_stage": 2,
        "recompute": "none",
    },
    "H": {
        "model": "qwen3-next-80b-a3b",
        "cluster": "4xH100-SXM",
        "inference": True,
        "concurrency": 32,
        "context_len": 8192,
    },
    "I": {
        "model": "llama-3-8b",
        "cluster": "8xA100-80GB",
        "seq_len": 512,
        "lora": 16,
        "data_parallel": 8,
        "zero_stage": 3,
        "recompute": "none",
        "software": "hf-trainer",
    },
}


@dataclass(frozen=True)
class Call:
    """A call of a formula: the job that it belongs to, its arguments and its result, in words."""

    job: str
    arguments: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]  # name and value; one result has no name


def command_of(job: str) -> str:
    """Return the Python call that prices a job."""
    words = dict(JOBS[job])
    first = f'"{words.pop("model")}", "{words.pop("cluster")}"'
    more = [f"    {name}={value!r},".replace("'", '"') for name, value in words.items()]
    more += [] if "inference" in words else ["    micro_batch_size=1,"]
    return "\n".join(["planner.fit(", f"    {first},", *more, ")"])


def price(job: str) -> None:
    """Call every formula that concerns a job."""
    words = dict(JOBS[job])
    if "inference" in words:
        planner.fit(**words)
        return
    answer = planner.fit(**words, micro_batch_size=1)
    scenario, plan = answer.scenario, answer.plan
    assert answer.step_memory
    simulated_step(scenario, plan, default_layer_ranges(scenario, plan), answer.assessment)
    active_parameters(scenario.model)
    hardware_flops_per_step(scenario.model, scenario.workload, PlanTable.from_plans([plan]))


def worked_calls(functions: Collection[CodeType]) -> dict[CodeType, Call]:
    """Return a call of each of these functions that some job makes."""
    wanted = frozenset(functions)
    good: dict[CodeType, Call] = {}
    zero: dict[CodeType, Call] = {}
    job = ""

    def profile(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event != "return" or code not in wanted or code in good:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        results = tuple(shown(code.co_name, result))
        if results:
            arguments = {name: frame.f_locals[name] for name in names}
            call = Call(job, tuple(_arguments(arguments)), results)
            kept = good if any(value not in NOTHING for _, value in results) else zero
            kept.setdefault(code, call)

    for job in JOBS:
        sys.setprofile(profile)
        try:
            price(job)
        finally:
            sys.setprofile(None)
    return zero | good


NOTHING: Final = frozenset({"0", "0 B", "0 s", "False", "none"})


def _arguments(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in arguments.items():
        if (number := _number(value)) is not None:
            yield name, quantity(name, number)
        elif isinstance(value, str):
            yield name, value
        elif words := getattr(value, "name", ""):
            yield name, str(words)


def shown(name: str, result: Any) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a result with their names."""
    for part, value in list(_numbers(result))[:MOST]:
        told = "result" not in part and part and "bytes" not in name and "seconds" not in name
        yield part, quantity(part if told else name, value)


def _numbers(result: Any, name: str = "") -> Iterator[tuple[str, float | bool]]:
    if (number := _number(result)) is not None:
        yield name, number
        return
    parts: list[tuple[str, Any]] = []
    if isinstance(result, Struct):
        parts = list(structs.asdict(result).items())
    elif isinstance(result, Mapping):
        parts = [
            (" ".join(map(str, key)) if isinstance(key, tuple) else str(key), value)
            for key, value in result.items()
        ]
    elif isinstance(result, tuple) and hasattr(result, "_asdict"):
        parts = list(result._asdict().items())
    elif isinstance(result, tuple | list):
        parts = [(f"result {number}", value) for number, value in enumerate(result, start=1)]
    for part, value in parts:
        yield from _numbers(value, f"{name} {part}".strip())


def _number(value: Any) -> float | bool | None:
    """Return a number, or that of a column whose rows are alike."""
    if isinstance(value, bool | int | float | np.number | np.bool_ | np.ndarray):
        values = np.asarray(value)
        if values.size and values.dtype.kind in "bif" and np.all(values == values.flat[0]):
            first = values.flat[0].item()
            return first if np.isfinite(first) else None
    return None


def quantity(name: str, value: float | bool) -> str:
    """Format a number in the unit that its name says.

    >>> quantity("saved_bytes_per_token", 98304.0), quantity("pass_seconds", 0.0125)
    ('96.0 KiB', '12.5 ms')
    >>> quantity("ranks", 8), quantity("attention_flops", 6.7e7), quantity("share", 0.16667)
    ('8', '6.7e+07', '0.1667')
    """
    if isinstance(value, bool):
        return str(value)
    if "seconds" in name and "seconds_per" not in name:
        return format_seconds(value) if value else "0 s"
    if ("bytes" in name or name.endswith("size")) and value >= 1024:
        return format_bytes(value)
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"
