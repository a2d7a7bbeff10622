"""Pipelines in closed form against their simulation, and that against torch's own orders."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.legality.rules import FEWEST
from cost_models.partition.schedules import LOOPED, SPLIT, V_SHAPED, stages_of_rank
from cost_models.plan.plan import SCHEDULES, Plan, PlanTable
from cost_models.step_time.pipeline_bound import pipeline_bound
from cost_models.step_time.pipeline_simulation import makespan
from tests.cost_models.step_time.pipeline_simulator import makespan as by_torch
from tests.cost_models.step_time.pipeline_simulator import torch_order

SECONDS = st.sampled_from([0.2, 1.0, 1.0, 1.0, 1.3, 2.0, 5.0])
CLOSE = 1 + 1e-12


def draw_plan(data: Any, schedule: str) -> Plan:
    p = data.draw(st.integers(2, 6))
    virtual = data.draw(st.integers(2, 4)) if schedule in LOOPED else 1
    plan = Plan(pipeline_parallel=p)
    fewest = FEWEST.get(schedule, lambda plan: 1)(plan)
    m = fewest + data.draw(st.integers(0, 2 * p))
    if schedule in LOOPED:
        m = p * data.draw(st.integers(1, 4))
    virtual = 2 if schedule in V_SHAPED else virtual
    return Plan(1, 1, p, virtual, schedule, num_microbatches=m)  # type: ignore[arg-type]


def bound(plan: Plan, passes: np.ndarray) -> float:
    """``passes``: (3, ranks), seconds of all stages of a rank."""
    table = PlanTable.from_plans([plan])
    f, i, w = (x[:, None] for x in passes)
    return float(pipeline_bound(table, f, i + w, w)[0])


def simulated(plan: Plan, passes: np.ndarray) -> float:
    by_stage = np.zeros((3, plan.num_stages))
    for rank in range(plan.pipeline_parallel):
        for stage in stages_of_rank(plan, rank):
            by_stage[:, stage] = passes[:, rank] / plan.virtual_stages
    f, i, w = by_stage
    return makespan(plan, f.tolist(), (i + w).tolist(), w.tolist())


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data())
def test_the_closed_form_is_a_lower_bound_of_the_simulation(schedule: str, data: Any) -> None:
    """Whatever the ranks need: the search may rank by it, and misses nothing."""
    plan = draw_plan(data, schedule)
    p = plan.pipeline_parallel
    passes = np.array([data.draw(st.lists(SECONDS, min_size=p, max_size=p)) for _ in range(3)])
    if schedule not in SPLIT:
        passes[2] = 0.0
    least = bound(plan, passes)
    assert least <= simulated(plan, passes) * CLOSE
    assert least >= plan.num_microbatches * passes.sum(axis=0).max() / CLOSE


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data())
def test_it_is_exact_for_equal_ranks(schedule: str, data: Any) -> None:
    plan = draw_plan(data, schedule)
    p = plan.pipeline_parallel
    one = np.array([1.0, 1.0, 1.0]) if schedule in SPLIT else np.array([1.0, 2.0, 0.0])
    passes = np.repeat(one[:, None], p, axis=1)
    assert bound(plan, passes) == pytest.approx(simulated(plan, passes), rel=1e-12)


def test_zb_h1_has_the_bubble_of_the_paper() -> None:
    """(p - 1)(f + i - w), Qi et al., table 1."""
    for p, m in ((2, 4), (4, 8), (8, 8)):
        plan = Plan(1, 1, p, 1, "zero_bubble", num_microbatches=m)
        for f, i, w in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.9)):
            passes = np.repeat(np.array([[f], [i], [w]]), p, axis=1)
            busy = m * (f + i + w)
            assert bound(plan, passes) - busy == pytest.approx((p - 1) * (f + i - w))
            assert simulated(plan, passes) - busy == pytest.approx((p - 1) * (f + i - w))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
@given(data=st.data())
def test_the_simulation_is_that_of_torchs_orders(schedule: str, data: Any) -> None:
    plan = draw_plan(data, schedule)
    stages = plan.num_stages
    f = data.draw(st.lists(SECONDS, min_size=stages, max_size=stages))
    b = data.draw(st.lists(SECONDS, min_size=stages, max_size=stages))
    order = torch_order(
        schedule, plan.pipeline_parallel, plan.virtual_stages, plan.num_microbatches
    )
    assert makespan(plan, f, b, [0.0] * stages) == pytest.approx(by_torch(order, f, b))


def test_a_split_backward_pass_fills_bubbles() -> None:
    p, m = 4, 8
    seconds = {}
    for schedule, virtual in (("1f1b", 1), ("zero_bubble", 1), ("zbv", 2), ("dualpipev", 2)):
        plan = Plan(1, 1, p, virtual, schedule, num_microbatches=m)  # type: ignore[arg-type]
        stages = plan.num_stages
        each = [1.0 / virtual] * stages
        seconds[schedule] = makespan(plan, each, [2.0 / virtual] * stages, each)
    assert seconds["zbv"] < seconds["zero_bubble"] < seconds["1f1b"]
    assert seconds["dualpipev"] < seconds["1f1b"]
