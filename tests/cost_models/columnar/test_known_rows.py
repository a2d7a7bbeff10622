"""Results of a formula that tables share."""

from typing import Any

import numpy as np
import pytest

from cost_models.columnar import known_rows
from cost_models.columnar.columns import FactoredColumn, expand
from cost_models.columnar.known_rows import KnownRows
from cost_models.plan.factored import factored, rows_of
from cost_models.plan.plan import Plan, PlanTable

NAMES = ("tensor_parallel", "micro_batch_size")


def table_of(tensor: list[int], micro: list[int]) -> PlanTable:
    pairs = zip(tensor, micro, strict=True)
    return PlanTable.from_plans([Plan(tensor_parallel=t, micro_batch_size=b) for t, b in pairs])


class Formula:
    """A sum of two columns and a constant, with the rows that were asked for."""

    def __init__(self) -> None:
        self.known, self.asked = KnownRows(), list[int]()

    def __call__(self, table: PlanTable) -> list[Any] | None:
        def price(rows: Any) -> list[Any]:
            few = rows_of(table, rows)
            self.asked.append(len(few))
            return [few.tensor_parallel + 0.1 * few.micro_batch_size, np.full(1, 3.0)]

        return self.known.columns([getattr(table, name) for name in NAMES], price)


def test_rows_that_another_table_had_are_not_priced_again() -> None:
    formula = Formula()
    tensor, micro = [1, 2, 4, 2, 1, 8], [1, 1, 2, 1, 1, 3]
    plain = table_of(tensor, micro)
    expected = plain.tensor_parallel + 0.1 * plain.micro_batch_size
    for table in (plain, factored(plain)[0], plain.rows([5, 0])):
        found = formula(table)
        assert found is not None
        size = 2 if len(table) == 2 else 6
        assert expand(found[0], size).tolist() == expected[[5, 0] if size == 2 else ...].tolist()
        assert set(expand(found[1], size).tolist()) == {3.0}
    assert formula.asked == [4]
    more = factored(table_of([2, 4, 4], [1, 2, 9]))[0]
    again = formula(more), formula(more)
    assert all(found is not None for found in again)
    assert again[0] is again[1]  # so that later operations on it are found, too
    assert type(again[0][0]) is FactoredColumn  # type: ignore[index]
    assert formula.asked == [4, 1]


def test_many_different_rows_are_left_to_operations_on_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_rows, "MOST", 3)
    assert Formula()(factored(table_of([1, 2, 4, 8], [1, 2, 3, 4]))[0]) is None
