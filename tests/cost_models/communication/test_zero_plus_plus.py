"""ZeRO++ against the paper's table of volumes, and by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.communication.volumes import communication_units, data_traffic
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import PredictionTable, price
from cost_models.scenario import Scenario
from tests.samples import make_scenario

PLAN = Plan(16, zero_stage=3, num_microbatches=1)
NEAR = {"secondary_ranks": 8}
ALL = {**NEAR, "quantised_weights": True, "quantised_gradients": True}


def scenario_of() -> Scenario:
    """Return two nodes of eight, gradients in 16 bits as the paper's."""
    scenario = make_scenario("llama-3-8b", "2x8xA100-80GB", seq_len=128, global_batch_size=16)
    return replace(scenario, workload=replace(scenario.workload, gradient_precision="bf16"))


def priced(scenario: Scenario, **changes: Any) -> PredictionTable:
    return price(scenario, PlanTable.from_plans([replace(PLAN, **changes)]))


def first(column: Any) -> float:
    return float(np.ravel(column)[0])


def volumes(**changes: Any) -> dict[str, float]:
    """Bytes of the layers, in 16-bit weights of them, by axis and kind."""
    scenario = scenario_of()
    (rank,) = even_split_contents(scenario.model, 1, 1)
    table = PlanTable.from_plans([replace(PLAN, **changes)])
    found = data_traffic(RankView(scenario, table, rank))
    outer = sum(
        2.0 * w.numel
        for b in communication_units(scenario.model, rank)
        if b.gathers == 1.0
        for w in b.weights
    )
    layers = 2.0 * scenario.model.num_parameters - outer
    int8, int4 = changes.get("quantised_weights"), changes.get("quantised_gradients")
    # embedding and head: gathered once, reduced once
    beside = {
        ("data", "all_gather"): outer * (0.5 if int8 else 1.0),
        ("data", "reduce_scatter"): outer * (0.25 if int4 else 1.0),
    }
    return {
        f"{axis} {kind}": (first(traffic.size) - beside.get((axis, kind), 0.0)) / layers
        for (axis, kind), traffic in found.items()
        if first(traffic.size) > 0
    }


@pytest.mark.parametrize(
    ("changes", "over_all", "near"),
    [
        ({}, 3.0, 0.0),
        ({"quantised_weights": True}, 2.0, 0.0),
        (NEAR, 2.0, 1.0),
        ({"quantised_gradients": True}, 2.25, 0.0),
        (ALL, 0.75, 1.0),
    ],
)
def test_table_1_of_the_paper(changes: dict[str, Any], over_all: float, near: float) -> None:
    """arXiv:2306.10209, table 1: 3 M of ZeRO-3 become 0.75 M between nodes."""
    found = volumes(**changes)
    assert found.pop("secondary all_gather", 0.0) == pytest.approx(near, rel=1e-3)
    assert sum(found.values()) == pytest.approx(over_all, rel=1e-3)


def test_the_second_copy_by_hand() -> None:
    """c P / n more, on every rank; MiCS and HSDP have it as their only copy."""
    scenario = scenario_of()
    plain, second = priced(scenario).memory, priced(scenario, **NEAR).memory
    assert first(second.weights - plain.weights) == 2 * scenario.model.num_parameters / 8
    for part in ("gradients", "optimizer", "activations", "logits"):
        assert first(getattr(second, part)) == first(getattr(plain, part))


def test_it_saves_time_between_nodes() -> None:
    scenario = scenario_of()
    # without the host's work around groups, behind which little traffic hides
    software = scenario.software.changed({"host.group_operators": 0.0})
    scenario = replace(scenario, software=software)
    seconds = {
        name: first(priced(scenario, **changes).time.data_communication)
        for name, changes in {"plain": {}, "near": NEAR, "all": ALL}.items()
    }
    assert seconds["all"] < seconds["near"] < seconds["plain"]


def test_quantised_values_lie_beside_what_they_become() -> None:
    scenario = scenario_of()
    plain = priced(scenario).memory
    weights = priced(scenario, quantised_weights=True).memory
    assert first(weights.buffers) > first(plain.buffers)
    gradients = priced(scenario, quantised_gradients=True).memory
    assert first(gradients.buffers) <= first(plain.buffers)


def test_a_table_equals_its_rows() -> None:
    scenario = scenario_of()
    plans = [replace(PLAN, **changes) for changes in ({}, NEAR, ALL)]
    together = price(scenario, PlanTable.from_plans(plans))
    for row, plan in enumerate(plans):
        alone = price(scenario, PlanTable.from_plans([plan]))
        assert alone.peak[0] == together.peak[row]
        assert alone.step[0] == together.step[row]
