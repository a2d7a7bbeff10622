"""selective_ops: bytes that stay, work that is done again, traffic that is not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.activations.live import layer_bytes
from cost_models.activations.selective_ops import kept_results
from cost_models.compute.flops import core_flops_per_token
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import FULL, NONE, SELECTIVE_OPS
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price, rank_communication
from hardware_profiles.software.trainer import software_profile
from tests.samples import legal_table, llama, make_scenario, rank_view

OPS = Plan(recompute="selective_ops")
WORKLOAD = Workload(256, 8, precision="bf16")
SETTINGS = [
    ("llama", "8xA100-80GB", 256, 8, "shardplan", "flash"),
    ("gpt2", "8xA100-80GB", 256, 8, "shardplan", "eager"),
    ("mixtral", "8xA100-80GB", 256, 8, "shardplan", "flash"),
]


def results(model: ModelSpec, plan: Plan = OPS, **workload: Any) -> tuple[float, float, float]:
    about = replace(WORKLOAD, **workload)
    found = kept_results(
        model, about, software_profile("shardplan"), PlanTable.from_plans([plan]), model.kinds[0]
    )
    split, along, whole = (float(np.ravel(part)[0]) for part in found[:3])
    return split, along, whole


def test_a_llama_layer_by_hand() -> None:
    model = llama()
    kind, h = model.kinds[0], model.hidden_size
    a, k, d = kind.attention.num_heads, kind.attention.num_kv_heads, kind.attention.head_dim
    f = kind.feed_forward.ffn_hidden_size
    # queries, keys, values, what attention gives and its log-sums; gate and up projection
    split = 2.0 * (a * d + 2 * k * d + a * d + 2 * f) + 4.0 * a
    # the output projection: nothing reads the second matrix of the MLP again
    assert results(model) == (split, 2.0 * h, 0.0)
    assert results(model, attention_kernel="eager") == (split - 2.0 * a * d - 4.0 * a, 2.0 * h, 0.0)
    table = PlanTable.from_plans(
        [
            OPS,
            replace(OPS, tensor_parallel=2),
            replace(OPS, tensor_parallel=2, sequence_parallel=True),
        ]
    )
    scenario = make_scenario(seq_len=256, global_batch_size=8)
    found = layer_bytes(rank_view(model, WORKLOAD, scenario.software, table)) / (
        256 * model.num_layers
    )
    both = 2.0 * h + 2.0 * h  # and the layer's input
    assert found.tolist() == [split + both, split / 2 + both, (split + both) / 2]


def of(family: str) -> ModelSpec:
    """A small model of a family."""
    config = {
        "model_type": family,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    return model_spec(config, name=family)


def test_what_is_read_again_depends_on_the_layer() -> None:
    h = 2.0 * 64
    assert results(of("llama"))[1] == h  # the attention's
    assert results(of("phi"))[1] == 0.0  # side by side: neither is
    assert results(of("olmo2"))[1] == 2 * h  # norms behind both
    assert results(of("olmo2"), replace(OPS, tensor_parallel=2))[2] == 8.0  # sums of squares


def test_no_collective_is_repeated() -> None:
    for family, plan in {
        "llama": replace(OPS, tensor_parallel=2, sequence_parallel=True, num_microbatches=4),
        "olmo2": replace(OPS, tensor_parallel=2, num_microbatches=4),
        "mixtral": replace(OPS, data_parallel=2, tensor_parallel=2, expert_parallel=2),
        "qwen3": replace(OPS, context_parallel=2, context_parallel_method="ulysses"),
    }.items():
        scenario = replace(make_scenario(seq_len=256), model=of(family))
        ranges = ((0, scenario.model.num_layers),)
        none, full = (replace(plan, recompute=name) for name in ("none", "full"))
        again = [rank_communication(scenario, p, ranges) for p in (plan, none, full)]
        assert again[0] == again[1] != again[2]


@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_no_matmul_is_repeated_but_those_of_an_eager_core(kernel: Any) -> None:
    model, workload = llama(), replace(WORKLOAD, attention_kernel=kernel)

    def flops(plan: Plan) -> float:
        table = PlanTable.from_plans([plan])
        return float(np.ravel(hardware_flops_per_step(model, workload, table))[0])

    core = float(sum(core_flops_per_token(model.kinds[kind], 256) for kind in model.pattern))
    more = flops(OPS) - flops(replace(OPS, recompute="none"))
    assert more == pytest.approx((kernel == "eager") * core * 256 * 8, rel=1e-12, abs=0.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_it_lies_between_none_and_full(key: Any) -> None:
    scenario, table = legal_table(key)
    table = table.rows(slice(0, None, 7))
    none, ops, full = (
        price(scenario, replace(table, recompute=np.full(len(table), code)))
        for code in (NONE, SELECTIVE_OPS, FULL)
    )
    assert (ops.time.recompute > 0).all()
    assert (ops.time.recompute < full.time.recompute).all()
    several = scenario.model.num_layers >= 2 * table.pipeline_parallel
    # what is recomputed for weight gradients that come later stays until then
    slack = np.where(np.isin(table.pipeline_schedule, SPLIT_CODES), 1.001, 1.0 + 1e-9)
    assert (ops.peak * slack >= full.peak)[several].all()
    assert (ops.peak < none.peak)[several].all()
    same = ops.slowest_rank == none.slowest_rank  # whose parts these are
    assert same.any()
    for name in ("tensor_communication", "expert_communication"):
        kept, usual = (np.asarray(getattr(priced.time, name)) for priced in (ops, none))
        assert np.array_equal(kept[same], usual[same])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_a_table_is_priced_as_each_row_alone(key: Any) -> None:
    scenario, table = legal_table(key)
    rows = table.rows(np.arange(0, len(table), max(1, len(table) // 40)))
    mixed = replace(rows, recompute=np.arange(len(rows)) % 4)
    together = price(scenario, mixed)
    for row in range(len(mixed)):
        alone = price(scenario, mixed.rows(slice(row, row + 1)))
        assert together.peak[row] == alone.peak[0]
        assert together.step[row] == alone.step[0]
