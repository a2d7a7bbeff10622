"""Layers of several sizes: what lies beside what on the way back through a rank."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cost_models.activations.live import live_activations
from cost_models.memory.fsdp.fsdp2 import BlockPoints
from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.recomputed_layers import RecomputedLayers
from cost_models.partition.stages import NO_LAYER, LayerNeighbours, PipelineRank, contents_of_rank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import LLAMA, rank_view

DENSE, MIXED = 0, 1
CONFIG: dict[str, Any] = {
    **{key: LLAMA[key] for key in ("hidden_size", "vocab_size", "num_attention_heads")},
    "model_type": "qwen3_moe",
    "num_key_value_heads": LLAMA["num_attention_heads"],
    "head_dim": 16,
    "num_hidden_layers": 6,
    "intermediate_size": 4096,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0, 1],
}


def sample(**changes: Any) -> ModelSpec:
    return model_spec({**CONFIG, **changes}, name="x")


def rank_of(model: ModelSpec, recomputed: RecomputedLayers | None = None) -> PipelineRank:
    ranges = [(0, model.num_layers)]
    return contents_of_rank(model, ranges, [0], 0, recomputed=recomputed or RecomputedLayers())


def test_layers_of_one_size_have_no_neighbours_to_tell_apart() -> None:
    assert rank_of(sample(mlp_only_layers=[])).layer_neighbours == ()
    windows = {"model_type": "gemma2", "sliding_window": 64, "num_hidden_layers": 6}
    gemma = model_spec({**LLAMA, **windows}, name="x")
    assert len(gemma.kinds) == 2  # other windows, the same tensors
    assert rank_of(gemma).layer_neighbours == ()


def test_mixtures_above_dense_layers() -> None:
    """From the loss on: a mixture, two between their like, one above the dense layers, these."""
    found = rank_of(sample()).layer_neighbours
    assert [near.key for near in found] == [
        (MIXED, True, NO_LAYER, MIXED),
        (MIXED, True, MIXED, MIXED),
        (MIXED, True, MIXED, DENSE),
        (DENSE, True, MIXED, DENSE),
        (DENSE, True, DENSE, NO_LAYER),
    ]
    passed = [(near.first[0], near.last[0]) for near in found]
    assert passed == [
        ((0, 0), (0, 0)),
        ((0, 1), (0, 2)),  # two of them: behind one mixture, and behind two
        ((0, 3), (0, 3)),
        ((0, 4), (0, 4)),
        ((1, 4), (1, 4)),
    ]


def test_recomputed_layers_are_told_from_others() -> None:
    found = rank_of(sample(), RecomputedLayers(1)).layer_neighbours
    assert [near.recomputed for near in found] == [False] * 4 + [True]
    assert found[-1].last == ((1, 4), (0, 0))


def places(plan: Plan) -> tuple[BlockPoints, list[float], list[LayerNeighbours]]:
    """Return a rank's blocks, elements of a layer of each kind, and neighbours."""
    model, workload = sample(), Workload(64, plan.global_batch_size)
    software, table = software_profile("shardplan"), PlanTable.from_plans([plan])
    rank = rank_of(model)
    sizes = rank_parameters(model, rank, table)
    live = live_activations(rank_view(model, workload, software, table, rank))
    flying = live.in_flight + live.pending
    blocks = BlockPoints(rank_view(model, workload, software, table, rank), flying)
    return blocks, [float(np.ravel(size)[0]) for size in sizes.layers], list(rank.layer_neighbours)


def number(value: Any) -> float:
    return float(np.ravel(value)[0])


def test_each_layer_is_gathered_beside_its_own_neighbours() -> None:
    blocks, (dense, mixed), _ = places(Plan(data_parallel=8, zero_stage=3))
    assert dense > mixed
    head = number(blocks.head)
    own = [number(spot.block.own) for spot in blocks.groups]
    assert own == [mixed, mixed, mixed, dense, dense]
    assert [number(spot.block.ahead) for spot in blocks.groups] == [mixed, mixed, dense, dense, 0.0]
    before = [number(spot.block.before) for spot in blocks.groups]
    assert before == [head, mixed, mixed, mixed, dense]
    assert [number(end.done) - head for end in blocks.groups[1].ends] == [mixed, 2 * mixed]
    assert number(blocks.groups[-1].ends[0].done) == head + 4 * mixed + dense
    # at the loss the last layer comes, which is no dense one
    assert number(blocks.at_loss_backward().size) == 2 * (head + mixed)


@pytest.mark.parametrize("offload", ["none", "activations"])
def test_what_layers_behind_had_saved_is_gone(offload: str) -> None:
    """Of every kind its own; offloaded it had left already."""
    plan = Plan(data_parallel=8, zero_stage=3, offload=offload)  # type: ignore[arg-type]
    model, workload = sample(), Workload(64, plan.global_batch_size)
    software, table = software_profile("shardplan"), PlanTable.from_plans([plan])
    live = live_activations(rank_view(model, workload, software, table, rank_of(model)))
    blocks, _, _ = places(plan)
    end = blocks.groups[-1].ends[0]
    freed = -number(end.freed(live.layer_backward[0], live.saved_by_kind).size)
    dense, mixed = (number(every) for every, _ in live.saved_by_kind)
    assert freed == (dense + 4 * mixed if offload == "none" else 0.0)
    assert (mixed > 0.0) == (offload == "none")


def test_a_stage_of_one_size_is_priced_as_before() -> None:
    """The blocks of a rank do not depend on kinds that it does not hold."""
    alone = sample(mlp_only_layers=[], num_hidden_layers=4)
    plan = Plan(data_parallel=8, zero_stage=3)
    software, table = software_profile("shardplan"), PlanTable.from_plans([plan])
    whole = contents_of_rank(sample(), [(0, 2), (2, 6)], [0, 1], 1)
    assert whole.layer_neighbours == ()
    one = contents_of_rank(alone, [(0, 4)], [0], 0)
    workload = Workload(64, plan.global_batch_size)
    found = []
    for model, rank in ((sample(), whole), (alone, replace(one, first=False))):
        blocks = BlockPoints(rank_view(model, workload, software, table, rank), np.ones(1))
        found.append([number(spot.block.own) for spot in blocks.groups])
    assert found[0] == found[1]
