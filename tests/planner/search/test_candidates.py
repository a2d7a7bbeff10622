from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.columnar.dictionary_encoding import decode
from cost_models.columnar.product_projections import ProductFrame
from cost_models.legality.rules import CODES, RULES, legality_codes
from cost_models.plan.plan import PlanTable
from planner.request.constraints import broken_by_plan, parse_requirements
from planner.search.candidates import Candidates
from planner.search.plan_product import PlanProduct, ProductBlock
from planner.search.space import allowed_offloads, enumerate_plans
from tests.samples import make_scenario

SETTINGS: dict[str, Any] = {
    "llama": lambda: make_scenario("llama", "2x8xA100-80GB", seq_len=16_384, global_batch_size=48),
    "odd length": lambda: make_scenario("gpt2", "8xA100-80GB", seq_len=255, global_batch_size=12),
    "mixtral": lambda: make_scenario("mixtral", "2x4xH100-SXM", global_batch_size=24),
    "t5": lambda: make_scenario("t5", "8xA100-80GB", global_batch_size=24),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("most", [1, 3_000, 10**6])
def test_products_are_judged_as_every_plan_is(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Legal plans in the order of enumeration, counts and examples, however many at a time."""
    monkeypatch.setattr("planner.search.space.SLAB", most)
    scenario, require = SETTINGS[name](), parse_requirements(["pp<=4", "zero<=2"])
    offloads = allowed_offloads(["weights", "activations"])
    found = Candidates.of(scenario, {}, require, offloads)
    gpus = scenario.cluster.num_gpus
    table = enumerate_plans(scenario.model, scenario.workload, gpus, {}, offloads=offloads)
    codes = legality_codes(scenario, table)
    assert found.codes.tolist() == np.bincount(codes, minlength=len(CODES)).tolist()
    assert len(found.illegal) >= 3
    assert dict(found.examples) == {
        CODES[code]: RULES[code - 1].words(scenario, table.plan(int(np.argmax(codes == code))))
        for code in np.unique(codes[codes > 0])
    }
    legal = table.rows(codes == 0)
    excluded = broken_by_plan(require, legal)
    assert np.array_equal(found.excluded, excluded[excluded > 0])
    for f in fields(PlanTable):
        expected = getattr(legal, f.name)[excluded == 0]
        assert np.array_equal(decode(getattr(found.legal, f.name)), expected)


@given(
    st.lists(st.tuples(*[st.integers(1, 4)] * 4), min_size=1, max_size=5), st.integers(0, 2**8 - 1)
)
def test_levels_of_products_are_counted_as_their_rows_are(
    sizes: list[tuple[int, ...]], masks: int
) -> None:
    """Rows of a level fall on those of a coarser one that make the same choices."""
    frame = ProductFrame(np.array(sizes).T)
    mask, finer = masks % 16, masks % 16 | masks // 16

    def rows(projection: int) -> list[tuple[int, ...]]:
        ranges = [[n if projection >> k & 1 else 1 for k, n in enumerate(grid)] for grid in sizes]
        return [(g, *place) for g, shape in enumerate(ranges) for place in np.ndindex(*shape)]

    few, many = rows(mask), rows(finer)
    projection, index = frame.project(finer), frame.project(finer).index_into(frame.project(mask))
    assert (frame.project(mask).size, projection.size) == (len(few), len(many))
    kept = [
        (grid, *(n if mask >> k & 1 else 0 for k, n in enumerate(place))) for grid, *place in many
    ]
    assert [few[row] for row in (range(len(many)) if index is None else index)] == kept
    first = frame.prefix(projection)
    assert first.num_plans().sum() == np.prod(frame.sizes, axis=0).sum()


def test_plans_of_some_rows_are_those_of_the_whole_product() -> None:
    """The last choice fastest, each grid with values of its own."""
    blocks = [
        ProductBlock({"tensor_parallel": t}, {("zero_stage",): zero, ("recompute",): again})
        for t, zero, again in ((1, [0, 3], [0, 2]), (2, [1], [0, 1, 2]))
    ]
    rest = [f.name for f in fields(PlanTable)]
    pinned = {n: 1 for n in rest if n not in ("tensor_parallel", "zero_stage", "recompute")}
    product = PlanProduct.of(blocks, pinned)
    frame = product.factored()[1]
    whole = product.plans(frame.project(0), np.arange(2))
    assert decode(whole.tensor_parallel).tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert decode(whole.zero_stage).tolist() == [0, 0, 3, 3, 1, 1, 1]
    assert decode(whole.recompute).tolist() == [0, 2, 0, 2, 0, 1, 2]
    some = product.plans(frame.project(1), np.array([1, 2]))  # zero_stage 3, and that of two ranks
    assert decode(some.recompute).tolist() == [0, 2, 0, 1, 2]
    assert decode(some.zero_stage).tolist() == [3, 3, 1, 1, 1]
