import numpy as np
import pytest

from cost_models.columnar.dictionary_encoding import (
    DictionaryColumn,
    concatenate,
    decode,
    encode,
    map_values,
)
from cost_models.columnar.projections import distinct, distinct_rows


def column(values: list[int], codes: list[int]) -> DictionaryColumn:
    return DictionaryColumn(np.array(values), np.array(codes, dtype=np.uint8))


def test_distinct_values_are_those_that_rows_have() -> None:
    found = column([1, 2, 4, 8], [3, 1, 3, 1])
    values, codes = distinct(found)
    assert values.tolist() == [2, 8]
    assert values[codes].tolist() == decode(found).tolist()
    values, codes = distinct(found.rows(slice(0, 1)))
    assert values.tolist() == [8]
    assert len(codes) == 1


@pytest.mark.parametrize("most", [64, 0])
def test_values_are_found_one_by_one_or_counted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cost_models.columnar.projections.MAX_SCANNED_CODES", most)
    rng = np.random.default_rng(0)
    found = DictionaryColumn(np.arange(40) ** 2, rng.choice([3, 4, 11, 39], 50).astype(np.uint8))
    values, codes = distinct(found)
    assert values.tolist() == sorted(set(decode(found).tolist()))
    assert values[codes].tolist() == decode(found).tolist()


def test_a_function_of_values_may_make_them_equal() -> None:
    odd = map_values(lambda values: values % 2, column([1, 2, 3], [0, 1, 2, 1]))
    values, codes = distinct(odd)
    assert values.tolist() == [0, 1]
    assert values[codes].tolist() == [1, 0, 1, 0]


def test_rows_of_columns_by_values_are_those_of_plain_ones() -> None:
    one, other = column([5, 7], [0, 1, 1, 0]), column([2, 3], [1, 1, 1, 0])
    group, first = distinct_rows(one, other)
    as_plain = distinct_rows(decode(one), decode(other))
    assert group.tolist() == as_plain[0].tolist()
    assert first.tolist() == as_plain[1].tolist()


def test_columns_below_each_other_stay_by_values() -> None:
    found = encode(np.array([4, 1, 1, 9, 9]))
    one, other = found.rows(slice(2)), found.rows(slice(2, None))
    both = concatenate([one, other])
    assert isinstance(both, DictionaryColumn)
    assert decode(both).tolist() == [4, 1, 1, 9, 9]
    apart = concatenate([one, column([7], [0, 0])])
    assert apart.tolist() == [4, 1, 7, 7]
    same = concatenate([np.broadcast_to(np.int64(3), 2), np.broadcast_to(np.int64(3), 4)])
    assert same.strides == (0,)
    assert same.tolist() == [3] * 6
