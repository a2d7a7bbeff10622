"""The parts of a step: pipelines against a simulation, overlap, and sums."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.communication.ring_and_tree import COLLECTIVE_START
from cost_models.communication.seconds import traffic_seconds
from cost_models.communication.volumes import Traffic
from cost_models.compute.kernel_launch import HOST_OVERLAP, host_wait
from cost_models.compute.rates import Rates, rates
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.step_time.overlap import Hiding
from cost_models.step_time.parts import RankSeconds
from cost_models.step_time.rank_time import rank_seconds
from cost_models.step_time.step import step_seconds
from tests.cost_models.step_time.pipeline_simulator import makespan, torch_order
from tests.samples import make_scenario, rank_of


def closed_form(seconds: list[float], plan: Plan) -> float:
    parts, slowest = step_seconds(
        [rank_of(s) for s in seconds],
        [(place,) for place in range(len(seconds))],
        PlanTable.from_plans([plan]),
        Hiding(1.0),
        on_gpu=True,
    )
    assert seconds[int(slowest[0])] == max(seconds)
    return float(parts.step[0])


def simulated(seconds: list[float], plan: Plan) -> float:
    """Event by event; ``seconds`` of each rank's micro-batch through all its stages."""
    p, v = plan.pipeline_parallel, plan.virtual_stages
    order = torch_order(plan.pipeline_schedule, p, v, plan.num_microbatches)
    forward = [seconds[stage % p] / (3 * v) for stage in range(p * v)]
    return makespan(order, forward, [2 * f for f in forward])


SECONDS = st.sampled_from([1.0, 1.0, 1.0, 1.1, 1.5, 2.0])
SIZES = st.tuples(st.integers(2, 6), st.integers(1, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@given(sizes=SIZES, extra=st.integers(0, 3))
def test_equal_stages_take_what_the_simulation_takes(schedule, sizes, extra) -> None:
    p, rounds = sizes
    plan = Plan(pipeline_parallel=p, num_microbatches=p * rounds + extra)
    plan = replace(plan, pipeline_schedule=schedule)
    seconds = [3.0] * p
    assert closed_form(seconds, plan) == pytest.approx(simulated(seconds, plan), rel=1e-12)


@given(sizes=SIZES, data=st.data())
def test_gpipe_of_unequal_stages_takes_what_the_simulation_takes(sizes, data) -> None:
    p, rounds = sizes
    seconds = data.draw(st.lists(SECONDS, min_size=p, max_size=p))
    plan = Plan(pipeline_parallel=p, num_microbatches=p * rounds, pipeline_schedule="gpipe")
    assert closed_form(seconds, plan) == pytest.approx(simulated(seconds, plan), rel=1e-12)


@given(sizes=SIZES, data=st.data())
def test_1f1b_with_the_slowest_stage_last_takes_what_the_simulation_takes(sizes, data) -> None:
    """The usual case: the last stage has the head and the loss."""
    p, rounds = sizes
    seconds = [*data.draw(st.lists(SECONDS, min_size=p - 1, max_size=p - 1)), 2.0]
    plan = Plan(pipeline_parallel=p, num_microbatches=p * rounds)
    assert closed_form(seconds, plan) == pytest.approx(simulated(seconds, plan), rel=1e-12)


@given(sizes=SIZES, virtual=st.integers(2, 4), data=st.data())
def test_interleaving_with_the_slowest_rank_last_takes_what_the_simulation_takes(
    sizes, virtual, data
) -> None:
    p, rounds = sizes
    seconds = [*data.draw(st.lists(SECONDS, min_size=p - 1, max_size=p - 1)), 2.0]
    plan = Plan(
        pipeline_parallel=p,
        num_microbatches=p * rounds,
        virtual_stages=virtual,
        pipeline_schedule="interleaved_1f1b",
    )
    assert closed_form(seconds, plan) == pytest.approx(simulated(seconds, plan), rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@given(sizes=SIZES, data=st.data())
def test_a_slow_stage_elsewhere_is_never_overestimated(schedule, sizes, data) -> None:
    """The closed form may miss a wait, but invents none: see test_pipeline_time."""
    p, rounds = sizes
    virtual = 2 if schedule == "interleaved_1f1b" else 1
    seconds = data.draw(st.lists(SECONDS, min_size=p, max_size=p))
    plan = Plan(
        pipeline_parallel=p,
        num_microbatches=p * rounds,
        virtual_stages=virtual,
        pipeline_schedule=schedule,
    )
    closed, exact = closed_form(seconds, plan), simulated(seconds, plan)
    busy = plan.num_microbatches * max(seconds)
    assert busy <= exact * (1 + 1e-12)
    assert closed <= exact * (1 + 1e-12)
    assert busy <= closed * (1 + 1e-12)


def test_merged_ranks_count_as_often_as_they_occur() -> None:
    plan = PlanTable.from_plans([Plan(pipeline_parallel=4, num_microbatches=8)])
    merged, _ = step_seconds(
        [rank_of(1.0), rank_of(2.0)], [(0, 1, 2), (3,)], plan, Hiding(1.0), on_gpu=True
    )
    apart, _ = step_seconds(
        [rank_of(1.0), rank_of(1.0), rank_of(1.0), rank_of(2.0)],
        [(place,) for place in range(4)],
        plan,
        Hiding(1.0),
        on_gpu=True,
    )
    assert merged.step == pytest.approx(8 * 2 + 3)
    assert apart.step == pytest.approx(8 * 2 + 3)


def test_collectives_pay_for_their_bytes_once_and_for_each_latency() -> None:
    traffic = Traffic(np.array([10.0, 0.0]), np.array([10e9, 0.0]))
    seconds = traffic_seconds("all_gather", traffic, np.array([8, 8]), 1e9, 1e-3)
    assert seconds == pytest.approx([10 * 7 / 8 + 10 * (7e-3 + COLLECTIVE_START), 0.0])
    sends = traffic_seconds("send", traffic, np.array([2, 2]), 1e9, 1e-3)
    assert sends == pytest.approx([10 + 10 * (1e-3 + COLLECTIVE_START), 0.0])
    alone = traffic_seconds("all_gather", traffic, np.array([1, 1]), 1e9, 1e-3)
    assert alone.tolist() == [0.0, 0.0]


def rank_parts(scenario: Any, plan: Plan) -> RankSeconds:
    (rank,) = even_split_contents(scenario.model, 1, 1)
    rate = rates(scenario.cluster.accelerator, scenario.workload.precision, scenario.software)
    return rank_seconds(RankView(scenario, PlanTable.from_plans([plan]), rank), rate)


def test_one_gpu_takes_its_micro_batches_and_the_optimizer() -> None:
    scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=4096, global_batch_size=4)
    plan = Plan(num_microbatches=4)
    parts, rank = price(scenario, PlanTable.from_plans([plan])).time, rank_parts(scenario, plan)
    assert parts.step[0] == pytest.approx(4 * rank.microbatch[0] + rank.optimizer[0])  # type: ignore[index]
    none = ("recompute", "tensor_communication", "pipeline_communication", "bubble")
    assert all(getattr(parts, name)[0] == 0 for name in none)
    # 6 FLOP a parameter and token at 80 % of the peak or a measured rate: MFU below one
    least = 6 * 7.5e9 * 4096 * 4 / 312e12
    assert least < parts.step[0] < 4 * least


def test_small_work_waits_for_the_host_and_large_work_does_not() -> None:
    def host(seq_len: int) -> float:
        """Share of the step."""
        scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=seq_len, global_batch_size=1)
        time = price(scenario, PlanTable.from_plans([Plan()])).time
        return float((time.host / time.step)[0])

    assert host(1) > 0.1
    assert 0.0 <= host(8192) < 1e-4


@pytest.mark.parametrize("power", [1.0, HOST_OVERLAP, np.inf])
def test_host_and_device_hide_each_other_in_part(power: float) -> None:
    """A norm of both: never less than the longer; most is lost where they are equal."""
    gpu = Rates(1e12, 1e12, 0.0, host_is_device=False)
    starting, device = np.array([0.0, 0.1, 0.9, 1.0, 1.1, 9.0, 0.0]), np.ones(7)
    device[-1] = 0.0
    both = device + host_wait(starting, device, gpu, overlap=power)
    longer = np.maximum(starting, device)
    norm = longer if power == np.inf else (starting**power + device**power) ** (1.0 / power)
    assert both == pytest.approx(norm, rel=1e-12)
    assert np.all(both >= longer)
    assert np.all((both - longer)[:5] <= (both - longer)[3])


def test_host_and_device_overlap_as_fitted_unless_said_otherwise() -> None:
    gpu = Rates(1e12, 1e12, 0.0, host_is_device=False)
    one = np.ones(1)
    assert host_wait(one, one, gpu) == host_wait(one, one, gpu, overlap=HOST_OVERLAP)
    assert host_wait(one, one, gpu) > 0.1


def test_full_recomputation_costs_one_more_forward_pass_of_the_layers() -> None:
    scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=4096, global_batch_size=1)
    plain, full = (
        price(scenario, PlanTable.from_plans([Plan(recompute=r)])).time  # type: ignore[arg-type]
        for r in ("none", "full")
    )
    assert full.compute[0] == plain.compute[0]  # type: ignore[index]
    # a third of the computation less the head and, of each layer, the last matrix (0.27 of them)
    assert 0.22 < full.recompute[0] / plain.compute[0] < 0.27  # type: ignore[index]


def test_names_of_the_parts() -> None:
    """They are keys of the JSON answers."""
    names = list(price(*one()).time.__struct_fields__)
    traffic = [f"{axis}_communication" for axis in ("tensor", "expert", "context", "pipeline")]
    compute = ["compute", "recompute", "host"]
    assert names == [*compute, *traffic, "bubble", "data_communication", "optimizer"]


def one() -> tuple[Any, PlanTable]:
    return make_scenario("llama", "1xA100-80GB", global_batch_size=1), PlanTable.from_plans(
        [Plan()]
    )
