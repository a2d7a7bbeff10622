"""What hides data-parallel traffic, and what it costs where it is hidden."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cost_models.plan.plan import Plan, PlanTable
from cost_models.step_time.overlap import (
    Hiding,
    exposed_data_seconds,
    exposed_message_seconds,
)
from cost_models.step_time.parts import RankSeconds
from hardware_profiles.software.trainer import software_profile
from tests.samples import rank_of


def exposed(
    rank: RankSeconds,
    plan: Plan,
    *,
    overlap: float = 1.0,
    on_gpu: bool = True,
    gathers: bool = False,
) -> float:
    table, hiding = PlanTable.from_plans([plan]), Hiding(overlap, gathers_during_forward=gathers)
    return float(exposed_data_seconds(rank, table, hiding, on_gpu=on_gpu)[0])


@pytest.mark.parametrize(
    ("zero_stage", "pipeline", "hidden_behind"),
    [
        (0, 1, 2.0),  # the last backward pass
        (1, 1, 2.0),
        (2, 1, 8.0),  # every backward pass
        (3, 1, 8.0),  # the same: what is gathered for forward passes is apart
        (1, 4, 2.0),
        (3, 4, 8.0),
    ],
)
def test_what_hides_data_parallel_traffic(
    zero_stage: int, pipeline: int, hidden_behind: float
) -> None:
    plan = Plan(
        data_parallel=8, zero_stage=zero_stage, pipeline_parallel=pipeline, num_microbatches=4
    )
    rank = rank_of(3.0, data=100.0)
    assert exposed(rank, plan) == pytest.approx(100 - hidden_behind)
    assert exposed(rank, plan, overlap=0.5) == pytest.approx(100 - hidden_behind / 2)
    assert exposed(rank, plan, on_gpu=False) == 100
    assert exposed(rank_of(3.0, data=1.0), plan) == 0


def test_forward_gathers_hide_behind_forward_passes_alone() -> None:
    """Of 3 seconds of a pass 1 is forward and 2 are backward; four micro-batches."""
    plan = Plan(data_parallel=8, zero_stage=3, num_microbatches=4)

    def left(forward: float, backward: float) -> float:
        rank = replace(rank_of(3.0, data=forward + backward), gathered_forward=forward)
        return exposed(rank, plan)

    assert left(4.0, 8.0) == 0.0
    assert left(6.0, 0.0) == 2.0  # though backward passes hide nothing
    assert left(0.0, 9.0) == 1.0
    assert left(6.0, 9.0) == 3.0


def test_gathers_behind_the_forward_pass_need_no_overlapped_reduction() -> None:
    """ZeRO-1: of 4 seconds of gathering the forward pass hides its 1, of 3 of reducing none."""
    plan = Plan(data_parallel=8, zero_stage=1, num_microbatches=4)
    rank = replace(rank_of(3.0, data=7.0), gathered_forward=4.0)
    assert exposed(rank, plan, overlap=0.0) == 7.0
    assert exposed(rank, plan, overlap=0.0, gathers=True) == pytest.approx(6.0)


@pytest.mark.parametrize(("apart", "expected"), [(True, 1.0), (False, 2.0)])
def test_replicas_outside_a_node_have_links_of_their_own(apart: bool, expected: float) -> None:
    plan = Plan(data_parallel=16, dp_replicate=2, zero_stage=3)
    rank = replace(rank_of(3.0, data=1.0), replicas_use_other_links=apart)
    # a backward pass takes 2: it hides 1 of the shards' traffic and the replicas' 3 but for 1
    rank = replace(rank, replica_communication=3.0)
    assert exposed(rank, plan) == expected


def test_interleaved_stages_send_while_the_others_compute() -> None:
    """Of v stages the last waits for its own share of one pass alone, the others for a round."""

    def left(data: float, *, gathers: bool = True, **plan: Any) -> float:
        usual = {"pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2}
        shape = Plan(
            data_parallel=8,
            zero_stage=1,
            pipeline_parallel=4,
            **{"num_microbatches": 8} | usual | plan,
        )
        hiding = Hiding(1.0, gathers_during_forward=gathers)
        table = PlanTable.from_plans([shape])
        return float(exposed_data_seconds(rank_of(3.0, data=data), table, hiding, on_gpu=True)[0])

    # a pass forward and backward takes 3; 4 micro-batches of the other stage take 4 * 3 / 2 more
    assert left(3.0) == 0.0
    assert left(7.0) == pytest.approx((7 - 3) / 2)  # the last stage's half behind its half
    assert left(100.0) == pytest.approx(100 - 3 * (4 + 1) / 2)  # all links work all the time
    assert left(100.0, num_microbatches=2) == pytest.approx(100 - 3 * (2 + 1) / 2)
    plain = {"pipeline_schedule": "1f1b", "virtual_stages": 1}
    assert left(7.0, **plain) == pytest.approx(7 - 3)
    # gathers that nothing hides are not hidden by more stages
    assert left(7.0, gathers=False) == left(7.0, gathers=False, **plain) == pytest.approx(7 - 2)


@given(st.floats(0, 200), st.floats(0, 1), st.integers(0, 3))
def test_hidden_traffic_takes_its_share_of_computation(
    data: float, interference: float, zero_stage: int
) -> None:
    table = PlanTable.from_plans([Plan(data_parallel=8, zero_stage=zero_stage)])  # type: ignore[arg-type]
    rank = rank_of(3.0, data=data)
    found = (
        float(exposed_data_seconds(rank, table, Hiding(1.0, share), on_gpu=True)[0])
        for share in (0.0, interference, 1.0)
    )
    free, some, whole = found
    assert some == pytest.approx(free + interference * (data - free))
    assert whole == pytest.approx(data)  # nothing is gained
    on_cpu = exposed_data_seconds(rank, table, Hiding(1.0, interference), on_gpu=False)
    assert float(on_cpu[0]) == pytest.approx(data)  # once, not more


def test_links_work_while_the_host_starts_kernels() -> None:
    """A pass that the host stretches hides as much traffic as one that the device stretches."""
    plan = Plan(data_parallel=8, zero_stage=3)
    rank = rank_of(3.0, data=10.0)
    waiting = replace(rank, compute=np.array([1.0]), host=np.array([2.0]))
    assert exposed(waiting, plan) == exposed(rank, plan) == 8


def test_gathers_without_overlap_are_hidden_where_kernels_wait_for_the_host() -> None:
    """They are in the same queue as the kernels, and cost no computation there."""
    plan = PlanTable.from_plans([Plan(data_parallel=8, zero_stage=3, num_microbatches=2)])
    rank = replace(rank_of(3.0, data=10.0), gathered_forward=np.array([4.0]))
    waiting = replace(rank, host=np.array([2.0]), host_backward=np.array([1.5]))

    def left(rank: RankSeconds, *, on_gpu: bool = True) -> float:
        return float(exposed_data_seconds(rank, plan, Hiding(0.0, 0.3), on_gpu=on_gpu)[0])

    assert left(rank) == 10.0
    assert left(waiting) == pytest.approx((4 - 2 * 0.5) + (6 - 2 * 1.5))
    assert left(waiting, on_gpu=False) == 10.0  # its cores are the host


@pytest.mark.parametrize(
    ("software", "virtual", "microbatches", "exposed"),
    [
        ("nemo", 2, 8, 1.0 - 0.75 / 2),  # the first and the last four of eight wait
        ("nemo", 2, 4, 1.0),
        ("nemo", 1, 8, 1.0),  # plain 1F1B waits for its messages
        ("megatron", 2, 8, 1.0),  # releases before the switch
        ("nemo+waiting-messages", 2, 8, 1.0),
    ],
)
def test_interleaved_stages_hide_messages(
    software: str, virtual: int, microbatches: int, exposed: float
) -> None:
    plan = Plan(
        pipeline_parallel=4,
        virtual_stages=virtual,
        num_microbatches=microbatches,
        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
    )
    table, trainer = PlanTable.from_plans([plan]), software_profile(software)
    found = exposed_message_seconds(np.array([1.0]), np.array([5.0]), table, trainer)
    assert float(found[0]) == pytest.approx(exposed)
    # no pass hides more than its own seconds
    long = exposed_message_seconds(np.array([9.0]), np.array([5.0]), table, trainer)
    assert float(long[0]) == pytest.approx(9.0 - 5.0 * (1.0 - exposed))
