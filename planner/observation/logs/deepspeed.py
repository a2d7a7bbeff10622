"""Logs of DeepSpeed: the lines of its throughput timer.

Source of the format: deepspeedai/DeepSpeed deepspeed/utils/timer.py (``ThroughputTimer.stop``).
deepspeed/runtime/config.py (``print``: dots up to 29 characters, none behind longer names;
``bfloat16_config`` with ``enabled=True``, ``bfloat16_enabled`` in older ones). Read in 0.19.8.
``batch_size`` of its rates is the global batch; gigabytes are of 2**30 bytes.
"""

from __future__ import annotations

import re
from typing import Any, Final

from planner.observation.logs.readings import Readings, largest, numbers

GIB: Final = 2.0**30
CURRENT: Final = r"CurrSamplesPerSec=([\d.]+)"
# keys of the printed configuration ("  train_batch_size ............. 256"): column
PRINTED: Final = {
    r"train_batch_size \.+ (\d+)": "global_batch_size",
    r"train_micro_batch_size_per_gpu \.* ?(\d+)": "micro_batch_size",
    r"world_size \.+ (\d+)": "num_gpus",
    r"zero_optimization_stage \.+ (\d)": "zero_stage",
}
PRECISIONS: Final = {
    r"bfloat16_enabled \.+ True|bfloat16_config \.+ .*\benabled=True": "bf16",
    r"fp16_enabled \.+ True|\bfloat16_config \.+ .*\benabled=True": "fp16",
}


def is_deepspeed(lines: list[str]) -> bool:
    """Whether a log has the lines of DeepSpeed's throughput timer."""
    return any("RunningAvgSamplesPerSec=" in line for line in lines)


def read_deepspeed(lines: list[str]) -> Readings:
    """Read a log of DeepSpeed; rates become step times with the global batch."""
    cells: dict[str, Any] = {}
    for pattern, column in PRINTED.items():
        if values := numbers(pattern, lines):
            cells[column] = int(values[-1])
    for pattern, precision in PRECISIONS.items():
        if any(re.search(pattern, line) for line in lines):
            cells["precision"] = precision
    return Readings(
        trainer="DeepSpeed",
        samples_per_second=numbers(CURRENT, lines),
        allocated=largest(r"MaxMemAllocated=([\d.]+)GB", lines, GIB),
        cells=cells,
    )
