"""Host memory: the update there gives the same bits, and what layers save comes back unchanged."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.ops import offload_activations as offload
from executor.processes.fork import run_forked
from executor.training import offloaded_optimizer
from executor.training.compiled import check_compilable
from executor.training.offloaded_optimizer import OffloadedOptimizer
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError
from tests.executor.tiny import assert_equal, random_batch, tiny, verified

pytestmark = pytest.mark.distributed


def _with_plan(file: PlanFile, **changes: Any) -> PlanFile:
    return replace(file, plan=replace(file.plan, **changes))


def _host_is_apart() -> None:
    """Copy weights and gradients also where the device is the host."""
    offloaded_optimizer.host_is_device = lambda device: False


def _train(rank: int, file: PlanFile, isolated: bool, resumed: bool = False) -> dict[str, Any]:
    """Train three steps; on demand carry moments over into another trainer before the last."""
    if isolated:
        _host_is_apart()
    trainer = Trainer(file, seed=1)
    losses = []
    for step in range(3):
        if resumed and step == 2:
            trainer = _continued(trainer)
        losses.append(trainer.step(random_batch(file, step)).loss)
    optimizer = trainer.optimizer
    states = [optimizer.state(h) for h in optimizer.shards]
    return {
        "losses": losses,
        "weights": [h.local.detach().tolist() for h in trainer.shards],
        "moments": [
            [state[name].tolist() for name in ("exp_avg", "exp_avg_sq")] for state in states
        ],
        "offloaded": isinstance(optimizer, OffloadedOptimizer),
        "apart": all(optimizer.updated[id(h)] is not h.local for h in optimizer.shards),
        "on_host": all(v.device.type == "cpu" for state in states for v in state.values()),
    }


def _continued(first: Trainer) -> Trainer:
    """Return another trainer that starts where one alone has come to."""
    weights = {h.name: h.local.detach().clone() for h in first.shards}
    second = Trainer(first.file, seed=1, start=lambda layout, pieces: weights[layout.name])
    second.restore(first.state())
    for old, new in zip(first.optimizer.shards, second.optimizer.shards, strict=True):
        second.optimizer.restore(new, first.optimizer.state(old))
    return second


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", [Plan(num_microbatches=2), Plan(2, zero_stage=3)])
def test_the_update_on_the_host_gives_the_same_bits(plan: Plan, precision: Any):
    file = tiny(plan, precision=precision, optimizer="adamw")
    moved = _with_plan(file, offload="optimizer")
    plain = run_forked(_train, plan.world_size, file, False)
    assert not any(rank["offloaded"] for rank in plain)
    for isolated in (False, True):
        found = run_forked(_train, plan.world_size, moved, isolated)
        for one, other in zip(found, plain, strict=True):
            assert one["offloaded"]
            assert one["apart"] is isolated
            assert one["on_host"]
            for what in ("losses", "weights", "moments"):
                assert one[what] == other[what], what


@pytest.mark.slow
def test_moments_are_carried_over_as_from_a_checkpoint():
    file = _with_plan(tiny(Plan(), optimizer="adamw"), offload="optimizer")
    (whole,) = run_forked(_train, 1, file, True)
    (resumed,) = run_forked(_train, 1, file, True, True)
    assert resumed == whole


# --- activations ----------------------------------------------------------------------------------

QUICK: dict[str, tuple[Plan, dict[str, Any]]] = {
    "tensor": (Plan(1, 2, sequence_parallel=True, offload="activations"), {}),
    "split, full": (
        Plan(1, 1, 2, 2, "zbv", recompute="full", num_microbatches=3, offload="activations"),
        {"tied": True},
    ),
}
SLOW: dict[str, tuple[Plan, dict[str, Any]]] = {
    "zero 3": (Plan(2, zero_stage=3, num_microbatches=2, offload="activations"), {}),
    "split, zero 3": (
        Plan(2, 1, 2, 1, "zero_bubble", 3, num_microbatches=3, offload="activations"),
        {"family": "qwen3"},
    ),
    "selective": (
        Plan(1, 2, 2, recompute="selective", num_microbatches=2, offload="activations"),
        {"family": "gpt2", "tied": True},
    ),
    "ring": (Plan(context_parallel=2, offload="activations"), {"family": "qwen3"}),
    "experts": (
        Plan(2, expert_parallel=2, num_microbatches=2, offload="optimizer+activations"),
        {"family": "mixtral"},
    ),
    "window": (Plan(1, 2, offload="activations"), {"family": "mistral"}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", QUICK)
def test_parity(name: str):
    plan, options = QUICK[name]
    assert_equal(verified(tiny(plan, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_parity_of_every_way_to_share(name: str):
    plan, options = SLOW[name]
    assert_equal(verified(tiny(plan, **options), documents=name == "window"))


def _bringing_back_nothing() -> None:
    copy = offload._OffloadedStorage.copy_to_host

    def lost(self: Any) -> torch.Tensor:
        going = copy(self)
        self.on_host.zero_()
        return going

    offload._OffloadedStorage.copy_to_host = lost


def _from_the_start_of_the_storage() -> None:
    tensor = offload._SavedTensor.tensor
    offload._SavedTensor.tensor = lambda self: tensor(self._replace(offset=0))


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [_bringing_back_nothing, _from_the_start_of_the_storage])
def test_another_content_is_seen(prepare: Any):
    """So the tensors that backward reads are those that came back."""
    file = tiny(Plan(offload="activations"), "phi3")
    assert not verified(file, prepare).gradient_difference <= 1e-3
    assert_equal(verified(file))


def test_what_leaves_and_what_stays():
    weight = torch.nn.Parameter(torch.randn(32, 32))
    table, x = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
    kept: list[Any] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0] @ tensors[1]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            kept.extend(ctx.saved_tensors)
            return gradient @ kept[1].T, kept[0].T @ gradient, None, None

    small = torch.randn(4)
    output = offload.run_offloaded(
        lambda: Product.apply(x, weight, table, small), x.device, [weight, table]
    )
    output.sum().backward()
    same = [
        k.data_ptr() == t.data_ptr() for k, t in zip(kept, (x, weight, table, small), strict=True)
    ]
    assert same == [False, True, True, True]
    assert all(torch.equal(k, t) for k, t in zip(kept, (x, weight, table, small), strict=True))


def test_views_of_a_storage_leave_once():
    x = torch.randn(8, 96, requires_grad=True)
    hidden: list[torch.Tensor] = []
    copies: list[int] = []

    def layer() -> torch.Tensor:
        a, b, c = (x * 2.0).split(32, dim=1)
        hidden.extend((a, b, c))
        return a * b * c

    copy = offload._OffloadedStorage.copy_to_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            offload._OffloadedStorage, "copy_to_host", lambda self: copies.append(1) or copy(self)
        )
        output = offload.run_offloaded(layer, x.device, [x])
    assert len(copies) == 2  # the three views, and the product of the first two
    output.sum().backward()
    a, b, c = (part.detach() for part in hidden)
    assert torch.allclose(x.grad, 2.0 * torch.cat([b * c, a * c, a * b], dim=1))  # type: ignore[arg-type]


def test_nothing_is_in_flight_after_a_backward_pass(monkeypatch: pytest.MonkeyPatch):
    """The last layer's tensors are on the device, and leave it with autograd's references."""
    monkeypatch.setattr(offload, "HOST", "meta")
    x = torch.randn(32, 32, requires_grad=True)
    output = offload.run_offloaded(lambda: (x * 2.0).exp(), x.device, [x])
    kept = [one.on_device for one in offload._copies.storages]
    assert [each.numel() for each in kept] == [4 * 32 * 32]
    output.sum().backward()
    assert not offload._copies.storages
    assert torch.equal(x.grad, 2.0 * (x * 2.0).exp())  # type: ignore[arg-type]


def test_compiled_layers_are_refused():
    with pytest.raises(InputError, match="offload activations"):
        check_compilable(Plan(offload="activations"))
    check_compilable(Plan(offload="optimizer"))
