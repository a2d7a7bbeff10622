"""What host memory saves and costs, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from samples import make_setting

from cost_models.estimate import Priced, Setting, price
from cost_models.held_activations import layer_bytes
from cost_models.offload import HOST_MEMORY_BANDWIDTH, activation_seconds
from cost_models.plan import OFFLOADS, Plan, PlanTable
from cost_models.stages import even_rank_contents
from hardware_profiles.errors import InputError

PLAN = Plan(8, zero_stage=2, num_microbatches=2)


def setting_of(cluster: str = "8xA100-80GB", **options: Any) -> Setting:
    chosen: dict[str, Any] = {"seq_len": 2048, "global_batch_size": 16, **options}
    return make_setting("llama-3-8b", cluster, **chosen)


def priced(setting: Setting, offload: Any, plan: Plan = PLAN) -> Priced:
    return price(setting, PlanTable.from_plans([replace(plan, offload=offload)]))


def test_moments_leave_and_master_weights_stay() -> None:
    setting = setting_of()
    plain, moved = priced(setting, "none"), priced(setting, "optimizer")
    share = setting.model.num_parameters / 8
    assert float(plain.memory.optimizer[0] - moved.memory.optimizer[0]) == 8 * share  # type: ignore[index]
    assert float(moved.memory.optimizer[0]) == 4 * share  # type: ignore[index]
    for part in ("weights", "gradients", "activations", "buffers"):
        assert getattr(plain.memory, part)[0] == getattr(moved.memory, part)[0]


def test_the_update_on_the_host_by_hand() -> None:
    setting = setting_of()
    figure = setting.cluster.accelerator.host_bandwidth
    assert figure is not None
    link = figure.value * setting.software.bus_efficiency
    share = setting.model.num_parameters / 8
    on_host = 8 * share / link
    on_host += 8 * setting.software.optimizer_accesses_bytes * share / HOST_MEMORY_BANDWIDTH
    parts = {name: priced(setting, name).time for name in ("none", "optimizer")}
    more = float((parts["optimizer"].optimizer - parts["none"].optimizer)[0])  # type: ignore[index]
    assert 0.9 * on_host < more < on_host  # without what the device needed for it
    assert parts["optimizer"].compute[0] == parts["none"].compute[0]  # type: ignore[index]


def test_two_layers_are_all_that_is_left_of_the_activations() -> None:
    setting = setting_of()
    (rank,) = even_rank_contents(setting.model, 1, 1)
    table = PlanTable.from_plans([PLAN])
    every = layer_bytes(setting.model, setting.workload, setting.software, table, rank)
    plain, moved = priced(setting, "none"), priced(setting, "activations")
    saved = float(plain.memory.activations[0] - moved.memory.activations[0])  # type: ignore[index]
    layers = setting.model.num_layers
    assert saved == pytest.approx(float(every[0]) * (layers - 2) / layers, rel=1e-12)  # type: ignore[index]
    assert float(moved.step[0]) > float(plain.step[0])


def test_a_copy_that_computation_hides_costs_only_its_way_back() -> None:
    assert activation_seconds(1e9, 1.0, 10e9) == (0.0, 0.1)


def test_both_together_save_and_cost_what_each_does() -> None:
    setting = setting_of()
    found = {name: priced(setting, name) for name in OFFLOADS}
    both = found["optimizer+activations"]
    assert both.memory.optimizer[0] == found["optimizer"].memory.optimizer[0]  # type: ignore[index]
    assert both.memory.activations[0] == found["activations"].memory.activations[0]  # type: ignore[index]
    assert both.time.host[0] == found["activations"].time.host[0]  # type: ignore[index]
    assert both.time.optimizer[0] == found["optimizer"].time.optimizer[0]  # type: ignore[index]


def test_in_a_pipeline_the_messages_stay() -> None:
    setting = setting_of()
    plan = Plan(2, 1, 4, num_microbatches=8)
    plain, moved = priced(setting, "none", plan), priced(setting, "activations", plan)
    assert moved.memory.allocated[0] < plain.memory.allocated[0]  # type: ignore[index]


def test_an_unknown_link_is_an_error_only_where_it_is_used() -> None:
    setting = setting_of()
    accelerator = replace(setting.cluster.accelerator, host_bandwidth=None)
    unknown = replace(setting, cluster=replace(setting.cluster, accelerator=accelerator))
    with pytest.raises(InputError, match="offload needs host_bandwidth"):
        priced(unknown, "optimizer")
    assert priced(unknown, "none").step[0] == priced(setting, "none").step[0]


def test_on_a_cpu_nothing_is_saved_and_nothing_costs() -> None:
    setting = setting_of()
    accelerator = replace(setting.cluster.accelerator, device="cpu", host_bandwidth=None)
    cpu = replace(setting, cluster=replace(setting.cluster, accelerator=accelerator))
    plain, moved = priced(cpu, "none"), priced(cpu, "optimizer+activations")
    assert plain.peak[0] == moved.peak[0]
    assert plain.step[0] == moved.step[0]
