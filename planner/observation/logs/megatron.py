"""Logs of Megatron-LM, and of NeMo and Megatron-Bridge, which print other lines.

Source of the formats: NVIDIA/Megatron-LM megatron/training/training.py (``training_log``) and
megatron/training/utils.py (``report_memory``); arguments as ``_print_args`` of
megatron/training/arguments.py prints them. NVIDIA/NeMo nemo/lightning/pytorch/callbacks/
progress_printer.py and nemo/utils/exp_manager.py (``TimingCallback``). Megatron-Bridge prints a
memory report of its own, in decimal gigabytes (a log shows 80.5 on a card of 85.0 GB, 79.1 GiB).
"""

from __future__ import annotations

import re
from typing import Any, Final

from planner.observation.logs.readings import Readings, largest, numbers

MIB: Final = 2.0**20
GB: Final = 1e9
ITERATION: Final = r"elapsed time per iteration \(ms\):\s*([\d.]+)"
NEMO_STEP: Final = r"train_step_timing in s\"?\s*[=:]\s*([\d.]+)"
_ARGUMENT: Final = re.compile(r"^\s*(?:\[default\d*\]:)?\s*([a-z_0-9]+) \.{3,} (\S.*?)\s*$")
# printed argument: column
ARGUMENTS: Final = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "padded_vocab_size": "vocab_size",
    "seq_length": "seq_len",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "data_parallel_size": "data_parallel",
    "world_size": "num_gpus",
    "num_experts": "num_experts",
    "moe_router_topk": "experts_per_token",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
}
# size, as the line before the arguments names it: column
SIZES: Final = {
    "world size": "num_gpus",
    "data-parallel size": "data_parallel",
    "context-parallel size": "context_parallel",
    "tensor-model-parallel size": "tensor_parallel",
    "pipeline-model-parallel size": "pipeline_parallel",
}
FLAGS: Final = {"swiglu": "gated_mlp", "sequence_parallel": "sequence_parallel"}


def is_megatron(lines: list[str]) -> bool:
    """Whether a log has Megatron-LM's lines."""
    return any("elapsed time per iteration (ms)" in line for line in lines)


def read_megatron(lines: list[str]) -> Readings:
    """Read a log of Megatron-LM (or a fork); the last memory report counts."""
    cells = {**_sizes(lines), **_arguments(lines)}
    if batch := numbers(r"global batch size:\s*(\d+)", lines):
        cells["global_batch_size"] = int(batch[-1])
    return Readings(
        trainer="Megatron-LM",
        step_seconds=[ms / 1000.0 for ms in numbers(ITERATION, lines)],
        allocated=_peak("allocated", lines),
        reserved=_peak("reserved", lines),
        cells=cells,
    )


def _peak(kind: str, lines: list[str]) -> float | None:
    """Return the largest peak of both memory reports in bytes."""
    found = largest(rf"max {kind}:\s*([\d.]+)", lines, MIB)
    bridge = largest(rf"mem-max-{kind}-gigabytes:\s*([\d.]+)", lines, GB)
    return found if bridge is None else max(bridge, found or 0.0)


def _sizes(lines: list[str]) -> dict[str, Any]:
    """Return the columns of the line of sizes that stands before the arguments."""
    line = next((line for line in lines if "using world size:" in line), "")
    found = {name: re.search(rf"(?<!-){name}: (\d+)", line) for name in SIZES}
    return {SIZES[name]: int(one[1]) for name, one in found.items() if one is not None}


def _arguments(lines: list[str]) -> dict[str, Any]:
    """Return the columns of the arguments that are printed before the run."""
    given = {found[1]: found[2] for line in lines if (found := _ARGUMENT.match(line))}
    cells: dict[str, Any] = {
        column: int(given[name])
        for name, column in ARGUMENTS.items()
        if given.get(name, "").isdecimal()
    }
    cells |= {column: int(given[name] == "True") for name, column in FLAGS.items() if name in given}
    if "virtual_pipeline_model_parallel_size" in given:
        text = given["virtual_pipeline_model_parallel_size"]
        cells |= {"virtual_stages": int(text)} if text.isdecimal() else {}
    if "untie_embeddings_and_output_weights" in given:
        cells["tie_embeddings"] = int(given["untie_embeddings_and_output_weights"] != "True")
    if given.get("use_distributed_optimizer") == "True":
        cells["zero_stage"] = 1
    for name in ("bf16", "fp16"):
        if given.get(name) == "True":
            cells["precision"] = name
    granularity = given.get("recompute_granularity")
    if granularity is not None:
        cells["recompute"] = "none" if granularity == "None" else granularity
    return cells


def is_nemo(lines: list[str]) -> bool:
    """Whether a log has NeMo's step timing."""
    return any(re.search(NEMO_STEP, line) for line in lines)


def read_nemo(lines: list[str]) -> Readings:
    """Read a log of NeMo: its progress bar, its printed steps, or its JSON lines."""
    cells: dict[str, Any] = {}
    if batch := numbers(r"global_batch_size\"?\s*[=:]\s*(\d+)", lines):
        cells["global_batch_size"] = int(batch[-1])
    return Readings(
        trainer="NeMo",
        step_seconds=numbers(NEMO_STEP, lines),
        allocated=largest(r"peak_memory_usage\"?\s*[=:]\s*([\d.]+)", lines, 1.0),
        cells=cells,
    )
