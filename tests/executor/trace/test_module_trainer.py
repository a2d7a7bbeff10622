"""Any module over data ranks: gradients and weights of one process, for every ZeRO stage."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.plan.plan import Plan
from executor.processes.fork import run_forked
from executor.trace.module_factory import load_factory
from executor.trace.module_trainer import ModuleTrainer, check_plan, module_of
from hardware_profiles.errors import InputError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


def net() -> Net:
    return Net()


not_a_module = "text"


def _batch(rows: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 6, dtype=torch.float64, generator=random),
        "y": torch.randint(3, (rows,), generator=random),
    }


def _trained(rank: int, plan: Plan) -> dict[str, Any]:
    trainer = ModuleTrainer(
        net,
        plan,
        precision="fp64",
        optimizer="sgd",
        learning_rate=0.5,
        weight_decay=0.0,
        max_grad_norm=0.3,
        seed=3,
    )
    seen = [trainer.step(_batch(8, seed)) for seed in range(3)]
    weights = [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for p in trainer.module.parameters()
    ]
    return {"seen": seen, "weights": [w.flatten().tolist() for w in weights]}


def _alone() -> dict[str, Any]:
    torch.manual_seed(3)
    module = net().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    seen = []
    for seed in range(3):
        loss = module(**_batch(8, seed))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        seen.append((float(loss.detach()), float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen, "weights": [p.detach().flatten().tolist() for p in module.parameters()]}


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan",
    [
        *(Plan(2, zero_stage=z, micro_batch_size=2, num_microbatches=2) for z in range(4)),
        Plan(4, zero_stage=2, num_microbatches=2, dp_replicate=2),
        Plan(2, zero_stage=3, micro_batch_size=2, num_microbatches=2, recompute="full"),
    ],
)
def test_losses_norms_and_weights_are_those_of_one_process(plan: Plan):
    expected = _alone()
    for found in run_forked(_trained, plan.data_parallel, plan, timeout=60):
        for mine, theirs in zip(found["seen"], expected["seen"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
        for mine, theirs in zip(found["weights"], expected["weights"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_parameters_are_counted_and_factories_found():
    module = module_of(load_factory(f"module:{__name__}:net"))
    assert sum(p.numel() for p in module.parameters()) == 42 + 36 + 21
    for name, message in (
        ("net", "module:package.path:factory expected"),
        ("module:no.such:net", "no.such cannot be imported"),
        (f"module:{__name__}:nothing", "has no nothing"),
        (f"module:{__name__}:not_a_module", "not a function"),
    ):
        with pytest.raises(InputError, match=message):
            load_factory(name)
    with pytest.raises(InputError, match="returns str"):
        module_of(lambda: "text")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor_parallel=2),
        Plan(pipeline_parallel=2, num_microbatches=2),
        Plan(context_parallel=2),
        Plan(recompute="selective"),
        Plan(recompute="full", recompute_layers=1),
    ],
)
def test_other_axes_are_refused_by_name(plan: Plan):
    with pytest.raises(
        InputError, match=r"(tensor|pipeline|context)_parallel = 2|recompute(_layers)? = "
    ):
        check_plan(plan)
