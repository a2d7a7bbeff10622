"""Readings of a log of any trainer that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_text
from planner.observation.logs.deepspeed import is_deepspeed, read_deepspeed
from planner.observation.logs.hugging_face import (
    is_trainer_log,
    is_trainer_state,
    parse_json,
    read_trainer_log,
    read_trainer_state,
)
from planner.observation.logs.megatron import is_megatron, is_nemo, read_megatron, read_nemo
from planner.observation.logs.readings import Readings, plain_lines
from planner.observation.logs.torchtitan import is_torchtitan, read_torchtitan

# Megatron-DeepSpeed prints the lines of both: Megatron's have the step time
TRAINERS: Final = (
    (is_nemo, read_nemo),
    (is_megatron, read_megatron),
    (is_deepspeed, read_deepspeed),
    (is_torchtitan, read_torchtitan),
    (is_trainer_log, read_trainer_log),
)
KNOWN: Final = "Megatron-LM, NeMo, DeepSpeed, torchtitan, trainer_state.json of Hugging Face"


def read_log(path: Path) -> Readings:
    """Read a log; the trainer is known by its lines."""
    text = read_text(path, "a log")
    document = parse_json(text)
    lines = plain_lines(text)
    readings = None
    if is_trainer_state(document):
        readings = read_trainer_state(document)
    else:
        readings = next((read(lines) for known, read in TRAINERS if known(lines)), None)
    failed = any("Tried to allocate" in line for line in lines)
    if readings is None and failed:
        readings = Readings("a torch loop")
    if readings is None:
        raise InputError(f"{path}: no lines of a known trainer ({KNOWN})")
    readings.out_of_memory = failed
    if readings.is_empty:
        raise InputError(f"{path}: a log of {readings.trainer} without step times or memory")
    return readings
