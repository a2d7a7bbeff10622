"""The task of every rank in a run: training, or verification against a single process."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from cost_models.plan_file import PlanFile
from executor.checkpoint.agreement import on_rank_0
from executor.checkpoint.loading.initial_state import initial_state
from executor.checkpoint.options import CheckpointOptions
from executor.checkpoint.saving.manager import checkpoint_hook
from executor.config.training_options import TrainingOptions
from executor.data import Corpus
from executor.parallel.mesh import connect, disconnect, local_device
from executor.training.compiled import check_compilable, compile_layers
from executor.training.evaluation import EvaluationHook
from executor.training.loop import Emit, TrainingHook, TrainingLoop
from executor.training.step_measurement import environment
from executor.training.traffic import is_as_predicted
from executor.training.trainer import Trainer
from executor.verify.parity import TOLERANCE, verify
from hardware_profiles.errors import RunError

NO_CHECKPOINTS: Final = CheckpointOptions()
SETTLE_SECONDS: Final = 300.0  # for a checkpoint in progress when a run fails


def train(
    file: PlanFile,
    corpus: Corpus,
    training: TrainingOptions,
    emit: Emit,
    *,
    steps: int | None = None,
    evaluation: Corpus | None = None,
    saving: CheckpointOptions = NO_CHECKPOINTS,
    folder: Path | None = None,
    options: Mapping[str, Any] | None = None,
    ready: Callable[[Trainer], None] | None = None,
) -> str:
    """Train on this rank; return the final status. Rank 0 emits the events to be recorded.

    ``steps``: fewer than in the options, for a dry run. ``folder`` (of rank 0) receives the
    checkpoints; ``options`` are written into them. ``ready`` is called with the trainer before the
    first step.
    """
    if training.compile:
        check_compilable(file.plan, file.model.family, file.workload.adapter)
    device = local_device()
    connect(device, file.rank_order)
    folder = _of_rank_0(folder, device)
    begun = initial_state(saving, folder, file, corpus, options or {}, device)
    trainer = Trainer(
        file,
        seed=training.seed,
        learning_rate=training.learning_rate_schedule(),
        betas=(training.beta1, training.beta2),
        epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm or None,
        device=device,
        start=begun.start,
    )
    if ready is not None:
        ready(trainer)
    notes = [*begun.notes, *begun.finish(trainer)]
    if training.compile and (failure := compile_layers(trainer.stages, device)) is not None:
        notes.append(failure)
    if dist.get_rank() == 0:
        for note in notes:
            emit({"kind": "note", "text": note})
    hooks: list[TrainingHook] = []
    if evaluation is not None:
        every, batches = training.eval_every, training.eval_batches
        hooks.append(EvaluationHook(trainer, evaluation, emit, every=every, batches=batches))
    about = {
        "data": corpus.identity(),
        "options": dict(options or {}),
        "environment": environment(device),
    }
    saves = None if folder is None else checkpoint_hook(trainer, folder, saving, begun, about)
    loop = TrainingLoop(
        trainer,
        corpus,
        steps=training.steps if steps is None else steps,
        sample_every=training.sample_every,
        emit=emit,
        hooks=[*hooks, *([] if saves is None else [saves])],
    )
    try:
        status = loop.run()
    except RunError:  # raised on all ranks
        if saves is not None:
            saves.settle(SETTLE_SECONDS)
        raise
    trainer.close()
    return status


def _of_rank_0(folder: Path | None, device: torch.device) -> Path | None:
    name: str | None = on_rank_0(lambda: None if folder is None else str(folder), device)
    return None if name is None else Path(name)


def verification(file: PlanFile, seed: int) -> dict[str, Any] | None:
    """Compare with a single process; return the differences on rank 0 and None on the others."""
    found = verify(file, seed=seed)
    processes = dist.get_world_size()
    disconnect()
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
        "unexpected_traffic": [row for row in found.traffic if not is_as_predicted(row)],
    }
