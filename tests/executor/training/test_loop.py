"""The loop: resumes exactly, stops everywhere at once, samples, evaluates, and tells it all."""

from typing import Any

import pytest
import torch.distributed as dist

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.config.learning_rate import LearningRate
from executor.data.corpus import MarkovCorpus
from executor.processes.fork import run_forked
from executor.training.evaluation import EvaluationHook
from executor.training.loop import TrainingHook, TrainingLoop
from executor.training.trainer import StepResult, Trainer
from tests.executor.tiny import tiny

pytestmark = pytest.mark.distributed

TWO = Plan(2, zero_stage=2)
PIPELINE = Plan(1, 1, 2, num_microbatches=2)
STEPS = 6


def _corpus(file: PlanFile) -> MarkovCorpus:
    return MarkovCorpus(file.model.vocab_size, file.workload.seq_len, 7)


def _trainer(file: PlanFile, **options: Any) -> Trainer:
    rate = LearningRate(0.05, "cosine", steps=STEPS, warmup_steps=2)
    return Trainer(file, seed=2, learning_rate=rate, **options)


class _Recorded(TrainingHook):
    def __init__(self, trainer: Trainer, stop_at: int | None = None) -> None:
        self.trainer, self.stop_at = trainer, stop_at
        self.calls: list[Any] = []

    def before_run(self) -> None:
        self.calls.append("before run")

    def before_step(self) -> None:
        self.calls.append(("before", self.trainer.steps_done))
        if self.trainer.steps_done == self.stop_at and dist.get_rank() == 1:
            self.trainer.stop_requested = True

    def after_step(self, result: StepResult) -> None:
        self.calls.append(("after", self.trainer.steps_done))

    def after_run(self, status: str) -> None:
        self.calls.append(status)


def _stopped(rank: int, file: PlanFile) -> dict[str, Any]:
    trainer = _trainer(file)
    hook = _Recorded(trainer, stop_at=2)
    status = TrainingLoop(
        trainer, _corpus(file), steps=STEPS, emit=lambda event: None, hooks=[hook]
    ).run()
    return {"status": status, "calls": hook.calls}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [TWO, PIPELINE], ids=["data", "pipeline"])
def test_one_rank_stops_all_after_the_same_step(plan: Plan):
    steps = [[["before", n], ["after", n + 1]] for n in range(3)]
    expected = ["before run", *(call for step in steps for call in step), "stopped"]
    for found in run_forked(_stopped, 2, tiny(plan, num_layers=2)):
        assert found["status"] == "stopped"
        assert found["calls"] == expected


def _events(rank: int, file: PlanFile, first: int, **options: Any) -> list[dict[str, Any]]:
    """Train from a step on and return the events of rank 0."""
    trainer = _trainer(file)
    corpus, events = _corpus(file), []
    for step in range(first):  # what a checkpoint would restore
        trainer.step(corpus.batch(step, file.plan.global_batch_size))
    hooks = [EvaluationHook(trainer, corpus, events.append, every=4, batches=1)]
    loop = TrainingLoop(
        trainer, corpus, steps=STEPS, emit=events.append, hooks=hooks, sample_every=2, **options
    )
    assert loop.run() == "finished"
    return events


DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "embd_pdrop": 0.1}


def test_a_run_that_goes_on_is_the_run_that_never_stopped():
    """Batches, dropout and learning rate are functions of the step."""
    file = tiny(TWO, "gpt2", num_layers=1, optimizer="adamw", **DROPOUT)
    whole = run_forked(_events, 2, file, 0)[0]
    rest = run_forked(_events, 2, file, 3)[0]
    keys = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    full = [[event[key] for key in keys] for event in whole if event["kind"] == "step"]
    late = [[event[key] for key in keys] for event in rest if event["kind"] == "step"]
    assert [row[0] for row in late] == [4, 5, 6]
    assert late == full[3:]


@pytest.mark.slow
def test_rank_0_tells_everything_and_the_others_nothing():
    first, second = run_forked(_events, 2, tiny(TWO, num_layers=1), 0)
    assert second == []
    kinds = [event["kind"] for event in first]
    assert kinds[:3] == ["start", "step", "measured"]
    assert kinds.count("step") == STEPS
    assert first[0]["first_step"] == 0
    (measured,) = [event for event in first if event["kind"] == "measured"]
    assert [rank["rank"] for rank in measured["ranks"]] == [0, 1]
    steps = [event for event in first if event["kind"] == "step"]
    assert [step["timed"] for step in steps] == [False, False, True, True, True, True]
    for step in steps:
        assert set(step["phases"]) == {"data", "forward_backward", "gradients", "optimizer"}
        assert step["seconds"] == pytest.approx(sum(step["phases"].values()))
    sampled = [step for step in steps if "ranks" in step]
    assert [step["step"] for step in sampled] == [3, 5]
    for step in sampled:
        for rank in step["ranks"]:
            assert rank["memory_bytes"] > 1e7
            assert 0 < sum(rank["exposed_seconds"].values()) < step["seconds"]
    found = [(e["step"], e["loss"] > 0) for e in first if e["kind"] == "evaluation"]
    assert found == [(4, True), (6, True)]


def _unclipped(rank: int, file: PlanFile, max_norm: float | None) -> float:
    trainer = Trainer(file, seed=2, learning_rate=0.5, max_grad_norm=max_norm)
    trainer.step(_corpus(file).batch(0, file.plan.global_batch_size))
    return sum(float(h.local.detach().double().sum()) for h in trainer.shards)


def test_no_clipping_is_not_clipping_to_nothing():
    file = tiny(Plan(), num_layers=1)
    free, wide, start = (run_forked(_unclipped, 1, file, n)[0] for n in (None, 1e9, 1e-30))
    assert free == wide
    assert abs(free - start) > 1e-6
