"""Optimizers of a plan against the whole module with the whole optimizer, and 16-bit weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import rank_memories
from cost_models.pricing.prediction import scenario_of
from executor.processes.fork import run_forked
from executor.training import optimizer as optimizer_module
from executor.training.lion import Lion
from executor.training.optimizer import MOMENTUM, total_norm
from executor.training.traffic import counted_traffic, is_as_predicted
from executor.training.trainer import Trainer
from executor.verify.reference import reference_model
from hardware_profiles.errors import InputError
from tests.executor.tiny import random_batch, tiny, weight_difference

distributed = pytest.mark.distributed
STEPS, RATE, DECAY, BETAS = 3, 1e-2, 0.1, (0.9, 0.99)


class WrittenLion(torch.optim.Optimizer):
    """Lion, element by element as the paper writes it, to hold the other one against."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first, second = BETAS
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].get("m", torch.zeros_like(p))
                c = first * m + (1 - first) * p.grad
                p -= group["lr"] * (torch.sign(c) + group["weight_decay"] * p)
                self.state[p]["m"] = second * m + (1 - second) * p.grad


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda g: torch.optim.SGD(g, lr=RATE, momentum=MOMENTUM),
    "adam": lambda g: torch.optim.Adam(g, lr=RATE, betas=BETAS),
    "lion": lambda g: WrittenLion(g, lr=RATE),
}


def _worst(rank: int, file: PlanFile) -> float:
    """Return the largest difference of a weight to the whole module's after some steps."""
    options: Any = {"learning_rate": RATE, "betas": BETAS, "weight_decay": DECAY}
    trainer = Trainer(file, seed=1, max_grad_norm=None, **options)
    model: Any = reference_model(file, 1)
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    whole = WHOLE[file.workload.optimizer](groups)
    for number in range(STEPS):
        batch = random_batch(file, number)
        trainer.step(batch)
        model.zero_grad()
        logits = model(input_ids=batch.inputs).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
        whole.step()
    return weight_difference(trainer, model)


@pytest.mark.slow
@pytest.mark.sampled(1)
@distributed
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 2, zero_stage=3, sequence_parallel=True, num_microbatches=2),
        Plan(2, 1, 2, zero_stage=1, num_microbatches=2, offload="optimizer"),
    ],
    ids=["sharded", "pipeline"],
)
def test_shards_are_updated_as_the_whole_is(plan: Plan, name: str) -> None:
    file = tiny(plan, "qwen3", tied=True, num_layers=2, optimizer=name)
    assert max(run_forked(_worst, plan.world_size, file)) < 1e-11


def _with_decay_in_the_gradient(name: str, groups: Any, **options: Any) -> Any:
    return torch.optim.AdamW(groups, betas=options["betas"], eps=options["epsilon"], fused=True)


def _worst_with_another(rank: int, file: PlanFile) -> float:
    optimizer_module.torch_optimizer = _with_decay_in_the_gradient
    return _worst(rank, file)


@pytest.mark.slow
@distributed
def test_another_update_is_seen() -> None:
    """The test above sees what is small: a decay of the weights instead of the gradients."""
    file = tiny(Plan(2, zero_stage=3), "qwen3", num_layers=2, optimizer="adam")
    assert max(run_forked(_worst_with_another, 2, file)) > 1e-4


# --- single tensors -------------------------------------------------------------------------------


def test_lion_is_what_the_paper_writes() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(5, 7, dtype=torch.float64), torch.randn(4, 5, 7).double()
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    first = Lion([{"params": [ours], "weight_decay": DECAY}], betas=BETAS)
    second = WrittenLion([{"params": [theirs], "weight_decay": DECAY}], lr=RATE)
    for gradient in gradients:
        first.param_groups[0]["lr"] = RATE
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def _after_a_skipped_first_step(made: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """Return the weight after a step that changes nothing, and one with a gradient of ones."""
    weight.grad = torch.full_like(weight, float("inf"))
    made.found_inf, made.grad_scale = torch.ones(()), None  # type: ignore[attr-defined]
    made.step()
    weight.grad = torch.ones_like(weight)
    made.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    made.step()
    return weight.detach()


def test_a_first_step_that_changes_nothing_leaves_momentum_at_zero() -> None:
    """torch alone makes buffers without values then; asked to be deterministic, it fills in NaN."""
    ours, alone = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    try:
        made = optimizer_module.torch_optimizer(
            "sgd_momentum", [{"params": [ours], "lr": 1.0}], betas=BETAS, epsilon=1e-8
        )
        assert torch.equal(_after_a_skipped_first_step(made, ours), -torch.ones(8))
        plain = torch.optim.SGD([alone], lr=1.0, momentum=MOMENTUM, fused=True)
        assert not torch.equal(_after_a_skipped_first_step(plain, alone), -torch.ones(8))
    finally:
        torch.use_deterministic_algorithms(False)


def test_norms_of_16_bit_gradients_are_added_up_in_fp32() -> None:
    gradients = [torch.ones(63, dtype=torch.bfloat16) for _ in range(10)]
    exact = (10 * 63) ** 0.5
    assert float(total_norm(gradients)) == pytest.approx(exact, rel=1e-6)
    assert float(torch.nn.utils.get_total_norm(gradients)) != pytest.approx(exact, rel=1e-4)


# --- weights in 16 bits alone ---------------------------------------------------------------------


def pure(plan: Plan, **options: Any) -> PlanFile:
    file = tiny(plan, "qwen3", tied=True, num_layers=2, precision="bf16", **options)
    return replace(file, workload=replace(file.workload, master_weights=False))


def _pure(rank: int, file: PlanFile) -> dict[str, Any]:
    trainer = Trainer(file, seed=3, learning_rate=3e-3)  # at 1e-2 roundings grow into steps
    batch = random_batch(file)
    losses = [trainer.step(batch).loss for _ in range(8)]
    states = [trainer.optimizer.state(h) for h in trainer.shards]
    moments = [v for state in states for v in state.values() if v.dim()]
    return {
        "losses": losses,
        "dtypes": sorted({str(t.dtype) for t in [*(h.local for h in trainer.shards), *moments]}),
        "weights": sum(h.local.numel() * h.local.element_size() for h in trainer.shards),
        "states": sum(m.numel() * m.element_size() for m in moments),
        "traffic": counted_traffic(trainer, batch),
    }


@pytest.mark.slow
@distributed
@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, zero_stage=3, num_microbatches=2),
        Plan(2, 2, zero_stage=1, sequence_parallel=True),
    ],
    ids=["zero 3", "tensor"],
)
def test_16_bit_weights_learn_and_take_what_is_priced(plan: Plan) -> None:
    file = pure(plan, optimizer="adamw")
    one = Plan(num_microbatches=plan.global_batch_size)
    found = run_forked(_pure, plan.world_size, file)
    (alone,) = run_forked(_pure, 1, pure(one, optimizer="adamw"))
    losses = found[0]["losses"]
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(alone["losses"], rel=0.01)
    for rank in found:
        assert rank["dtypes"] == ["torch.bfloat16"]
        assert rank["states"] == 2 * rank["weights"]
    assert all(map(is_as_predicted, found[0]["traffic"]))
    ((parts, _),) = rank_memories(scenario_of(file), plan, file.layer_ranges)
    if plan.zero_stage == 3:
        assert found[0]["weights"] == pytest.approx(float(parts.weights), rel=0.01)
        assert found[0]["states"] == pytest.approx(float(parts.optimizer), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "muon"}, "optimizer = muon"),
        ({"optimizer": "adafactor"}, "only adamw, sgd, sgd_momentum, adam, lion"),
        ({"optimizer": "paged_adamw_8bit"}, "optimizer = paged_adamw_8bit"),
        ({"precision": "tf32"}, "precision = tf32"),
        ({"master_weights": False, "precision": "fp16"}, "only with bf16"),
        ({"optimizer_state_precision": "bf16"}, "optimizer_state_precision = bf16 (only auto)"),
        ({"gradient_precision": "bf16"}, "gradient_precision = bf16 (only auto)"),
    ],
)
def test_what_is_priced_only_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    file = tiny(Plan(), precision="bf16")
    file = replace(file, workload=replace(file.workload, **changes))
    with pytest.raises(InputError) as caught:
        Trainer(file)
    assert said in str(caught.value)
