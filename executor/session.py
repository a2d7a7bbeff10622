"""What every rank does in a run: train, measure the last step, tell rank 0.

Only rank 0 reports: ``emit`` gets one event a step, and the result holds what all ranks measured.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from cost_models.plan_file import PlanFile
from executor.data import Corpus
from executor.data.batch import Batch
from executor.measure import CommunicationCounter
from executor.memory import MemoryTracker
from executor.mesh import leave
from executor.train import StepResult, Trainer
from executor.verify import TOLERANCE, verify
from hardware_profiles.errors import RunError


@dataclass(frozen=True, slots=True)
class Training:
    """How long and how to train."""

    steps: int
    seed: int
    learning_rate: float
    weight_decay: float
    max_grad_norm: float


Emit = Callable[[dict[str, Any]], None]


def train(file: PlanFile, corpus: Corpus, training: Training, emit: Emit) -> dict[str, Any] | None:
    """Train on this rank; return what was measured on rank 0 and None on the others.

    The last step is an ordinary training step that is watched operator by operator, which slows it:
    its time does not count, nor does that of the first step (caches are cold).
    """
    trainer = Trainer(
        file,
        seed=training.seed,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
    )
    records = []
    own: dict[str, Any] = {}
    for step in range(training.steps):
        batch = corpus.batch(step, file.plan.global_batch_size, trainer.rows)
        if step == training.steps - 1:
            result, own = measured_step(trainer, batch)
        else:
            result = trainer.step(batch)
        records.append(_record(step, result, file.workload.tokens_per_step))
        if dist.get_rank() == 0:
            emit(records[-1])
        if not math.isfinite(result.loss):
            raise RunError(
                f"step {step + 1}: the loss is {result.loss} "
                f"(learning_rate = {training.learning_rate:g}; try a smaller one)"
            )
    ranks = gather_json(own, trainer.device)
    answer = _answer(file, records, ranks, trainer.device) if dist.get_rank() == 0 else None
    trainer.close()
    return answer


def proof(file: PlanFile, seed: int) -> dict[str, Any] | None:
    """Compare with the single process; return the differences on rank 0 and None on the others."""
    found = verify(file, seed=seed)
    processes = dist.get_world_size()
    leave()
    if found is None:
        return None
    answer = {**asdict(found), "tolerance": TOLERANCE, "processes": processes}
    for name, value in answer.items():
        if isinstance(value, float) and not math.isfinite(value):
            answer[name] = sys.float_info.max  # JSON has no infinity
    return {
        **answer,
        "passed": found.passed,
        "collective_bytes": {
            side: round(sum(row[f"{side}_bytes"] for row in found.traffic))
            for side in ("predicted", "counted")
        },
        "unexpected_traffic": [row for row in found.traffic if not as_predicted(row)],
    }


def as_predicted(row: dict[str, Any]) -> bool:
    """Return whether a rank moved what was predicted (of the fullest rank, where sizes differ)."""
    short = row["predicted_bytes"] - row["counted_bytes"]
    same_count = row["counted_count"] == row["predicted_count"]
    return bool(same_count and (short == 0 or (short > 0 and not row["fullest"])))


def measured_step(trainer: Trainer, batch: Batch) -> tuple[StepResult, dict[str, Any]]:
    """Train one step; return what this rank communicated and the peak of its memory."""
    parameters = [p for stage in trainer.stages for p in stage.parameters()]
    memory = MemoryTracker(parameters, [trainer.optimizer.inner], device=trainer.device.type)
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


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """Return the values of all ranks, on every rank; they travel as JSON text."""
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(int(n) for n in lengths)
    padded = torch.nn.functional.pad(text, (0, longest - len(text)))
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded)
    return [
        json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(texts, lengths, strict=True)
    ]


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers of a run."""
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


def _record(step: int, result: StepResult, tokens: int) -> dict[str, Any]:
    seconds = sum(result.seconds.values())
    return {
        "step": step + 1,
        "loss": result.loss if math.isfinite(result.loss) else None,
        "gradient_norm": result.gradient_norm if math.isfinite(result.gradient_norm) else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def _answer(
    file: PlanFile, records: list[dict[str, Any]], ranks: list[Any], device: torch.device
) -> dict[str, Any]:
    timed = [record["seconds"] for record in records[1:-1]]
    seconds = statistics.median(timed) if timed else None
    return {
        "environment": environment(device),
        "steps": records,
        "measured": {
            "step_seconds": seconds,
            "timed_steps": len(timed),
            "tokens_per_second": file.workload.tokens_per_step / seconds if seconds else None,
            "ranks": ranks,
        },
    }
