"""What host memory saves and costs, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from cost_models.activations.live import layer_bytes
from cost_models.communication.host_link import (
    CORE_BANDWIDTH,
    GRACE_LINK_BANDWIDTH,
    GRACE_MEMORY_BANDWIDTH,
    PAGEABLE_BANDWIDTH,
    STREAM_SHARE,
    activation_offload_seconds,
    host_link,
    host_memory_bandwidth,
    host_update_seconds,
    usable_bytes,
)
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import OFFLOADS, Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import PredictionTable, price
from cost_models.pricing.step_bounds import step_times
from cost_models.scenario import Scenario
from cost_models.step_time.optimizer_update import host_accesses
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from tests.samples import make_scenario

PLAN = Plan(8, zero_stage=2, num_microbatches=2)


def scenario_of(cluster: str = "8xA100-80GB", **options: Any) -> Scenario:
    chosen: dict[str, Any] = {"seq_len": 2048, "global_batch_size": 16, **options}
    return make_scenario("llama-3-8b", cluster, **chosen)


def priced(scenario: Scenario, offload: Any, plan: Plan = PLAN) -> PredictionTable:
    return price(scenario, PlanTable.from_plans([replace(plan, offload=offload)]))


def test_moments_leave_and_master_weights_stay() -> None:
    scenario = scenario_of()
    plain, moved = priced(scenario, "none"), priced(scenario, "optimizer")
    share = scenario.model.num_parameters / 8
    assert float(plain.memory.optimizer[0] - moved.memory.optimizer[0]) == 8 * share  # type: ignore[index]
    assert float(moved.memory.optimizer[0]) == 0  # type: ignore[index]
    assert moved.memory.weights[0] == plain.memory.weights[0] >= 4 * share  # type: ignore[index]
    for part in ("weights", "gradients", "activations", "buffers"):
        assert getattr(plain.memory, part)[0] == getattr(moved.memory, part)[0]


def test_the_update_on_the_host_by_hand() -> None:
    scenario = scenario_of()
    figure = scenario.cluster.accelerator.host_bandwidth
    assert figure is not None
    # two accelerators behind each of a DGX A100's PCIe switches
    link = figure.value * scenario.software.communication.bus_efficiency / 2
    share = scenario.model.num_parameters / 8
    on_host = 8 * share / link
    memory = STREAM_SHARE * 2 * 8 * 25.6e9  # two EPYC 7742, eight channels of DDR4-3200 each
    on_host += 8 * scenario.software.optimizer.moved_bytes * share / memory
    parts = {name: priced(scenario, name).time for name in ("none", "optimizer")}
    more = float((parts["optimizer"].optimizer - parts["none"].optimizer)[0])  # type: ignore[index]
    assert 0.9 * on_host < more < on_host  # without what the device needed for it
    assert parts["optimizer"].compute[0] == parts["none"].compute[0]  # type: ignore[index]


def test_accelerators_behind_one_switch_share_its_link_to_the_host() -> None:
    plan = Plan(4, zero_stage=2, num_microbatches=4)
    table = PlanTable.from_plans([plan])
    whole, half = scenario_of(), scenario_of("4xA100-80GB")
    each = [host_link(s.cluster, table, s.software) for s in (whole, half)]
    assert each[1] == 2 * each[0]  # a job of half a node need not share


def test_paged_states_that_do_not_fit_come_and_go_once_a_step() -> None:
    plan = Plan(1, num_microbatches=16)
    fits, full = (
        make_scenario("llama-3-8b", f"1x{name}", seq_len=2048, global_batch_size=16, **chosen)
        for name, chosen in (
            ("B200", {"optimizer": "paged_adamw"}),
            ("H200", {"optimizer": "paged_adamw"}),
        )
    )
    seconds = []
    for scenario in (fits, full):
        plain = replace(scenario, workload=replace(scenario.workload, optimizer="adamw"))
        table = PlanTable.from_plans([plan])
        times = [price(one, table).time.optimizer[0] for one in (scenario, plain)]  # type: ignore[index]
        seconds.append(float(times[0] - times[1]))
        assert step_times(scenario, table)[0] == pytest.approx(price(scenario, table).step)
    assert seconds[0] == 0.0
    priced_full = price(full, PlanTable.from_plans([plan]))
    states = 8 * full.model.num_parameters
    excess = states + float(priced_full.peak[0]) - usable_bytes(full.cluster.accelerator)
    link = host_link(full.cluster, PlanTable.from_plans([plan]), full.software)
    assert 0 < excess < states
    assert seconds[1] == pytest.approx(2 * excess / link, rel=1e-3)  # vectors stay


def test_one_layer_is_all_that_is_left_of_the_activations_at_the_loss() -> None:
    scenario = scenario_of()
    (rank,) = even_split_contents(scenario.model, 1, 1)
    table = PlanTable.from_plans([PLAN])
    every = layer_bytes(RankView(scenario, table, rank))
    plain, moved = priced(scenario, "none"), priced(scenario, "activations")
    saved = float(plain.memory.activations[0] - moved.memory.activations[0])  # type: ignore[index]
    layers = scenario.model.num_layers
    assert saved == pytest.approx(float(every[0]) * (layers - 1) / layers, rel=1e-12)  # type: ignore[index]
    assert float(moved.step[0]) > float(plain.step[0])


def test_a_copy_that_computation_hides_costs_only_its_way_back() -> None:
    assert activation_offload_seconds(1e9, 1.0, 1.0, 10e9) == (0.0, 0.1)
    assert activation_offload_seconds(1e9, 1.0, 1.0, 10e9, prefetched=True) == (0.0, 0.0)
    assert activation_offload_seconds(4e9, 1.0, 0.3, 10e9, prefetched=True) == (
        0.0,
        pytest.approx(0.1),
    )


def test_both_together_save_and_cost_what_each_does() -> None:
    scenario = scenario_of()
    found = {name: priced(scenario, name) for name in OFFLOADS}
    both = found["optimizer+activations"]
    assert both.memory.optimizer[0] == found["optimizer"].memory.optimizer[0]  # type: ignore[index]
    assert both.memory.activations[0] == found["activations"].memory.activations[0]  # type: ignore[index]
    assert both.time.host[0] == found["activations"].time.host[0]  # type: ignore[index]
    assert both.time.optimizer[0] == found["optimizer"].time.optimizer[0]  # type: ignore[index]


def test_in_a_pipeline_the_messages_stay() -> None:
    scenario = scenario_of()
    plan = Plan(2, 1, 4, num_microbatches=8)
    plain, moved = priced(scenario, "none", plan), priced(scenario, "activations", plan)
    assert moved.memory.allocated[0] < plain.memory.allocated[0]  # type: ignore[index]


def test_an_unknown_link_is_an_error_only_where_it_is_used() -> None:
    scenario = scenario_of()
    accelerator = replace(scenario.cluster.accelerator, host_bandwidth=None)
    unknown = replace(scenario, cluster=replace(scenario.cluster, accelerator=accelerator))
    with pytest.raises(InputError, match="offload needs host_bandwidth"):
        priced(unknown, "optimizer")
    assert priced(unknown, "none").step[0] == priced(scenario, "none").step[0]


def test_on_a_cpu_nothing_is_saved_and_nothing_costs() -> None:
    scenario = scenario_of()
    accelerator = replace(scenario.cluster.accelerator, device="cpu", host_bandwidth=None)
    cpu = replace(scenario, cluster=replace(scenario.cluster, accelerator=accelerator))
    plain, moved = priced(cpu, "none"), priced(cpu, "optimizer+activations")
    assert plain.peak[0] == moved.peak[0]
    assert plain.step[0] == moved.step[0]


@pytest.mark.parametrize(
    ("name", "states", "moved", "on_one_core"),
    [
        # 20 accesses, less the norm, and two temporaries of new memory
        ("torch-trainer", "auto", 4 * 4 + 5 * 4 + 7 * 8 - 4 + 2 * 8 * 4, 4.0),
        ("torch-trainer", "bf16", 4 * 4 + 5 * 4 + 7 * 4 - 4 + 2 * 8 * 2, 4.0),
        ("torch-trainer+fsdp2+adamw-fused", "auto", 36.0, 4.0),
        ("torch-trainer+unclipped-gradients", "auto", 4 * 4 + 2 * 4 + 7 * 8 + 2 * 8 * 4, 0.0),
        ("torch-trainer+cpu-adam", "auto", 44.0, 0.0),
        ("hf-trainer+deepspeed-zero2", "auto", 44.0, 0.0),
        ("hf-trainer+deepspeed-zero3", "auto", 64.0, 0.0),
        ("megatron", "auto", 40.0, 0.0),
        ("shardplan", "auto", 36.0, 0.0),
    ],
)
def test_bytes_of_updates_on_the_host(
    name: str, states: Any, moved: float, on_one_core: float
) -> None:
    workload = Workload(1, 1, optimizer="adamw", optimizer_state_precision=states)
    assert host_accesses(workload, software_profile(name)) == (moved, on_one_core)


def test_deepspeed_sends_sums_of_gradients_both_ways_for_every_later_micro_batch() -> None:
    """2 c P (m - 1) / link more a step, and more of it from pageable memory."""

    def update(software: str, microbatches: int) -> float:
        scenario = scenario_of("1xA100-SXM-80GB", software=software, global_batch_size=microbatches)
        plan = Plan(1, zero_stage=3, num_microbatches=microbatches)
        found = priced(scenario, "optimizer", plan)
        return float(found.time.optimizer[0])  # type: ignore[index]

    def each(software: str) -> float:
        return (update(software, 9) - update(software, 1)) / 8

    elements = scenario_of("1xA100-SXM-80GB").model.num_parameters
    pageable = each("hf-trainer+deepspeed-zero3+pageable-host-memory")
    assert pageable == pytest.approx(4 * elements / PAGEABLE_BANDWIDTH)
    assert 0 < each("hf-trainer+deepspeed-zero2") == each("hf-trainer+deepspeed-zero3") < pageable
    assert each("torch-trainer+fsdp2") == 0


def test_weights_cast_on_the_host_leave_pageable_memory() -> None:
    plain = host_update_seconds(1e9, 4.0, 50e9, 1, 0.0, 1e12)
    cast = host_update_seconds(1e9, 4.0, 50e9, 1, 0.0, 1e12, cast_bytes=2.0)
    assert cast - plain == pytest.approx(1e9 * (2.0 / PAGEABLE_BANDWIDTH - 4.0 / 50e9))


def test_a_norm_on_the_host_takes_one_core_whatever_its_memory() -> None:
    def seconds(cores: float, memory: float) -> float:
        return float(host_update_seconds(1e9, 4.0, 50e9, 8, 36.0, memory, cores))

    assert seconds(4.0, 4e11) - seconds(0.0, 4e11) == pytest.approx(4e9 / CORE_BANDWIDTH)
    assert seconds(4.0, 8e11) - seconds(0.0, 8e11) == pytest.approx(4e9 / CORE_BANDWIDTH)


def test_ranks_on_superchips_do_not_share_their_memory() -> None:
    """Two GH200s in one node update as fast as one each in two; two H100s do not."""
    options: dict[str, Any] = {"software": "torch-trainer", "global_batch_size": 2}
    plan = Plan(2, zero_stage=3)

    def update(cluster: str) -> float:
        found = priced(scenario_of(cluster, **options), "weights", plan)
        return float(found.time.optimizer[0])  # type: ignore[index]

    assert update("1x2xGH200") == pytest.approx(update("2x1xGH200"), rel=1e-3)
    assert update("1x2xH100-SXM") > 1.3 * update("2x1xH100-SXM")


def test_two_blackwells_share_a_grace_and_its_link() -> None:
    gb200 = scenario_of("1x4xGB200").cluster
    figure = gb200.accelerator.host_bandwidth
    assert figure is not None
    assert figure.value == GRACE_LINK_BANDWIDTH / 2
    assert host_memory_bandwidth(gb200) == STREAM_SHARE * 2 * GRACE_MEMORY_BANDWIDTH
    b200 = scenario_of("1x8xB200").cluster
    assert host_memory_bandwidth(b200) < 8 * GRACE_MEMORY_BANDWIDTH / 4
