"""Training: mixed precision, clipping, dropout, warm-up, and what a step refuses."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.config.learning_rate import LearningRate
from executor.data.batch import IGNORED, Batch
from executor.model.families import decoder_layer
from executor.processes.fork import run_forked
from executor.training.traffic import counted_traffic, is_as_predicted
from executor.training.trainer import Trainer
from executor.verify.parity import exact
from executor.verify.reference import reference_model
from hardware_profiles.errors import InputError, ShardplanError
from tests.executor.tiny import first_step, random_batch, tiny, weight_difference

pytestmark = pytest.mark.distributed

MIXED = Plan(2, 2, 1, zero_stage=2, sequence_parallel=True, recompute="selective")
PIPELINED = Plan(2, 1, 2, zero_stage=3, recompute="full", micro_batch_size=2, num_microbatches=4)


def _losses(rank: int, file: PlanFile, steps: int) -> list[float]:
    trainer = Trainer(file, seed=3, learning_rate=1e-2)
    batch = random_batch(file)
    return [trainer.step(batch).loss for _ in range(steps)]


@pytest.mark.slow
def test_bf16_learns_and_agrees_with_fp32():
    file = tiny(MIXED, "qwen3", precision="bf16", optimizer="adamw", num_layers=2)
    mixed = run_forked(_losses, 4, file, 12)
    assert all(losses == mixed[0] for losses in mixed)  # every rank reports the same
    assert mixed[0][-1] < mixed[0][0] - 1.0
    single = replace(Plan(), micro_batch_size=2)
    exact_file = tiny(single, "qwen3", precision="fp32", optimizer="adamw", num_layers=2)
    (full,) = run_forked(_losses, 1, exact_file, 12)
    assert mixed[0] == pytest.approx(full, rel=0.05)


def _traffic(rank: int, file: PlanFile) -> list[dict[str, Any]]:
    trainer = Trainer(file)
    batch = random_batch(file)
    trainer.step(batch)
    return counted_traffic(trainer, batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("plan", "family", "precision"),
    [
        pytest.param(MIXED, "gpt2", "bf16", id="tensor-gpt2"),
        pytest.param(MIXED, "qwen3", "fp16", id="tensor-qwen3-fp16"),
        pytest.param(PIPELINED, "gpt2", "fp16", id="pipeline-gpt2-fp16"),
        pytest.param(PIPELINED, "qwen3", "bf16", id="pipeline-qwen3"),
    ],
)
def test_the_traffic_of_mixed_precision_is_predicted(plan: Plan, family: str, precision: str):
    file = tiny(plan, family, tied=True, precision=precision, optimizer="adamw", num_layers=2)
    rows = run_forked(_traffic, plan.world_size, file)[0]
    assert rows
    assert all(map(is_as_predicted, rows)), [r for r in rows if r["fullest"]]


def _clipped(rank: int, file: PlanFile, max_norm: float) -> dict[str, Any] | None:
    """Return norm and largest weight difference to a single process that clips the same way."""
    trainer = Trainer(file, seed=1, learning_rate=0.5, weight_decay=0.1, max_grad_norm=max_norm)
    batch = random_batch(file)
    result = trainer.step(batch)
    model: Any = reference_model(file, 1)
    logits = model(input_ids=batch.inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.SGD(groups, lr=0.5).step()
    worst = weight_difference(trainer, model)
    return {"norm": result.gradient_norm, "expected": float(norm), "worst": worst}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_norm", [0.05, 1e9])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 2, 2, zero_stage=3, sequence_parallel=True, num_microbatches=2),
        Plan(2, 1, 2, zero_stage=0, num_microbatches=2),
        Plan(1, 2, 1),
    ],
    ids=["all axes", "replicated", "tensor"],
)
def test_clipping_uses_the_norm_of_the_whole_model(plan: Plan, max_norm: float):
    file = tiny(plan, "qwen3", tied=True, num_layers=2)
    found = run_forked(_clipped, plan.world_size, file, max_norm)[0]
    assert found["norm"] == pytest.approx(found["expected"], rel=1e-12)
    assert found["worst"] < 1e-12


DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "embd_pdrop": 0.1}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_replayed_and_keeps_whole_tensors_equal(sequence_parallel: bool):
    found = {}
    # with it attention draws apart from the rest, where ranks do not do so anyway
    again = ("selective", "full", *(["selective_ops"] if not sequence_parallel else []))
    for recompute in ("none", *again):
        plan = Plan(1, 2, sequence_parallel=sequence_parallel, recompute=recompute)
        file = tiny(plan, "gpt2", num_layers=2, **DROPOUT)
        first, second = run_forked(first_step, 2, file)
        assert first == second
        found[recompute] = first
    for recompute in again:
        assert found[recompute]["loss"] == found["none"]["loss"]
        assert found[recompute]["norm"] == pytest.approx(found["none"]["norm"], rel=1e-12)
    without = run_forked(first_step, 1, exact(tiny(Plan(), "gpt2", num_layers=2, **DROPOUT)))[0]
    assert found["none"]["loss"] != pytest.approx(without["loss"], rel=1e-6)


def _first_step_once(rank: int, file: PlanFile) -> dict[str, Any]:
    """The same without any recomputation; what is drawn is the same."""
    decoder_layer.checkpointed_selectively = lambda run, *arguments, **_: run(*arguments)  # type: ignore[assignment]
    return first_step(rank, file)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_dropout_is_replayed_around_what_is_kept(kernel: str):
    plan = Plan(1, 2, sequence_parallel=True, recompute="selective_ops")
    file = tiny(plan, "gpt2", num_layers=2, attention_kernel=kernel, **DROPOUT)
    once, twice = (run_forked(run, 2, file)[0] for run in (_first_step_once, first_step))
    assert twice["loss"] == once["loss"]
    assert twice["norm"] == pytest.approx(once["norm"], rel=1e-12)


def _warm_up(rank: int, file: PlanFile) -> list[float]:
    trainer = Trainer(file, learning_rate=LearningRate(1.0, warmup_steps=4))
    rates = []
    for _ in range(6):
        trainer.step(random_batch(file))
        rates.append(trainer.optimizer.inner.param_groups[0]["lr"])
    return rates


def test_the_learning_rate_warms_up():
    assert run_forked(_warm_up, 1, tiny(Plan(), num_layers=1))[0] == [0.25, 0.5, 0.75, 1, 1, 1]


def _wrong_batch(rank: int, file: PlanFile) -> None:
    batch, trainer = random_batch(file), Trainer(file)
    with pytest.raises(InputError, match=r"shape \[\(1, 15\)\], .* \(rows, seq_len\) = \(1, 16\)"):
        trainer.step(Batch.whole(batch.inputs[:, 1:], batch.labels[:, 1:]))
    other = 1 - rank
    with pytest.raises(InputError, match=rf"rows {rank} to {rank + 1} of a batch .* {other} to"):
        trainer.step(batch.rows(other, other + 1))
    assert trainer.accumulate(batch) == trainer.accumulate(batch.rows(rank, rank + 1))


def test_a_batch_of_another_shape_is_refused():
    run_forked(_wrong_batch, 2, tiny(Plan(data_parallel=2), num_layers=1))


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(ShardplanError, match=r"needs 4 ranks .* but 2 were started"):
        run_forked(_losses, 2, tiny(Plan(data_parallel=4), num_layers=1), 1)


def _ignored(rank: int, file: PlanFile) -> dict[str, float]:
    """Train on labels of which some do not count."""
    batch = random_batch(file)
    batch.labels[:, ::3] = IGNORED
    batch.labels[0] = IGNORED
    batch = Batch.whole(batch.inputs, batch.labels)
    trainer = Trainer(file, seed=1)
    result = trainer.step(batch.rows(trainer.rows.start, trainer.rows.stop))
    model: Any = reference_model(file, 1)
    logits = model(input_ids=batch.inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return {**asdict(result), "expected": loss.detach().item(), "expected_norm": float(norm)}


def test_the_loss_is_the_mean_over_the_labels_that_count():
    plan = Plan(2, 2, num_microbatches=2)
    found = run_forked(_ignored, 4, tiny(plan, num_layers=1))[0]
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-12)
    assert found["gradient_norm"] == pytest.approx(found["expected_norm"], rel=1e-12)
