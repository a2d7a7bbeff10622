"""The rows of the ledger are those of a traced step, and what belongs to none is counted."""

from typing import Any

import pytest

from benchmarks.memory_truth import ledger_rows
from benchmarks.memory_truth.cases import Case, file_of
from benchmarks.memory_truth.ledger_rows import (
    GRADIENTS,
    UNATTRIBUTED,
    ComparedEvent,
    compared_events,
    compared_rows,
)
from benchmarks.memory_truth.small_models import CONFIGS
from cost_models.memory.ledger import Item
from cost_models.memory.model_states import gradients
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from executor.counters.allocations import Allocation, largest_by_event
from executor.counters.memory_peak import BACKWARD, FORWARD, OPTIMIZER, StorageLifetime

LORA = {"adapter": "lora", "adapter_rank": 8, "adapter_alpha": 16.0}
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "adam, replicas": (Plan(2, micro_batch_size=2, num_microbatches=2), {}),
    "zero 1": (Plan(4, zero_stage=1, num_microbatches=2), {}),
    "zero 2": (Plan(4, zero_stage=2, num_microbatches=2), {}),
    "zero 3": (Plan(4, zero_stage=3), {}),
    "tensor and sequence": (
        Plan(2, 2, sequence_parallel=True, zero_stage=1, micro_batch_size=2),
        {},
    ),
    "pipeline": (Plan(2, pipeline_parallel=2, num_microbatches=4, zero_stage=1), {}),
    "selective": (Plan(2, zero_stage=2, recompute="selective"), {}),
    "full": (Plan(2, zero_stage=3, recompute="full", micro_batch_size=4), {}),
    "offload": (Plan(2, zero_stage=2, micro_batch_size=4, offload="optimizer+activations"), {}),
    "lora": (Plan(2, zero_stage=1, micro_batch_size=2), LORA),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_row_at_the_peak_is_traced(name: str) -> None:
    """Within 1 % of the peak, row by row; at most 0.1 % of it belongs to no row."""
    plan, workload = CASES[name]
    config = CONFIGS["llama"] | {"num_hidden_layers": 4}
    file = file_of(config, plan, Workload(512, plan.global_batch_size, **workload))
    for stage in range(plan.pipeline_parallel):
        peak = compared_events(Case(name, file, stage))[0]
        off = {row.name: row.off / peak.traced for row in peak.rows if row.name != UNATTRIBUTED}
        assert max(map(abs, off.values())) < 0.01, (peak.event, off)
        assert sum(each.bytes for each in peak.unattributed) < 0.001 * peak.traced
        assert len(off) > 4


def storage(category: str, size: int, **more: Any) -> Allocation:
    origin = {"phase": "backward", "place": "layers.0 of micro-batch 0", "operator": "aten::mm"}
    origin |= {"collective": "", "named": True, "frozen": False, "is_new": False, "storages": 1}
    return Allocation(category, bytes=size, **{**origin, **more})


def test_rows_that_are_off_and_storages_without_a_row_are_shown() -> None:
    leaves = [gradients("reduced gradients", 2.0, 500.0), Item("weights", "master weights", 4000.0)]
    traced = [
        storage("weights", 4000, phase="forward"),
        storage("gradients", 900),
        storage("logits", 64, named=False),
    ]
    rows = {row.name: row for row in compared_rows(leaves, traced)}
    assert rows[GRADIENTS].off == 100.0
    assert rows[ledger_rows.MASTER].off == 0.0
    assert rows[UNATTRIBUTED].traced == 64
    event = ComparedEvent("optimizer", "optimizer", list(rows.values()))
    assert {row.name for row in event.off} == {GRADIENTS, UNATTRIBUTED}
    first, *others = event.lines(every=False)
    assert "2 of 3 rows off; unattributed: 1 storages" in first
    assert any(
        "gradients, backward, layers.0 of micro-batch 0, aten::mm" in line for line in others
    )


def test_a_gradient_that_is_being_reduced_is_not_yet_one_of_the_reduced() -> None:
    copy = storage("buffers", 8, operator="aten::empty", named=False)
    copy = copy._replace(collective="c10d::_reduce_scatter_base_")
    reduced = Item("buffers", "gradients while they are reduced", 8.0)
    left_over = Item("buffers", "left over from a reduction", 8.0)
    for leaf in (reduced, left_over):
        (row,) = compared_rows([leaf], [copy])
        assert (row.name, row.off) == (leaf.name, 0.0)


def test_events_have_largest_ticks_of_their_own() -> None:
    phases = [FORWARD, FORWARD, BACKWARD, BACKWARD, OPTIMIZER]
    places = ["", "loss", "loss", "layer", "layer"]
    lives = [
        StorageLifetime(100, 0, FORWARD, "weights", frozen=True),
        StorageLifetime(10, 1, FORWARD, None, freed=3),
        StorageLifetime(40, 3, BACKWARD, None),
        StorageLifetime(7, 2, BACKWARD, None, freed=2),
    ]
    operators = ["", "mm", "add", "mul", "div"]
    found = largest_by_event(
        lives,
        phases,
        places,
        operators,
        lambda phase, place: place if phase == "backward" else None,
    )
    assert {name: sum(each.bytes for each in rows) for name, rows in found.items()} == {
        "loss": 117,
        "layer": 150,
    }
    weight, gradient, saved = found["layer"]
    assert (weight.frozen, weight.named, weight.operator) == (True, True, "")
    assert (gradient.category, gradient.place, gradient.is_new) == ("gradients", "layer", True)
    assert (saved.category, saved.operator, saved.phase) == ("activations", "mm", "forward")
