"""Logs of torchtitan.

Source of the format: pytorch/torchtitan torchtitan/components/metrics.py (``MetricsProcessor.log``:
"step: 10  loss: ...  memory: 29.90GiB(31.43%)  tps: 7,500  tflops: ...  mfu: ..."; memory is the
peak of reserved bytes, tps tokens a second of one device) and torchtitan/train.py ("Model llama3 8B
size: 8,030,261,248 total parameters", "local batch size 1, global batch size 8, ... sequence length
8192"); distributed/activation_checkpoint.py ("Applied FullAC activation checkpointing", before 0.3
"Applied full activation checkpointing"). Checked against a run of torchtitan 0.3.0.
"""

from __future__ import annotations

import re
from typing import Any, Final

from planner.observation.logs.readings import Readings, largest, numbers

GIB: Final = 2.0**30
STEP: Final = r"\btps:\s*([\d,.]+)"
SELECTIVE: Final = r"Applied (?:selective|SelectiveAC) activation checkpointing"
FULL: Final = r"Applied (?:full|FullAC) activation checkpointing"
STATED: Final = {
    r"local batch size:? (\d+)": "micro_batch_size",
    r"global batch size:? (\d+)": "global_batch_size",
    r"sequence length:? (\d+)": "seq_len",
}


def is_torchtitan(lines: list[str]) -> bool:
    """Whether a log has torchtitan's lines of metrics."""
    return any("step:" in line and "tps:" in line and "memory:" in line for line in lines)


def read_torchtitan(lines: list[str]) -> Readings:
    """Read a log of torchtitan."""
    cells: dict[str, Any] = {}
    for pattern, column in STATED.items():
        if values := numbers(pattern, lines):
            cells[column] = int(values[-1])
    if any(re.search(SELECTIVE, line) for line in lines):
        cells["recompute"] = "selective"
    elif any(re.search(FULL, line) for line in lines):
        cells["recompute"] = "full"
    compiled = any("TransformerBlock with torch.compile" in line for line in lines)
    return Readings(
        trainer="torchtitan, compiled" if compiled else "torchtitan",
        tokens_per_second_per_gpu=numbers(STEP, lines),
        reserved=largest(r"memory:\s*([\d.]+)GiB", lines, GIB),
        cells=cells,
    )
