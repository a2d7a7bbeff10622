"""What must hold for the memory of any legal plan of any model, drawn at random."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec.structs import astuple

from cost_models.memory.ledger import MOMENTS
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import timelines
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price, rank_memories
from cost_models.scenario import Scenario
from tests.drawn_plans import SETTINGS, asked, cluster_of, is_legal, plans, scenario_of
from tests.samples import LLAMA, make_scenario

SAME = 1 + 1e-12
# a stage that DualPipeV turns around while its activations are on the host
OFFLOADED_V = Plan(
    pipeline_parallel=4,
    virtual_stages=2,
    pipeline_schedule="dualpipev",
    num_microbatches=8,
    offload="activations",
)


def peak(scenario: Scenario, plan: Plan) -> float:
    return float(price(scenario, PlanTable.from_plans([plan])).peak[0])


def live(scenario: Scenario, plan: Plan) -> float:
    """Return the peak without communicators, of which more axes need more."""
    return float(np.ravel(price(scenario, PlanTable.from_plans([plan])).memory.allocated)[0])


def numbers(parts: MemoryParts) -> list[float]:
    return [float(np.ravel(column)[0]) for column in astuple(parts)]


@SETTINGS
@given(asked())
def test_the_peak_is_the_largest_moment_and_its_parts_add_up(
    case: tuple[Scenario, Plan],
) -> None:
    scenario, plan = case
    ranges = default_layer_ranges(scenario, plan)
    lines = timelines(scenario, plan, ranges)
    for line, (parts, moment) in zip(lines, rank_memories(scenario, plan, ranges), strict=True):
        assert len(line) == len(MOMENTS)
        for each in line:
            assert all(np.isfinite(value) and value >= 0.0 for value in numbers(each))
            assert sum(numbers(each)) == pytest.approx(float(each.peak), rel=1e-12)
        assert line[moment] == parts
        assert float(parts.peak) == pytest.approx(max(float(p.peak) for p in line), rel=1e-12)
    fullest = max(float(parts.peak) for line in lines for parts in line)
    assert peak(scenario, plan) == pytest.approx(fullest, rel=1e-12)


@SETTINGS
@given(asked(), st.integers(1, 4))
def test_more_work_never_needs_less(case: tuple[Scenario, Plan], more: int) -> None:
    scenario, plan = case
    before = peak(scenario, plan)
    longer = replace(scenario, workload=replace(scenario.workload, seq_len=64 * 41 * more))
    assert peak(longer, plan) * SAME >= before
    larger = replace(plan, micro_batch_size=plan.micro_batch_size + more)
    assert peak(scenario, larger) * SAME >= before


@SETTINGS
@given(asked(), st.integers(1, 3))
def test_more_layers_never_need_less(case: tuple[Scenario, Plan], more: int) -> None:
    """As many more for every stage, so that stages stay as even as they are."""
    scenario, plan = case
    model = scenario.model
    key = next(key for key in ("num_hidden_layers", "n_layer") if key in model.config)
    config = dict(model.config) | {key: model.num_layers + more * plan.num_stages}
    deeper = adapted(model_spec(config, name="deeper"), scenario.workload)
    assert peak(replace(scenario, model=deeper), plan) * SAME >= peak(scenario, plan)


@SETTINGS
@given(asked())
def test_zero_shards_states_and_never_adds_to_them(case: tuple[Scenario, Plan]) -> None:
    """Weights, optimizer and reduced gradients, in mixed precision.

    In one precision ZeRO-1 lays a shard beside whole weights, which can be more.
    """
    scenario, plan = case
    assume(plan.shard_ranks > 1 and scenario.workload.precision != "fp32")
    states = []
    for stage in range(int(scenario.software.sharding.largest_zero_stage) + 1):
        changed = replace(plan, zero_stage=stage)
        if not is_legal(scenario, changed):
            continue
        line = timelines(scenario, changed, default_layer_ranges(scenario, changed))[0]
        step = line[MOMENTS.index("optimizer")]
        states.append(float(step.weights) + float(step.gradients) + float(step.optimizer))
    for few, many in zip(states[1:], states[:-1], strict=True):
        assert few <= many * SAME


@SETTINGS
@given(asked())
def test_more_tensor_parallel_ranks_never_need_more(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    wider = replace(plan, tensor_parallel=2 * plan.tensor_parallel)
    larger = replace(scenario, cluster=cluster_of(wider))
    assume(is_legal(larger, wider))
    assert live(larger, wider) <= live(scenario, plan) * SAME


@SETTINGS
@given(asked(), st.lists(plans(), min_size=1, max_size=6))
def test_a_table_is_priced_as_each_of_its_rows(
    case: tuple[Scenario, Plan], others: list[Plan]
) -> None:
    scenario, plan = case
    rows = [plan, *(o for o in others if is_legal_alone(scenario, o))]
    table = price(scenario, PlanTable.from_plans(rows))
    for row, each in enumerate(rows):
        alone = price(scenario, PlanTable.from_plans([each]))
        assert numbers(alone.memory) == [float(column[row]) for column in astuple(table.memory)]
        assert alone.moment[0] == table.moment[row]
        assert alone.limiting_rank[0] == table.limiting_rank[row]


def is_legal_alone(scenario: Scenario, plan: Plan) -> bool:
    """Whether a plan is legal on a cluster and with a batch of its own."""
    batch = replace(scenario.workload, global_batch_size=plan.global_batch_size)
    return is_legal(replace(scenario, cluster=cluster_of(plan), workload=batch), plan)


@SETTINGS
@given(
    st.integers(0, 8),
    st.integers(0, 6),
    st.integers(0, 4),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from(["flash", "eager"]),
    plans(),
)
@example(0, 1, 0, "bf16", "flash", OFFLOADED_V)  # few tokens beside a stage that is not there
def test_extreme_sizes_stay_finite_and_positive(
    length: int, width: int, micro: int, precision: Any, kernel: Any, plan: Plan
) -> None:
    """Up to 10^8 tokens, a hidden size of 10^6, 10^4 layers: beyond int64 in a product of ints."""
    config = LLAMA | {
        "hidden_size": 64 * 10 ** min(width, 4),
        "intermediate_size": 10**width * 10,
        "num_hidden_layers": 16 * 10 ** min(width, 2),
        "vocab_size": 64 * 10 ** min(width, 5),
        "max_position_embeddings": 10**9,
    }
    plan = replace(plan, micro_batch_size=10**micro, expert_parallel=1)
    workload = Workload(10**length * 8, 1, precision=precision, attention_kernel=kernel)
    scenario = scenario_of(model_spec(config, name="extreme"), workload, plan, "shardplan")
    with np.errstate(all="raise"):
        lines = timelines(scenario, plan, default_layer_ranges(scenario, plan))
        found = peak(scenario, plan)
    assert np.isfinite(found)
    assert found > 0.0
    for line in lines:
        for each in line:
            assert all(np.isfinite(value) and value >= 0.0 for value in numbers(each))


def test_a_frozen_embedding_spares_nothing_of_layers_that_are_offloaded() -> None:
    """Of many micro-batches in flight, the first layer's norms alone are more than two layers."""
    plan = Plan(
        data_parallel=2,
        pipeline_parallel=2,
        pipeline_schedule="gpipe",
        num_microbatches=64,
        offload="activations",
    )
    workload = {"seq_len": 64, "global_batch_size": 128, "adapter": "lora", "adapter_rank": 8}
    model = model_spec(LLAMA | {"num_hidden_layers": 4}, name="tiny")
    scenario = make_scenario(model, "4xA100-80GB", **workload)
    scenario = replace(scenario, model=adapted(model, scenario.workload))
    for line in timelines(scenario, plan, default_layer_ranges(scenario, plan)):
        for each in line:
            assert min(numbers(each)) >= 0.0
