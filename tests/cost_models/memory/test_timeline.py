import math

import pytest
from msgspec.structs import astuple

from cost_models.memory.ledger import MOMENTS
from cost_models.memory.peak import timelines
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price, rank_memories
from cost_models.scenario import Scenario
from tests.samples import CONFIGS, make_scenario

PLANS = [
    Plan(data_parallel=8, zero_stage=3),
    Plan(data_parallel=2, tensor_parallel=4, sequence_parallel=True, zero_stage=1),
    Plan(data_parallel=2, pipeline_parallel=2, tensor_parallel=2, num_microbatches=4, zero_stage=2),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS, ids=["zero-3", "tensor", "pipeline"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_peak_is_the_largest_moment_of_the_timeline(name: str, plan: Plan) -> None:
    batch = plan.global_batch_size
    scenario: Scenario = make_scenario(name, "8xA100-80GB", seq_len=256, global_batch_size=batch)
    ranges = default_layer_ranges(scenario, plan)
    lines = timelines(scenario, plan, ranges)
    assert [len(line) for line in lines] == [len(MOMENTS)] * plan.pipeline_parallel
    for line, (peak, moment) in zip(lines, rank_memories(scenario, plan, ranges), strict=True):
        assert line[moment] == peak
        assert max(parts.peak for parts in line) == pytest.approx(float(peak.peak), rel=1e-12)
        for parts in line:
            values = [float(value) for value in astuple(parts)]
            assert all(math.isfinite(value) and value >= 0.0 for value in values)
            assert float(parts.peak) == pytest.approx(sum(values), rel=1e-12)
    priced = price(scenario, PlanTable.from_plans([plan]), ranges)
    assert max(p.peak for line in lines for p in line) == pytest.approx(float(priced.peak[0]))


def test_states_are_the_same_at_every_moment_and_logits_only_at_the_loss() -> None:
    scenario = make_scenario("llama-3-8b", "8xA100-80GB", seq_len=4096, global_batch_size=8)
    plan = Plan(data_parallel=8, zero_stage=3)
    line = timelines(scenario, plan, default_layer_ranges(scenario, plan))[0]
    by_name = dict(zip(MOMENTS, line, strict=True))
    assert len({float(parts.weights) for parts in line}) == 1
    assert len({float(parts.optimizer) for parts in line}) == 1
    assert {name for name, parts in by_name.items() if parts.logits > 0} == {
        "loss_forward",
        "loss_backward",  # (the head is fuller while its gradient is reduced, without logits)
    }
    assert by_name["optimizer"].activations == 0
    assert by_name["optimizer"].gradients > 0
