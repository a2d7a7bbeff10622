"""Runs of tiny models, for tests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cost_models.plan_file import PlanFile
from executor.data.batch import Batch
from executor.processes.fork import run_forked
from executor.verify import parity as verify_module
from executor.verify.parity import Verification, verify
from executor.verify.tiny_models import CONFIGS, SEQ_LEN, tiny

__all__ = ["CONFIGS", "SEQ_LEN", "random_batch", "tiny", "verified"]


def random_batch(file: PlanFile, seed: int = 0) -> Batch:
    """Return one global batch."""
    return verify_module.random_batch(file, seed)


def verified(
    file: PlanFile, prepare: Any = None, *, documents: bool = False, memory: bool = False
) -> Verification:
    """Run ``verify`` on the plan's ranks; ``prepare`` is called in each of them first."""
    arguments = (file, prepare, documents, memory)
    answer = run_forked(_verify, file.plan.world_size, *arguments, timeout=120)[0]
    return Verification(**answer)


def _verify(
    rank: int, file: PlanFile, prepare: Any, documents: bool, memory: bool
) -> dict[str, Any] | None:
    if prepare is not None:
        prepare()
    found = verify(file, seed=1, batches=2, documents=documents, memory=memory)
    return None if found is None else asdict(found)
