"""HSDP: shards inside a group of data ranks, replicas of them across groups."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cost_models.communication.volumes import rank_traffic
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.prediction import scenario_of
from executor.parallel import mesh
from executor.parallel.mesh import rank_groups
from executor.processes.fork import run_forked
from tests.executor.tiny import assert_equal, random_batch, tiny, verified

pytestmark = pytest.mark.distributed

QUICK = Plan(4, zero_stage=2, num_microbatches=2, dp_replicate=2)
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "zero 1": (Plan(4, zero_stage=1, num_microbatches=3, dp_replicate=2), {"family": "qwen3"}),
    "zero 3, tp, sp": (
        Plan(4, 2, sequence_parallel=True, zero_stage=3, num_microbatches=2, dp_replicate=2),
        {"family": "llama", "tied": True},
    ),
    "zero 3, full recomputation, interleaved": (
        Plan(4, 1, 2, 2, "interleaved_1f1b", 3, False, "full", 1, 4, dp_replicate=2),
        {"family": "mistral"},
    ),
    "zero 3, weight gradients later, tied": (
        Plan(4, 1, 2, 2, "zbv", 3, num_microbatches=4, dp_replicate=2),
        {"family": "llama", "tied": True},
    ),
    "zero 2, three shards, uneven rows, tied over stages": (
        Plan(6, 1, 1, zero_stage=2, num_microbatches=2, dp_replicate=2),
        {"family": "gpt2", "tied": True, "vocab_size": 131},
    ),
}


@pytest.mark.slow
def test_replicas_of_shards_train_as_one_process():
    assert_equal(verified(tiny(QUICK, num_layers=2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str):
    plan, options = CASES[name]
    assert_equal(verified(tiny(plan, num_layers=max(2, plan.num_stages), **options)))


def _without_replicas() -> None:
    """Share the weights inside each group, and never add the groups up."""
    original = mesh.ProcessGrid.sharding_mesh
    mesh.ProcessGrid.sharding_mesh = lambda grid: original(
        replace(grid, plan=replace(grid.plan, dp_replicate=1, data_parallel=grid.plan.dp_shard))
    )


def _with_replicas_at_every_micro_batch() -> None:
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_requires_all_reduce = lambda *_: None


@pytest.mark.slow
def test_replicas_that_are_not_added_up_are_seen():
    found = verified(tiny(QUICK, num_layers=2), _without_replicas)
    assert found.gradient_difference > 1e-3


@pytest.mark.slow
def test_a_reduction_over_replicas_at_every_micro_batch_is_seen_in_the_traffic():
    found = verified(tiny(QUICK, num_layers=2), _with_replicas_at_every_micro_batch)
    assert not found.traffic_is_predicted


def test_the_last_axis_is_the_fastest():
    plan = Plan(4, 2, 2, dp_replicate=2, zero_stage=1, context_parallel=2)
    assert rank_groups(plan, "tensor")[:2] == [[0, 1], [2, 3]]
    assert rank_groups(plan, "context")[0] == [0, 2]
    assert rank_groups(plan, "shard")[0] == [0, 4]
    assert rank_groups(plan, "shard", "context")[0] == [0, 2, 4, 6]
    assert rank_groups(plan, "replicate")[0] == [0, 8]
    assert rank_groups(plan, "pipeline")[0] == [0, 16]
    everyone = sorted(rank for line in rank_groups(plan, "shard", "context") for rank in line)
    assert everyone == list(range(32))


def _norm_and_weights(rank: int, plan: Plan) -> tuple[float, float]:
    """Train two steps in fp32 and return the gradient norm and a sum over this rank's weights."""
    from executor.training.trainer import Trainer

    file = tiny(plan, num_layers=2, precision="fp32", optimizer="adamw")
    trainer = Trainer(file, learning_rate=1e-3)
    for seed in range(2):
        result = trainer.step(random_batch(file, seed))
    return result.gradient_norm, float(sum(h.local.detach().double().sum() for h in trainer.shards))


@pytest.mark.slow
def test_replicas_stay_equal_and_the_norm_counts_each_part_once():
    plan = replace(QUICK, micro_batch_size=1)
    found = run_forked(_norm_and_weights, 4, plan, timeout=120)
    whole = run_forked(_norm_and_weights, 1, Plan(micro_batch_size=8), timeout=120)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert torch.isclose(torch.tensor(found[0][0]), torch.tensor(whole[0][0]), rtol=1e-4)


def test_traffic_by_hand():
    """Each replica group moves the weights once; shards are added up once, in fp32."""
    file = tiny(QUICK, num_layers=2, precision="bf16")
    (rank,) = even_split_contents(file.model, 1, 1)
    found = rank_traffic(RankView(scenario_of(file), PlanTable.from_plans([QUICK]), rank))
    numel, groups = file.model.num_parameters, 2 + 2
    values = {key: (float(t.count[0]), float(t.size[0])) for key, t in found.items()}
    assert values["data", "all_gather"] == (groups, 2 * numel)
    assert values["data", "reduce_scatter"] == (2 * groups, 2 * 4 * numel)
    assert values["replicate", "all_reduce"] == (groups, 4 * numel / 2)
