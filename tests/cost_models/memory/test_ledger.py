"""Rows of the ledger: products of their factors, and sums of what lives at once."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner
from cost_models.legality.rules import legality_codes
from cost_models.memory.ledger import (
    BACKWARD,
    HEAD,
    LAST_LAYER,
    MOMENTS,
    OPTIMIZER,
    PARTS,
    Item,
    Ledger,
    Point,
    added,
    either,
    first,
    least,
    most,
    product,
)
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import rank_ledger, rank_memory, rank_timeline
from cost_models.memory.terms import SMALL, memory_terms
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from tests.samples import make_scenario

SCENARIOS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"precision": "fp32"},
    "mixtral": {"software": "torchtitan"},
    "gpt2": {"software": "megatron", "attention_kernel": "eager"},
    "t5": {"optimizer": "adafactor"},
    "llama by FSDP1": {"software": "fms-fsdp"},
    "llama under autocast": {"software": "hf-trainer-autocast"},
}
PLANS = (
    Plan(),
    Plan(num_microbatches=4),
    Plan(data_parallel=8),
    Plan(data_parallel=8, zero_stage=1, num_microbatches=4),
    Plan(data_parallel=8, zero_stage=3, num_microbatches=2, recompute="full"),
    Plan(data_parallel=4, tensor_parallel=2, zero_stage=2, sequence_parallel=True),
    Plan(pipeline_parallel=2, num_microbatches=8, pipeline_schedule="gpipe"),
    Plan(data_parallel=8, zero_stage=3, offload="weights"),
    Plan(data_parallel=8, zero_stage=1, offload="activations"),
)


def cases() -> list[Any]:
    found = []
    for name, options in SCENARIOS.items():
        for number, plan in enumerate(PLANS):
            cluster, batch = f"{plan.world_size}xA100-80GB", plan.global_batch_size
            model = name.split(" by ")[0].split(" under ")[0]
            scenario = make_scenario(model, cluster, global_batch_size=batch, **options)
            if legality_codes(scenario, PlanTable.from_plans([plan]))[0] == 0:
                found.append(pytest.param(scenario, plan, id=f"{name} {number}"))
    return found


def view_of(scenario: Scenario, plan: Plan) -> RankView:
    rank = pipeline_rank(scenario, plan, default_layer_ranges(scenario, plan), 0)
    return RankView(scenario, PlanTable.from_plans([plan]), rank)


def products_of(row: Item) -> list[Item]:
    return [row] if not row.rows else [leaf for each in row.rows for leaf in products_of(each)]


@pytest.mark.parametrize(("scenario", "plan"), cases())
def test_a_row_is_the_product_of_its_factors(scenario: Scenario, plan: Plan) -> None:
    ledger = rank_ledger(view_of(scenario, plan))
    points = (point.rows for moment in ledger.points for point in moment)
    rows = [leaf for rows in (ledger.rows, *points) for row in rows for leaf in products_of(row)]
    assert any(row.factors for row in rows)
    for row in rows:
        assert row.part in PARTS
        assert row.factors or row.formula or not np.any(row.size), row.name
        if row.factors:
            values = [
                1.0 / first(factor.value) if factor.symbol[0] == "/" else first(factor.value)
                for factor in row.factors
            ]
            assert math.prod(values) == pytest.approx(first(row.size), rel=1e-12, abs=1e-6)


@pytest.mark.parametrize(("scenario", "plan"), cases())
def test_the_parts_of_the_peak_are_the_sums_of_its_rows(scenario: Scenario, plan: Plan) -> None:
    view = view_of(scenario, plan)
    ledger, (parts, at, _) = rank_ledger(view), rank_memory(view)
    lines = rank_timeline(view)
    assert first(at) == max(range(len(MOMENTS)), key=lambda number: first(lines[number].peak))
    for moment, line in enumerate(lines):
        leaves = ledger.leaves(moment)
        for part in PARTS:
            size = sum(first(row.size) for row in leaves if row.part == part)
            assert size == pytest.approx(first(getattr(line, part)), rel=1e-12, abs=1e-3), part
    assert first(parts.peak) == first(lines[int(first(at))].peak)


@pytest.mark.parametrize("plan", PLANS[3:6])
def test_a_trainer_may_hold_another_share_of_activations(plan: Plan) -> None:
    """Of every row and of those it follows from; weights and gradients stay."""
    batch, cluster = plan.global_batch_size, f"{plan.world_size}xA100-80GB"
    usual = make_scenario("llama", cluster, global_batch_size=batch)
    software = usual.software.changed({"activations.share": 0.5})
    whole, half = (view_of(s, plan) for s in (usual, replace(usual, software=software)))
    for moment, (before, after) in enumerate(
        zip(rank_timeline(whole), rank_timeline(half), strict=True)
    ):
        assert first(after.allocated) <= first(before.allocated)
        leaves = rank_ledger(half).leaves(moment)
        size = sum(first(row.size) for row in leaves if row.part == "activations")
        assert size == pytest.approx(first(after.activations))
    gone = first(rank_timeline(whole)[0].activations - rank_timeline(half)[0].activations)
    assert gone == pytest.approx(0.5 * first(rank_timeline(whole)[0].activations))


def test_rows_live_from_one_event_to_another() -> None:
    weights = product("weights", "", ("c", 2.0, "bytes"), ("P", np.array([10.0])))
    kept = product("activations", "", ("a", 3.0), ("b·s", np.array([4.0]))).during(HEAD, BACKWARD)
    reduced = product("gradients", "", ("g", 4.0), ("P", np.array([10.0])), ("/d", 8))
    points = [[Point((reduced,))] if moment == OPTIMIZER else [Point(())] for moment in range(8)]
    ledger = Ledger((weights, kept), points)
    sums = [{part: first(size) for part, size in ledger.parts(m).items()} for m in range(8)]
    assert [at["activations"] for at in sums] == [0, 0, 12, 12, 0, 0, 0, 0]
    assert [at["weights"] for at in sums] == [20] * 8
    assert sums[OPTIMIZER]["gradients"] == 5
    assert [row.part for row in ledger.leaves(LAST_LAYER)] == ["weights"]


def test_the_printed_rows_are_those_that_counted() -> None:
    one, other = (
        product("buffers", name, ("c", size)) for name, size in (("one", 2.0), ("two", 3.0))
    )
    assert [row.name for row in least(one, other).leaves()] == ["one"]
    assert [row.name for row in most(one, other).leaves()] == ["two"]
    assert [row.name for row in added(one, other).leaves("gradients")] == ["one", "two"]
    assert {row.part for row in added(one, other).leaves("gradients")} == {"gradients"}
    assert [row.name for row in either(False, one, other).leaves()] == ["two"]


def test_an_explanation_worked_by_hand() -> None:
    """Llama 3 8B under ZeRO-3 with one micro-batch: every printed number follows from the model.

    Parameters: 8.03 B, of which 525.3 M are the head's and 218.1 M each layer's.
    """
    total, head, layer = 8_030_261_248, 128_256 * 4096, 218_112_000
    answer = planner.fit(
        "llama-3-8b", "8xA100-80GB", seq_len=1024, zero_stage=3, recompute="none", tensor_parallel=1
    )
    assert answer.to_dict()["memory"]["moment"] == "head"
    terms = {term.name: term for term in answer.step_memory.terms}
    expected = {
        "sharded master weights": (4 * total / 8, "4 bytes × 8.03 B parameters ÷ 8 ranks"),
        "states of adamw": (8 * total / 8, "8 bytes × 8.03 B parameters ÷ 8 ranks"),
        "saved by layers": (
            32 * 1024 * 200_840,
            "1 in flight × 32 layers × 1,024 tokens × 200,840 bytes",
        ),
        # the last norm is reduced with the head
        "gradients while they are reduced": (
            4.5 * (head + 4096) + 2 * head,
            "6.5 bytes × 525.34 M parameters",
        ),
        "gathered next layer": (2 * layer, "2 bytes × 218.11 M parameters"),
    }
    for name, (size, numbers) in expected.items():
        assert terms[name].numbers == numbers
        assert terms[name].size == pytest.approx(size, rel=1e-9)
    shown = " ".join(answer.explain().split())
    assert "w · P/d = 4 bytes × 8.03 B parameters ÷ 8 ranks" in shown
    assert not re.search(r"\d\.\d\d bytes × ", shown)  # no size divided by its elements


@pytest.mark.parametrize(("scenario", "plan"), cases())
def test_the_terms_of_a_part_add_up_to_it(scenario: Scenario, plan: Plan) -> None:
    """But for sums below ``SMALL`` of the peak, which are left out."""
    rank = view_of(scenario, plan).rank
    parts, moment, _ = rank_memory(view_of(scenario, plan))
    number = int(np.ravel(moment)[0])
    terms = memory_terms(scenario, plan, rank, parts, number)
    peak = float(np.ravel(parts.peak)[0])
    for part in MemoryParts.__struct_fields__:
        told = sum(term.size for term in terms if term.part == part)
        size = float(np.ravel(getattr(parts, part))[0])
        assert abs(told - size) <= SMALL * peak * (1 + 1e-9)
