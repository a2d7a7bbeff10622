"""What every rank does in a run: train, or prove that it trains as a single process does."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from cost_models.plan_file import PlanFile
from executor.data import Corpus
from executor.loop import Emit, Loop
from executor.mesh import leave
from executor.train import Trainer
from executor.training import Training
from executor.verify import TOLERANCE, verify


def train(file: PlanFile, corpus: Corpus, training: Training, emit: Emit) -> str:
    """Train on this rank; return how the run ended. Rank 0 emits what is to be kept."""
    trainer = Trainer(
        file,
        seed=training.seed,
        learning_rate=training.learning_rate,
        betas=training.betas,
        epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
    )
    loop = Loop(trainer, corpus, steps=training.steps, emit=emit)
    status = loop.run()
    trainer.close()
    return status


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
