"""Runs of tiny models, for tests."""

from dataclasses import asdict
from typing import Any

from torch import nn

from cost_models.plan_file import PlanFile
from executor.dtypes import local_tensor
from executor.processes.fork import run_forked
from executor.training.trainer import Trainer
from executor.verify.gather import gathered
from executor.verify.parity import Verification, random_batch, verify
from executor.verify.tiny_models import CONFIGS, SEQ_LEN, tiny

__all__ = ["CONFIGS", "SEQ_LEN", "random_batch", "tiny"]  # imported to be imported from here


def verified(
    file: PlanFile, prepare: Any = None, *, documents: bool = False, memory: bool = False
) -> Verification:
    """Run ``verify`` on the plan's ranks; ``prepare`` is called in each of them first."""
    arguments = (file, prepare, documents, memory)
    answer = run_forked(_verify, file.plan.world_size, *arguments, timeout=120)[0]
    return Verification(**answer)


def first_step(rank: int, file: PlanFile) -> dict[str, Any]:
    """Return loss and norm of a step, and the sums of this rank's whole tensors after it."""
    trainer = Trainer(file, seed=5, learning_rate=0.1)
    result = trainer.step(random_batch(file))
    whole = {
        h.name: float(h.local.detach().double().sum())
        for h in trainer.shards
        if h.layout.shard_dim is None
    }
    return {"loss": result.loss, "norm": result.gradient_norm, "whole": whole}


def weight_difference(trainer: Trainer, model: nn.Module) -> float:
    """Return the largest relative difference of a matrix or vector, 0 where none is gathered."""
    worst = 0.0
    for name, full in gathered(trainer, lambda shard: local_tensor(shard.parameter.detach())):
        if full is not None:
            expected = model.get_parameter(name).detach()
            worst = max(worst, float((full - expected).norm() / expected.norm()))
    return worst


def assert_equal(found: Verification) -> None:
    """Assert that values are those of a single process, and traffic and FLOP the predicted ones."""
    assert found.passed, found
    assert found.flops["counted"] == found.flops["predicted"]


def _verify(
    rank: int, file: PlanFile, prepare: Any, documents: bool, memory: bool
) -> dict[str, Any] | None:
    if prepare is not None:
        prepare()
    found = verify(file, seed=1, batches=2, documents=documents, memory=memory)
    return None if found is None else asdict(found)
