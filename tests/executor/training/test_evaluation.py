"""Evaluation: the loss of the single process on every layout, and training is not disturbed."""

from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.data.corpus import MarkovCorpus
from executor.processes.fork import run_forked
from executor.training.evaluation import EvaluationResult, evaluate
from executor.training.trainer import Trainer
from executor.verify.reference import reference_model
from tests.executor.tiny import tiny

pytestmark = pytest.mark.distributed

BATCHES = 3
PLANS = {
    "tensor": Plan(2, 2, zero_stage=3, sequence_parallel=True, num_microbatches=2),
    "pipeline": Plan(1, 2, 2, num_microbatches=3),
    "virtual": Plan(
        2, 1, 2, virtual_stages=2, pipeline_schedule="interleaved_1f1b", num_microbatches=4
    ),
    "v": Plan(1, 1, 2, virtual_stages=2, pipeline_schedule="zbv", num_microbatches=4),
    "context": Plan(1, 1, 1, context_parallel=2, context_parallel_method="ring"),
}


def _corpus(file: PlanFile) -> MarkovCorpus:
    return MarkovCorpus(file.model.vocab_size, file.workload.seq_len, 7)


def _both(rank: int, file: PlanFile) -> dict[str, float]:
    """Return the loss of the ranks and of the single process, and what is counted."""
    trainer = Trainer(file, seed=1)
    corpus = _corpus(file)
    found = evaluate(trainer, corpus, BATCHES)
    model: Any = reference_model(file, 1)
    total, tokens = 0.0, 0
    for batch in corpus.evaluation(file.plan.global_batch_size, batches=BATCHES):
        with torch.no_grad():
            logits = model.eval()(input_ids=batch.inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
        )
        total, tokens = total + float(loss), tokens + batch.tokens
    return {"loss": found.loss, "expected": total / tokens, "tokens": found.tokens, "all": tokens}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_loss_is_that_of_the_single_process(plan: Plan):
    for found in run_forked(_both, plan.world_size, tiny(plan, "qwen3", tied=True)):
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-12)
        assert found["tokens"] == found["all"]


DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "embd_pdrop": 0.1}


def _weights(rank: int, file: PlanFile, every: int, kernel: str = "flash") -> dict[str, Any]:
    """Train a few steps with dropout, evaluating in between or not; return what came of it."""
    trainer = Trainer(file, seed=2, learning_rate=0.05)
    corpus = _corpus(file)
    losses, found = [], []
    for step in range(4):
        losses.append(trainer.step(corpus.batch(step, file.plan.global_batch_size)).loss)
        if every and step % every == 0:
            found.append(evaluate(trainer, corpus, 2).loss)
            assert evaluate(trainer, corpus, 2).loss == found[-1]  # nothing random
    weights = [float(h.local.detach().double().sum()) for h in trainer.shards]
    return {"losses": losses, "weights": weights, "found": found}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 2, zero_stage=3, num_microbatches=2, recompute="full"),
        Plan(2, 1, 2, zero_stage=1, num_microbatches=2, recompute="selective"),
        Plan(2, zero_stage=0),
    ],
    ids=["zero 3", "pipeline", "replicated"],
)
def test_training_is_not_disturbed(plan: Plan, kernel: str):
    file = tiny(plan, "gpt2", num_layers=2, attention_kernel=kernel, **DROPOUT)
    plain = run_forked(_weights, plan.world_size, file, 0)
    watched = run_forked(_weights, plan.world_size, file, 1)
    for without, with_evaluation in zip(plain, watched, strict=True):
        assert without["losses"] == with_evaluation["losses"]
        assert without["weights"] == with_evaluation["weights"]
        assert with_evaluation["found"] == watched[0]["found"]  # every rank knows it


def test_perplexity_never_overflows():
    assert EvaluationResult(0.0, 1).perplexity == 1.0
    assert EvaluationResult(1e6, 1).perplexity == float("inf")
