"""``trainer_state.json`` and printed logs of the Trainer of transformers.

Source of the format: huggingface/transformers src/transformers/trainer_utils.py (``speed_metrics``:
train_runtime, train_samples_per_second, train_steps_per_second; ``TrainerMemoryTracker``:
train_mem_gpu_peaked_delta and others, with skip_memory_metrics=False) and
src/transformers/trainer_callback.py (``TrainerState``).
"""

from __future__ import annotations

import json
from typing import Any, Final

from planner.observation.logs.readings import Readings, numbers

RATE: Final = r"'?train_steps_per_second'?\s*[=:]\s*'?([\d.]+)"


def is_trainer_state(document: Any) -> bool:
    """Whether a JSON document is a trainer_state.json."""
    return isinstance(document, dict) and "log_history" in document and "global_step" in document


def read_trainer_state(document: dict[str, Any]) -> Readings:
    """Read a trainer_state.json: the time of all steps, warm-up and evaluation included."""
    entries = [one for one in document["log_history"] if isinstance(one, dict)]
    readings = Readings("Hugging Face Trainer")
    for entry in entries:
        if entry.get("train_steps_per_second"):
            readings.step_seconds = [1.0 / float(entry["train_steps_per_second"])]
        before = entry.get("before_init_mem_gpu", 0) + entry.get("init_mem_gpu_alloc_delta", 0)
        if "train_mem_gpu_peaked_delta" in entry:
            trained = before + entry.get("train_mem_gpu_alloc_delta", 0)
            readings.allocated = float(trained + entry["train_mem_gpu_peaked_delta"])
    size = document.get("train_batch_size")
    if isinstance(size, int):
        readings.cells["micro_batch_size"] = size
    return readings


def is_trainer_log(lines: list[str]) -> bool:
    """Whether a log has the Trainer's last line of metrics."""
    return any("train_steps_per_second" in line for line in lines)


def read_trainer_log(lines: list[str]) -> Readings:
    """Read the printed metrics of the Trainer."""
    rates = numbers(RATE, lines)
    return Readings("Hugging Face Trainer", step_seconds=[1.0 / rate for rate in rates if rate])


def parse_json(text: str) -> Any:
    """Return a JSON document; None for other texts."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
