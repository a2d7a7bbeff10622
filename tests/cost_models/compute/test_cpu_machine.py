"""What is different where processes share the cores of a CPU and talk through gloo."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from cost_models.communication.seconds import traffic_seconds
from cost_models.communication.volumes import Traffic
from cost_models.compute.attention import CPU_FLASH_KEYS, CoreWork, attention_core_seconds
from cost_models.compute.rates import Rates
from cost_models.model.spec import Attention
from cost_models.plan.plan import Plan, PlanTable
from cost_models.step_time.overlap import Hiding
from cost_models.step_time.parts import RankSeconds
from cost_models.step_time.step import step_seconds
from hardware_profiles.software.trainer import software_profile
from tests.cost_models.step_time.pipeline_simulator import _needs, torch_order

SOFTWARE = software_profile("shardplan")


def shared_makespan(plan: Plan, seconds: list[float], cores: float) -> float:
    """Event by event: passes that could run at a time share the cores evenly."""
    p = plan.pipeline_parallel
    order = torch_order(plan.pipeline_schedule, p, 1, plan.num_microbatches)
    position, left, done, clock = [0] * p, [0.0] * p, set(), 0.0
    while any(place < len(actions) for place, actions in zip(position, order, strict=True)):
        running = []
        for rank, actions in enumerate(order):
            if position[rank] < len(actions):
                action = actions[position[rank]]
                needs = _needs(action, p - 1)
                if needs is None or needs in done:
                    running.append(rank)
                    if left[rank] == 0.0:
                        left[rank] = seconds[rank] * (1 / 3 if action.forward else 2 / 3)
        rate = min(1.0, cores / len(running))
        step = min(left[rank] for rank in running) / rate
        clock += step
        for rank in running:
            left[rank] -= step * rate
            if left[rank] <= 1e-12:
                left[rank] = 0.0
                done.add(order[rank][position[rank]])
                position[rank] += 1
    return clock


def predicted(plan: Plan, seconds: list[float], cores: float) -> float:
    """The closed form; ``seconds`` of a micro-batch with a core for each process."""
    share = min(1.0, cores / plan.pipeline_parallel)
    zero = np.zeros(1)
    ranks = [
        RankSeconds(
            compute=np.array([s / share]),
            recompute=zero,
            host=zero,
            tensor_communication=zero,
            pipeline_communication=zero,
            backward=np.array([2 * s / 3 / share]),
            weights=zero,
            data_communication=zero,
            optimizer=zero,
        )
        for s in seconds
    ]
    table = PlanTable.from_plans([plan])
    places = [(place,) for place in range(len(ranks))]
    parts, _ = step_seconds(ranks, places, table, Hiding(1.0), on_gpu=False, core_share=share)
    return float(parts.step[0])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_processes_that_wait_leave_their_core_to_the_others(schedule, cores, microbatches) -> None:
    plan = Plan(pipeline_parallel=4, num_microbatches=microbatches)
    plan = replace(plan, pipeline_schedule=schedule)
    for seconds in ([1.0] * 4, [1.0, 1.0, 1.0, 1.5]):
        expected = shared_makespan(plan, seconds, cores)
        assert predicted(plan, seconds, cores) == pytest.approx(expected, rel=0.15)


def test_work_is_never_done_faster_than_all_cores_do_it() -> None:
    for pipeline in (2, 4, 8):
        plan = Plan(pipeline_parallel=pipeline, num_microbatches=2 * pipeline)
        for cores in (1, 2, 3):
            work = 2 * pipeline * pipeline / min(cores, pipeline)
            assert predicted(plan, [1.0] * pipeline, cores) >= work * (1 - 1e-12)


def test_gloo_reduces_everywhere_to_scatter() -> None:
    traffic = Traffic(np.array([1.0]), np.array([1e6]))
    link = (traffic, np.array([4]), 1e9, 1e-3)
    assert traffic_seconds("reduce_scatter", *link, gloo=True) == traffic_seconds(
        "all_reduce", *link, gloo=True
    )
    assert float(traffic_seconds("all_reduce", *link, gloo=True)[0]) == pytest.approx(6e-3 + 1.5e-3)
    assert traffic_seconds("reduce_scatter", *link) < traffic_seconds("all_reduce", *link)


def test_attention_on_a_cpu_visits_whole_blocks_and_pays_for_each_score() -> None:
    attention = Attention(num_heads=4, num_kv_heads=4, head_dim=64, value_head_dim=64)
    cpu = Rates(matmul=1e11, memory=1e10, operator=1e-6, host_is_device=True, score=1e-9)

    def seconds(seq_len: int, **change: float) -> float:
        rate = structs.replace(cpu, **change)
        arguments = (float(seq_len), seq_len, 1, "flash", 4.0, rate, SOFTWARE)
        return float(attention_core_seconds(CoreWork(attention, *arguments)))

    block = int(CPU_FLASH_KEYS)
    scores = 4 * block * block
    assert seconds(block) == pytest.approx(scores * (4 * 64 / 1e11 + 1e-9))
    assert seconds(block, score=0.0) == pytest.approx(scores * 4 * 64 / 1e11)
    # a block of queries sees itself, the next one both: three of four blocks
    assert seconds(2 * block) == pytest.approx(3 * seconds(block))
