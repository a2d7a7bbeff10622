"""Measurement of one step on every rank, and a description of the environment."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.counters.collectives_and_flops import CommunicationCounter
from executor.counters.exposed_waits import ExposedCommunication
from executor.counters.live_tensors import Hint, MemoryTracker
from executor.counters.pass_times import PassTimes
from executor.data.batch import Batch
from executor.parallel.data_parallel import gradient_reducer
from executor.parallel.pipeline import unobserved
from executor.training.trainer import StepResult, Trainer


def memory_tracker(trainer: Trainer, hint: Hint | None = None) -> MemoryTracker:
    """Return the memory tracker of a trainer; enter it around whole steps."""
    parameters = [p for stage in trainer.stages for p in stage.parameters()]
    inner = [trainer.optimizer.inner]
    tracker = MemoryTracker(parameters, inner, device=trainer.device.type, hint=hint)
    sums = filter(None, map(gradient_reducer, trainer.stages))
    tracker.tag("gradients", (buffer for found in sums for buffer in found.buffers()))
    return tracker


def measured_step(trainer: Trainer, batch: Batch) -> tuple[StepResult, dict[str, Any]]:
    """Train one step; return its result, communication and peak memory on this rank."""
    memory = memory_tracker(trainer)
    groups = trainer.grid.groups()
    with CommunicationCounter(groups) as counter, memory:
        result = trainer.step(batch)
    return result, {
        "rank": dist.get_rank(),
        "stage": trainer.grid.rank("pipeline"),
        "memory": memory.result().to_dict(),
        "communication": counter.records(),
        # where one axis spans all ranks, its group may be the world's, and counts as that axis
        "world_axis": next(
            axis for axis in groups if groups[axis].group_name == groups["world"].group_name
        ),
    }


def sampled_step(trainer: Trainer, batch: Batch) -> tuple[StepResult, dict[str, Any]]:
    """Train one step; return its result, and this rank's passes, waits and memory."""
    times = PassTimes(trainer.device)
    trainer.pipeline.observe = times.begin
    try:
        with ExposedCommunication(trainer.device) as exposed:
            result = trainer.step(batch)
    finally:
        trainer.pipeline.observe = unobserved
    return result, {
        "exposed_seconds": exposed.seconds(),
        "memory_bytes": memory_in_use(trainer.device),
        "timeline": {
            "rank": dist.get_rank(),
            "stage": trainer.grid.rank("pipeline"),
            "passes": times.passes(),
            "waits": times.waits(exposed.waits),
        },
    }


def memory_in_use(device: torch.device) -> int | None:
    """Return the allocator's peak bytes on a GPU, or the process's resident memory on a CPU.

    None where the system does not report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def environment(device: torch.device) -> dict[str, Any]:
    """Return the hardware and software of a run."""
    gpu = device.type == "cuda"
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "launcher": "torchrun" if dist.is_torchelastic_launched() else "fork",
        "processes": dist.get_world_size(),
        "threads_per_process": torch.get_num_threads(),
    }
