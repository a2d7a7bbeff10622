from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.plan.plan import CONTEXT_METHODS, OFFLOADS, SCHEDULES, Plan, PlanTable
from cost_models.plan.recompute import RECOMPUTE, read_setting
from hardware_profiles.errors import InputError

COUNTS = st.integers(1, 10**6)
PLANS = st.builds(
    Plan,
    data_parallel=COUNTS,
    tensor_parallel=COUNTS,
    pipeline_parallel=COUNTS,
    virtual_stages=COUNTS,
    pipeline_schedule=st.sampled_from(SCHEDULES),
    zero_stage=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(RECOMPUTE).map(read_setting),
    micro_batch_size=COUNTS,
    num_microbatches=COUNTS,
    dp_replicate=COUNTS,
    context_parallel=COUNTS,
    context_parallel_method=st.sampled_from(CONTEXT_METHODS),
    expert_parallel=COUNTS,
    expert_tensor_parallel=st.booleans(),
    offload=st.sampled_from(OFFLOADS),
    recompute_layers=st.integers(0, 10**6),
    recompute_every=st.integers(0, 10**6),
)


@given(st.lists(PLANS, min_size=1, max_size=5))
def test_a_table_gives_its_plans_back(plans: list[Plan]) -> None:
    table = PlanTable.from_plans(plans)
    assert list(table) == plans
    assert len(table) == len(plans)
    assert list(table.rows(slice(0, 1))) == plans[:1]
    assert list(table.rows(np.ones(len(plans), dtype=bool))) == plans


@given(PLANS)
def test_json_and_back(plan: Plan) -> None:
    assert Plan.from_dict(plan.to_dict(), "plan") == plan
    assert all(type(v) in (int, bool, str) for v in asdict(next(iter(table_of(plan)))).values())


def table_of(plan: Plan) -> PlanTable:
    return PlanTable.from_plans([plan])


def test_products() -> None:
    plan = Plan(
        data_parallel=2,
        tensor_parallel=3,
        pipeline_parallel=5,
        virtual_stages=7,
        micro_batch_size=11,
        num_microbatches=13,
    )
    assert (plan.world_size, plan.num_stages, plan.global_batch_size) == (30, 35, 286)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data_parallel", 0, "data_parallel = 0 (must be a whole number from 1"),
        ("tensor_parallel", -2, "tensor_parallel = -2"),
        ("tensor_parallel", 2.5, "tensor_parallel = 2.5"),
        ("tensor_parallel", "2", 'tensor_parallel = "2"'),
        ("tensor_parallel", True, "tensor_parallel = true"),
        ("pipeline_parallel", 10**7, "10000000"),
        ("pipeline_parallel", float("nan"), "NaN"),
        ("zero_stage", 4, "from 0 to 3"),
        ("sequence_parallel", 1, "true or false"),
        ("recompute", "ful", "Did you mean full?"),
        ("pipeline_schedule", "2f2b", "one of gpipe, 1f1b, interleaved_1f1b"),
        ("context_parallel_method", "rings", "Did you mean ring?"),
        ("offload", "cpu", "one of none, optimizer"),
        ("pipeline_paralel", 2, "Did you mean pipeline_parallel"),
    ],
)
def test_bad_values_are_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        Plan.from_dict({key: value}, "file")
    assert str(caught.value).startswith("file: ")
    assert said in str(caught.value)
