from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.columnar.columns import FactoredColumn, by_value, on_distinct_rows
from cost_models.legality.rules import legality_codes
from cost_models.plan.factored import factored
from cost_models.plan.plan import PlanTable
from planner.search.space import enumerate_plans
from tests.samples import make_scenario


def random_table(size: int, seed: int = 0) -> PlanTable:
    """Columns of a few values each, drawn apart from each other."""
    rng = np.random.default_rng(seed)
    flags = {"sequence_parallel", "expert_tensor_parallel", "quantised_weights"}
    columns: dict[str, Any] = {}
    for f in fields(PlanTable):
        columns[f.name] = (
            rng.integers(1, 4, size) if f.name not in flags else rng.random(size) < 0.5
        )
    columns["offload"] = np.zeros(size, dtype=np.int64)  # the same everywhere
    columns["num_microbatches"] = rng.integers(0, 10**9, size)  # different everywhere
    return PlanTable(**columns)


def expand(value: Any, size: int) -> Any:
    return value.expanded() if type(value) is FactoredColumn else np.broadcast_to(value, size)


FORMULAS = {
    "sum": lambda t: t.tensor_parallel + t.zero_stage,
    "swapped": lambda t: 7.0 - 3 / t.tensor_parallel,
    "chain": lambda t: (t.tensor_parallel * 2.5 + t.zero_stage) / t.recompute - t.num_microbatches,
    "flags": lambda t: (t.sequence_parallel & (t.zero_stage >= 2)) | (t.tensor_parallel == 1),
    "not": lambda t: ~(t.zero_stage > 1) & np.logical_not(t.sequence_parallel),
    "always": lambda t: np.where(t.zero_stage > 0, t.tensor_parallel, 5.0),
    "never": lambda t: np.where(t.offload > 0, t.tensor_parallel, 5),
    "where": lambda t: np.where(t.zero_stage > 2, 1.0 * t.tensor_parallel, t.recompute),
    "select": lambda t: np.select(
        [t.zero_stage == 1, t.zero_stage == 2, t.offload > 0], [t.recompute, 2.0, 3], 0.5
    ),
    "largest": lambda t: np.maximum(t.tensor_parallel, np.minimum(t.zero_stage, 2)),
    "pick": lambda t: np.max(np.stack([t.tensor_parallel, t.zero_stage, np.zeros(len(t))]), axis=0),
    "argmax": lambda t: np.argmax(np.stack([t.tensor_parallel, t.zero_stage]), axis=0),
    "isin": lambda t: np.isin(t.zero_stage, [1, 3]) & np.isin(t.recompute, [2]),
    "length": lambda t: np.zeros(len(t)) + t.tensor_parallel,
    "likes": lambda t: np.ones_like(t.tensor_parallel) + np.zeros_like(t.zero_stage) * 1.0,
    "full": lambda t: np.full_like(1.0 * t.tensor_parallel, 3) * t.zero_stage,
    "by value": lambda t: by_value(t.num_microbatches > 5e8) * (1.0 * t.tensor_parallel),
    "apart": lambda t: on_distinct_rows(lambda x, y, z=0: np.sort(x)[::-1].size * 0 + x * y + z)(
        t.tensor_parallel, 2.0, z=t.zero_stage
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("size", [1, 7, 3000])
def test_columns_give_what_arrays_give(name: str, size: int) -> None:
    table = random_table(size)
    expected = np.broadcast_to(FORMULAS[name](table), size)
    found = expand(FORMULAS[name](factored(table)[0]), size)
    assert np.array_equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("times", [2, 3])
def test_repeated_rows_give_what_each_repetition_gives(times: int) -> None:
    """A column with values of its own for each repetition, as for ranks of a pipeline."""
    table, size = random_table(3000), 3000
    few, frame = factored(table)
    stage: Any = few.zero_stage
    own = np.arange(3.0 * times).reshape(times, 3)  # of each repetition and value of the column
    of_ranks: Any = FactoredColumn(stage.projection.repeated(times), own.ravel())
    of_rank: Any = FactoredColumn(frame.project(0).repeated(times), np.arange(times) + 0.5)
    found: Any = np.where(of_ranks > few.tensor_parallel, of_ranks * few.recompute, stage) / of_rank
    assert (of_ranks * stage).projection is of_ranks.projection
    for number in range(times):
        mine = own[number][np.searchsorted(stage.values, table.zero_stage)]
        wanted = np.where(mine > table.tensor_parallel, mine * table.recompute, table.zero_stage)
        assert np.array_equal(expand(found.repetition(number), size), wanted / (number + 0.5))
    assert np.array_equal(expand((1.0 * stage).repetition(times - 1), size), table.zero_stage)


def test_equal_rows_are_computed_once() -> None:
    table = factored(random_table(5000))[0]
    column: Any = table.tensor_parallel * 2.0 + table.zero_stage
    assert column.values.size == 9  # three values of each
    more: Any = column + table.recompute * 1.0
    assert more.values.size == 27
    assert (more * column).projection is more.projection
    constant: Any = table.offload
    assert type(constant) is np.ndarray  # the same in all rows: no column at all


def test_what_was_computed_is_not_computed_again() -> None:
    table = factored(random_table(5000))[0]
    tensor: Any = table.tensor_parallel
    assert tensor * 2.0 is tensor * 2.0
    assert np.where(tensor > 1, 2.0, tensor) is np.where(tensor > 1, 2.0, tensor)
    assert np.maximum(tensor, 2) is np.maximum(tensor, 2)
    # names that look alike are told apart: 2 and 2.0, 0.0 and -0.0, operands in another order
    assert (tensor * 2).dtype != (tensor * 2.0).dtype
    assert np.signbit((tensor * -0.0).values).all()
    assert not np.signbit((tensor * 0.0).values).any()
    difference: Any = tensor - table.zero_stage
    assert np.array_equal((table.zero_stage - tensor).values, -difference.values)
    assert np.array_equal((2.0 - tensor).values, -(tensor - 2.0).values)


def test_one_value_for_all_rows_stays_one_value() -> None:
    table = random_table(50)
    same = replace(table, offload=np.broadcast_to(np.int64(3), 50))
    some = same.rows(np.arange(50) % 2 == 0)
    assert some.offload.strides == (0,)
    assert some.offload.tolist() == [3] * 25
    assert len(same.rows(np.zeros(50, dtype=bool)).rows(np.arange(0)).offload) == 0
    assert factored(some)[0].offload.tolist() == [3]


def test_a_flag_that_is_the_same_everywhere_depends_on_nothing() -> None:
    table = factored(random_table(500))[0]
    always: Any = table.zero_stage > 0
    assert type(always) is np.ndarray
    assert always.tolist() == [True]
    assert (table.zero_stage > 3).tolist() == [False]


def test_columns_refuse_what_would_lose_what_they_depend_on() -> None:
    column: Any = factored(random_table(500))[0].zero_stage
    with pytest.raises(TypeError, match="not an array"):
        np.asarray(column)
    with pytest.raises(TypeError, match="truth value"):
        bool(column == 1)
    with pytest.raises(TypeError, match="cannot be indexed"):
        column[3]
    with pytest.raises(TypeError):
        np.median(column)


@given(st.integers(1, 400), st.integers(0, 10**6))
def test_rows_of_levels_are_rows_of_the_table(size: int, seed: int) -> None:
    """Every level's values, at every row, are those of the columns it was made of."""
    table = random_table(size, seed)
    few, _ = factored(table)
    made: Any = 0.0
    plain: Any = 0.0
    for f in fields(PlanTable):
        made = made * 1.5 + getattr(few, f.name)
        plain = plain * 1.5 + getattr(table, f.name)
        assert np.array_equal(expand(made, size), plain)


def test_formulas_that_meet_no_column_are_left_alone() -> None:
    double = on_distinct_rows(lambda x: 2 * x)
    assert double(3) == 6
    assert double.__name__
    scenario = make_scenario("llama", "8xA100-80GB")
    table = enumerate_plans(scenario.model, scenario.workload, 8, {})
    legal = table.rows(legality_codes(scenario, table) == 0)
    assert np.array_equal(double(legal.zero_stage), 2 * legal.zero_stage)
