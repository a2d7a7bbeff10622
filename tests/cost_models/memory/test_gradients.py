"""Gradients at the moments of a step: which of them are whole, on the device, in how many bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cost_models.memory.peak import rank_timeline
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from tests.samples import llama, make_scenario

PLAN = Plan(
    data_parallel=2,
    pipeline_parallel=4,
    pipeline_schedule="interleaved_1f1b",
    virtual_stages=4,
    num_microbatches=4,
    zero_stage=1,
    recompute="full",
)


MODEL = llama(hidden_size=512, intermediate_size=2048, vocab_size=512, num_hidden_layers=16)


def gradients(plan: Plan) -> float:
    """Bytes at the peak, of a model whose embedding is small."""
    scenario = make_scenario(
        MODEL, "8xH100-SXM", seq_len=256, global_batch_size=plan.global_batch_size
    )
    return float(price(scenario, PlanTable.from_plans([plan])).memory.gradients[0])


def test_one_round_of_microbatches_leaves_the_gradients_of_one_stage_whole() -> None:
    rounds = {m: gradients(replace(PLAN, num_microbatches=m)) for m in (4, 8, 12)}
    assert rounds[8] == rounds[12]
    one, ranks = 1.0 / PLAN.virtual_stages, PLAN.data_parallel
    assert rounds[4] == pytest.approx((one + (1.0 - one) / ranks) * rounds[8], rel=0.05)


SHARDED = Plan(data_parallel=8, zero_stage=3, num_microbatches=2, recompute="full")


def at_moments(software: str, plan: Plan = SHARDED) -> list[float]:
    """Bytes of gradients at each moment of a step of a small model."""
    batch = plan.global_batch_size
    scenario = make_scenario(
        MODEL, "8xH100-SXM", seq_len=256, global_batch_size=batch, software=software
    )
    table, (rank,) = PlanTable.from_plans([plan]), even_split_contents(MODEL, 1, 1)
    line = rank_timeline(RankView(scenario, table, rank))
    return [float(np.ravel(at.gradients)[0]) for at in line]


@pytest.mark.parametrize(
    ("software", "each"),
    [
        ("hf-trainer+fsdp2", 2.0),  # accelerate: reduce_dtype is that of mixed_precision
        ("hf-trainer+fsdp2+fp32-reductions", 4.0),
    ],
)
def test_whole_gradients_are_added_up_in_the_precision_of_their_reduction(
    software: str, each: float
) -> None:
    *before, update = at_moments(software)
    assert before == pytest.approx([each * MODEL.num_parameters] * len(before))
    assert update == pytest.approx(4.0 * MODEL.num_parameters / 8)  # fp32 shards


def test_offloaded_weights_take_reduced_gradients_with_them_and_leave_whole_ones() -> None:
    layer = at_moments("eager-fsdp2", replace(SHARDED, offload="weights", num_microbatches=1))
    assert 0.0 < max(layer) < 0.1 * MODEL.num_parameters
    *whole, update = at_moments("hf-trainer+fsdp2", replace(SHARDED, offload="weights"))
    assert whole == pytest.approx([2.0 * MODEL.num_parameters] * len(whole))
    assert update == 0.0


@pytest.mark.slow
def test_torch_adds_up_gradients_without_sync_in_the_precision_of_the_reduction(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for name, each in (("bfloat16", 2), ("float32", 4)):
            model = torch.nn.Linear(16, 16, bias=False)
            policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, getattr(torch, name))
            fsdp.fully_shard(model, mp_policy=policy)
            model.set_requires_gradient_sync(False)
            model(torch.ones(2, 16)).sum().backward()
            (param,) = model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params
            kept = param.unsharded_accumulated_grad
            kept = param._unsharded_param.grad if kept is None else kept
            assert (kept.numel(), kept.element_size()) == (256, each)
            model.set_requires_gradient_sync(True)
            model(torch.ones(2, 16)).sum().backward()
            assert model.weight.grad.dtype == torch.float32
    finally:
        torch.distributed.destroy_process_group()
