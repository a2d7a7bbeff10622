"""On a GPU the executor trains as on a CPU; skipped where there is none."""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.child import in_child
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.verify.tiny_models import CONFIGS
from tests.executor.tiny import random_batch, tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU"),
    pytest.mark.filterwarnings("default"),
]

_DROPOUT = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "opt": ("dropout",),
    "t5": ("dropout_rate",),
}


def _losses(file: PlanFile, device: str) -> list[float]:
    """Return losses and gradient norms of three steps; runs in a process of its own."""
    import torch

    from executor.training.trainer import Trainer

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    trainer = Trainer(file, device=place, seed=1, learning_rate=1e-2)
    found: list[float] = []
    for number in range(3):
        result = trainer.step(random_batch(file, number))
        found += [result.loss, result.gradient_norm]
    return found


def _compared(file: PlanFile) -> tuple[list[float], list[float]]:
    gpu, cpu = (in_child(_losses, file, device, timeout=90.0) for device in ("cuda", "cpu"))
    return gpu, cpu


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_has_the_losses_of_a_cpu(family: str) -> None:
    # a GPU draws other values to drop
    dropout = dict.fromkeys(_DROPOUT.get(family, ()), 0.0)
    gpu, cpu = _compared(tiny(Plan(), family, precision="fp32", num_layers=2, **dropout))
    assert gpu == pytest.approx(cpu, rel=2e-3)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(recompute="full"),
        Plan(recompute="selective", num_microbatches=2),
        Plan(offload="activations"),
        Plan(offload="optimizer"),
    ],
    ids=lambda plan: f"{plan.recompute}-{plan.offload}-{plan.num_microbatches}",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_technique_has_the_losses_of_a_cpu(plan: Plan, precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "optimizer": "adamw", "num_layers": 2}
    gpu, cpu = _compared(tiny(plan, "llama", **options))
    assert gpu == pytest.approx(cpu, rel=2e-3 if precision == "fp32" else 0.1)
