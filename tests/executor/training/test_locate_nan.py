"""Values that are not finite: the rank, the pass and the module are named; no weight is touched."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.parallel.pipeline import Channels
from executor.processes.fork import run_forked
from executor.training.locate_nan import locate_nonfinite
from executor.training.trainer import Trainer
from tests.executor.tiny import random_batch, tiny

pytestmark = pytest.mark.distributed

TENSOR = Plan(1, 2, 1, sequence_parallel=True, num_microbatches=2)
PIPELINE = Plan(1, 1, 2, num_microbatches=2)
DATA = Plan(2, 1, 1, zero_stage=3, num_microbatches=2)
ZERO_BUBBLE = Plan(1, 1, 2, pipeline_schedule="zero_bubble", num_microbatches=4)
NAN = float("nan")


def _module(trainer: Trainer, name: str) -> Any:
    (found,) = [s.get_submodule(name) for s in trainer.stages if _has(s, name)]
    return found


def _has(stage: Any, name: str) -> bool:
    return any(name == known for known, _ in stage.named_modules())


def _weight(trainer: Trainer) -> None:
    (shard,) = [h for h in trainer.shards if h.name == "model.layers.1.mlp.up_proj.weight"]
    shard.local.detach()[0] = NAN


def _output(trainer: Trainer) -> None:
    """A norm inside a layer divides by zero."""
    norm = _module(trainer, "model.layers.1.post_attention_layernorm")
    norm.register_forward_hook(lambda module, inputs, output: output / torch.zeros(()))


def _gradient(trainer: Trainer) -> None:
    """The gradient of a norm's output is not finite."""

    def after(module: Any, inputs: Any, output: Any) -> Any:
        output.register_hook(lambda gradient: gradient / torch.zeros(()))
        return output

    _module(trainer, "model.layers.1.input_layernorm").register_forward_hook(after)


def _mask(trainer: Trainer) -> None:
    """Infinities that vanish again in layer 0, and true ones in layer 1."""

    def after(module: Any, inputs: Any, output: Any) -> Any:
        return output + torch.log(torch.zeros(())).exp()

    _module(trainer, "model.layers.0.input_layernorm").register_forward_hook(after)
    _output(trainer)


def _once(trainer: Trainer) -> None:
    """A fault that does not come again."""
    calls = []

    def after(module: Any, inputs: Any, output: Any) -> Any:
        calls.append(1)
        return output * NAN if len(calls) == 4 else output  # the second step's last micro-batch

    _module(trainer, "model.layers.1").register_forward_hook(after)


def _message(trainer: Trainer) -> None:
    """A message between the stages comes spoiled."""
    receive = Channels.receive

    def spoiled(self: Any, *arguments: Any) -> Any:
        wait = receive(self, *arguments)
        return lambda: wait() + torch.full((), NAN)

    Channels.receive = spoiled  # type: ignore[method-assign]


def _run(rank: int, file: PlanFile, spoil: Any, where: int) -> dict[str, Any]:
    trainer = Trainer(file, seed=1)
    spoil_later = spoil in (_once,)
    if spoil_later and rank == where:
        spoil(trainer)
    trainer.step(random_batch(file))
    if rank == where and not spoil_later:
        spoil(trainer)
    before = [float(h.local.detach().nansum()) for h in trainer.shards]
    batch = random_batch(file, 1)
    result = trainer.step(batch)
    assert result.failed
    found = locate_nonfinite(trainer, batch)
    assert before == [float(h.local.detach().nansum()) for h in trainer.shards]
    return {"words": found[0].describe() if found else "", "ranks": sorted({f.rank for f in found})}


def _named(plan: Plan, spoil: Any, rank: int, **options: Any) -> dict[str, Any]:
    file = tiny(plan, "qwen3", num_layers=2, precision="fp32", **options)
    ranks = run_forked(_run, plan.world_size, file, spoil, rank)
    assert all(found == ranks[0] for found in ranks)
    return ranks[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [TENSOR, PIPELINE, DATA], ids=["tensor", "pipeline", "data"])
def test_a_spoiled_weight_is_named(plan: Plan):
    found = _named(plan, _weight, 1)
    assert found["ranks"] == [1]
    words = "on rank 1 weight of model.layers.1.mlp.up_proj is not finite itself"
    assert found["words"] == words


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("plan", [TENSOR, PIPELINE, DATA], ids=["tensor", "pipeline", "data"])
def test_the_forward_pass_is_named(plan: Plan, recompute: str):
    from dataclasses import replace

    found = _named(replace(plan, recompute=recompute), _output, 1)
    assert found["ranks"] == [1]
    assert found["words"].startswith(
        "it arises on rank 1 in the forward pass of micro-batch 1 in model.layers.1"
    )
    assert "div gives" in found["words"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "plan", [TENSOR, PIPELINE, DATA, ZERO_BUBBLE], ids=["tensor", "pipeline", "data", "zero bubble"]
)
def test_the_backward_pass_is_named(plan: Plan):
    found = _named(plan, _gradient, 1)
    assert found["ranks"] == [1]
    assert found["words"].startswith(
        "it arises on rank 1 in the backward pass of micro-batch 1 in model.layers.1: div gives"
    )


@pytest.mark.slow
def test_an_infinity_that_is_meant_is_not_blamed():
    found = _named(DATA, _mask, 1)
    assert "model.layers.1.post_attention_layernorm: div gives" in found["words"]


@pytest.mark.slow
def test_a_fault_that_does_not_come_again_is_said_to_be_one():
    found = _named(DATA, _once, 1)
    assert "cannot be reproduced" in found["words"]
    assert "gradient" in found["words"]


@pytest.mark.slow
def test_a_spoiled_message_is_told_from_a_spoiled_computation():
    found = _named(PIPELINE, _message, 1)
    assert found["words"].startswith(
        "it arrives on rank 1 in the forward pass of micro-batch 1 in model.layers.1 (its input)"
    )


@pytest.mark.slow
def test_weights_that_are_too_large_for_the_precision_are_named():
    def large(trainer: Trainer) -> None:
        (shard,) = [h for h in trainer.shards if h.name == "model.layers.0.mlp.up_proj.weight"]
        if shard.local.numel():
            shard.local.detach()[0] = 1e6

    plan = DATA
    file = tiny(plan, "qwen3", num_layers=2, precision="fp16")
    found = run_forked(_run, 2, file, large, 1)[0]
    assert "model.layers.0.mlp.up_proj.weight is not finite in float16" in found["words"]


def test_where_nothing_is_wrong_nothing_is_named():
    file = tiny(Plan(), num_layers=1)

    def check(rank: int) -> bool:
        trainer = Trainer(file)
        batch = random_batch(file)
        trainer.step(batch)
        norm = dist.get_world_size()
        return locate_nonfinite(trainer, batch) == [] and norm == 1

    assert run_forked(check, 1) == [True]
