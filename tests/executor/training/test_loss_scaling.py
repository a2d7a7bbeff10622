"""fp16: the scale follows torch's rules, all ranks alike; overflowing steps change nothing."""

from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.processes.fork import run_forked
from executor.training import loss_scaling as scaling
from executor.training.loss_scaling import MAX_SKIPPED, LossScaler
from executor.training.trainer import Trainer
from tests.executor.tiny import random_batch, tiny


def test_the_scale_is_that_of_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", 3)
    ours = LossScaler()
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflowed in [False, False, True, False, False, False, False, True, True, False]:
        assert ours.scale == theirs.get_scale()
        theirs.scale(weight.sum()).backward()
        weight.grad = torch.full((1,), float("inf") if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=overflowed)
    assert ours.scale == theirs.get_scale()
    assert ours.skipped == 3
    again = LossScaler()
    again.restore(ours.state())
    assert again == ours


def test_a_scale_that_never_helps_is_given_up():
    scaler = LossScaler()
    for _ in range(MAX_SKIPPED - 1):
        scaler.update(overflowed=True)
    assert not scaler.always_overflows
    scaler.update(overflowed=True)
    assert scaler.always_overflows
    scaler.update(overflowed=False)
    assert not scaler.always_overflows


MIXED = Plan(2, 2, 1, zero_stage=2, sequence_parallel=True, num_microbatches=2)
PIPELINED = Plan(2, 1, 2, zero_stage=3, micro_batch_size=2, num_microbatches=2)


def _losses(rank: int, file: PlanFile, steps: int) -> dict[str, Any]:
    trainer = Trainer(file, seed=3, learning_rate=1e-2)
    results = [trainer.step(random_batch(file)) for _ in range(steps)]
    return {
        "losses": [r.loss for r in results],
        "norms": [r.gradient_norm for r in results],
        "skipped": trainer.scaler.skipped if trainer.scaler else 0,
    }


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("plan", [MIXED, PIPELINED], ids=["tensor", "pipeline"])
def test_fp16_learns_and_agrees_with_fp32(plan: Plan):
    file = tiny(plan, "qwen3", precision="fp16", optimizer="adamw", num_layers=2)
    ranks = run_forked(_losses, 4, file, 10)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0] - 1.0
    single = Plan(micro_batch_size=file.plan.global_batch_size)
    exact = tiny(single, "qwen3", precision="fp32", optimizer="adamw", num_layers=2)
    (full,) = run_forked(_losses, 1, exact, 10)
    assert ranks[0]["losses"] == pytest.approx(full["losses"], rel=0.01)
    assert ranks[0]["norms"][0] == pytest.approx(full["norms"][0], rel=0.005)


def _without_scale(rank: int, file: PlanFile, scale: float) -> dict[str, float]:
    trainer = Trainer(file, seed=3, max_grad_norm=None)
    assert trainer.scaler is not None
    trainer.scaler.scale = scale
    trainer.finish_gradients(trainer.accumulate(random_batch(file)))
    zeros = [float((h.gradient == 0).double().mean()) for h in trainer.shards]
    return {"zeros": sum(zeros) / len(zeros)}


@pytest.mark.distributed
def test_without_the_scale_gradients_vanish():
    """The guard is needed: gradients of a scale that is too small are zero in fp16."""
    file = tiny(Plan(), "llama", precision="fp16", num_layers=2)
    (scaled,) = run_forked(_without_scale, 1, file, 2.0**16)
    (small,) = run_forked(_without_scale, 1, file, 2.0**-12)
    assert small["zeros"] > scaled["zeros"] + 0.1


def _overflowing(rank: int, file: PlanFile) -> dict[str, Any]:
    """Train with a scale that is far too large, until one fits."""
    trainer = Trainer(file, seed=3, learning_rate=1e-2)
    assert trainer.scaler is not None
    trainer.step(random_batch(file))
    trainer.scaler.scale = 2.0**40
    state = trainer.optimizer.inner.state

    def snapshot() -> list[float]:
        values = [h.local.detach() for h in trainer.shards]
        values += [value for s in state.values() for value in s.values()]
        return [float(value.double().sum()) for value in values]

    before = snapshot()
    result = trainer.step(random_batch(file))
    after = snapshot()
    trainer.scaler.scale = 2.0**30
    while (last := trainer.step(random_batch(file))).skipped:
        pass
    return {
        "skipped_first": result.skipped,
        "failed": result.failed or last.failed,
        "loss": result.loss,
        "equal": before == after,
        "moved": snapshot() != after,
        "skipped": trainer.scaler.skipped,
        "scale": last.loss_scale,
        "steps_done": trainer.steps_done,
    }


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_that_overflows_changes_nothing_on_any_rank(optimizer: str):
    plan = Plan(2, 1, 2, zero_stage=1, num_microbatches=2)
    file = tiny(plan, "llama", precision="fp16", optimizer=optimizer, num_layers=2)
    ranks = run_forked(_overflowing, 4, file)
    assert all(rank == ranks[0] for rank in ranks)
    (found, *_) = ranks
    assert found["skipped_first"]
    assert not found["failed"]
    assert found["loss"] < 10.0
    assert found["equal"]
    assert found["moved"]
    assert found["scale"] == 2.0 ** (31 - found["skipped"])
    assert found["steps_done"] == found["skipped"] + 2
