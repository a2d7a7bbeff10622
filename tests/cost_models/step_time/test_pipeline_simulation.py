"""Few micro-batches stand for many: against the simulation of all of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.partition.schedules import LOOPED, SPLIT, V_SHAPED, actions, repeats
from cost_models.plan.plan import SCHEDULES, Plan
from cost_models.step_time import pipeline_simulation
from cost_models.step_time.pipeline_simulation import StageSeconds, ends_of, makespan
from tests.samples import examples

SECONDS = st.sampled_from([0.2, 1.0, 1.0, 1.0, 1.0001, 1.3, 2.0, 5.0])
BODIES = [schedule for schedule in SCHEDULES if schedule != "gpipe"]


def draw_plan(data: Any, schedule: str) -> Plan:
    p = data.draw(st.integers(2, 6))
    virtual = data.draw(st.integers(2, 4)) if schedule in LOOPED else 1
    virtual = 2 if schedule in V_SHAPED else virtual
    m = p * data.draw(st.integers(2, 12)) if virtual > 1 else data.draw(st.integers(1, 60))
    return Plan(1, 1, p, virtual, schedule, num_microbatches=m)  # type: ignore[arg-type]


def draw_seconds(data: Any, plan: Plan) -> StageSeconds:
    count = plan.num_stages
    f, i, w = (data.draw(st.lists(SECONDS, min_size=count, max_size=count)) for _ in range(3))
    if plan.pipeline_schedule not in SPLIT:
        w = [0.0] * count
    return StageSeconds(f, [a + b for a, b in zip(i, w, strict=True)], w)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_repetitions_that_are_left_out_take_as_long_as_one(schedule: str, data: Any) -> None:
    plan = draw_plan(data, schedule)
    seconds = draw_seconds(data, plan)
    whole = max(order[-1] for order in ends_of(plan, seconds))
    assert makespan(plan, *seconds) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("schedule", BODIES)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_a_longer_order_has_its_body_once_more(schedule: str, data: Any) -> None:
    plan = draw_plan(data, schedule)
    body = repeats(plan)
    if body is None:
        return
    more = replace(plan, num_microbatches=plan.num_microbatches + body.microbatches)
    longer = repeats(more)
    if longer is None or longer.microbatches != body.microbatches:
        return
    for rank in range(plan.pipeline_parallel):
        mine = repeats(plan, rank)
        assert mine is not None
        assert mine.times >= body.times
        order = [(a.kind, a.stage) for a in actions(plan, rank)]
        end = mine.before + mine.actions
        assert mine.before + mine.actions * mine.times <= len(order)
        once_more = [*order[:end], *order[mine.before : end], *order[end:]]
        assert once_more == [(a.kind, a.stage) for a in actions(more, rank)]


@pytest.mark.parametrize("schedule", BODIES)
def test_few_micro_batches_are_simulated(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = 2 if schedule in (*LOOPED, *V_SHAPED) else 1
    plan = Plan(1, 1, 8, virtual, schedule, num_microbatches=8 * 10_000)  # type: ignore[arg-type]
    most = []

    def counted(shorter: Plan, seconds: StageSeconds) -> list[list[float]]:
        most.append(shorter.num_microbatches)
        return ends_of(shorter, seconds)

    monkeypatch.setattr(pipeline_simulation, "ends_of", counted)
    each = [1.0] * plan.num_stages
    each[-1] = 1.2  # the head
    later = [0.5 * second if schedule in SPLIT else 0.0 for second in each]
    found = makespan(plan, each, [2.0 * second for second in each], later)
    assert sum(most) < 400
    slowest = 3.0 * (each[0] + each[-1] if schedule in V_SHAPED else each[-1] * virtual)
    if virtual == 2 and schedule not in V_SHAPED:
        slowest = 3.0 * (1.0 + 1.2)
    assert found == pytest.approx(plan.num_microbatches * slowest, rel=1e-3)


def test_a_state_that_drifts_is_simulated_to_its_end() -> None:
    """A last stage that is slower by little: queues take long to be used up."""
    plan = Plan(1, 1, 4, 1, "1f1b", num_microbatches=300)
    seconds = StageSeconds([1.0, 1.0, 1.0, 1.001], [2.0, 2.0, 2.0, 2.0], [0.0] * 4)
    whole = max(order[-1] for order in ends_of(plan, seconds))
    assert makespan(plan, *seconds) == pytest.approx(whole, rel=1e-12)
