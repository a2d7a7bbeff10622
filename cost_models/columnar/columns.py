"""Columns stored by distinct rows: a formula is computed once for all rows that share its inputs.

A table of plans is a product of a few choices. A quantity that depends on the micro-batch size and
the tensor-parallel size alone has as many distinct values as there are pairs of these, whatever the
number of plans. A ``FactoredColumn`` stores one value for each distinct row of the columns it was
computed from (its ``Projection``); an operation on two columns is computed for the distinct rows of
their union.

Formulas are written for numbers and arrays; numpy dispatches their operations to this module (NEP
13 and NEP 18). Each element is computed by the operation that a full array would see, so the values
are identical bit for bit. Dependencies are derived from the operations, so no formula declares them
and none can declare them wrongly.

A factored table has length 1, as does every column with the same value in all rows, so arrays that
a formula creates with ``len(table)`` broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from cost_models.columnar.projections import Array, Frame, Projection

MAX_CACHED_ROWS: Final = 16_384  # longer results of operations are not cached
MAX_CONSTANT_ROWS: Final = 256  # longer results are not tested for being constant
Result = TypeVar("Result")


class FactoredColumn:
    """One value for each row of a projection (last axis); leading axes are independent of it."""

    __slots__ = ("projection", "values")
    __array_priority__ = 1000.0

    def __init__(self, projection: Projection, values: Array) -> None:
        self.projection, self.values = projection, values

    def __len__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        if self.values.all():
            return True
        if self.values.any():
            raise TypeError("a column whose rows differ has no single truth value")
        return False

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise TypeError("a column is not an array: use numpy's functions")

    def __getitem__(self, index: Any) -> FactoredColumn:
        """Index the leading axes."""
        if index is None:
            return FactoredColumn(self.projection, self.values[None])
        if isinstance(index, slice) or self.values.ndim < 2:
            raise TypeError("rows of a column cannot be indexed")
        return FactoredColumn(self.projection, self.values[index])

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape for broadcasting: one row."""
        return (*self.values.shape[:-1], 1)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.values.ndim

    def any(self) -> bool:
        """Whether any value is true."""
        return bool(self.values.any())

    def all(self) -> bool:
        """Whether all values are true."""
        return bool(self.values.all())

    def astype(self, kind: Any) -> FactoredColumn:
        """Return the column in another type."""
        return FactoredColumn(self.projection, self.values.astype(kind))

    def expanded(self) -> Array:
        """Return one value for every row of the table."""
        return self._at(self.projection.frame.full)

    def repetition(self, number: int) -> FactoredColumn:
        """Return the values of one of the repetitions of the projection's rows."""
        base = self.projection.base
        begin = number * base.size if self.projection.times > 1 else 0
        return FactoredColumn(base, self.values[begin : begin + base.size])

    def _at(self, projection: Projection) -> Array:
        index = projection.index_into(self.projection)
        return self.values if index is None else self.values.take(index, axis=-1)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or "out" in options:
            return NotImplemented
        name = None if options else _key(ufunc, inputs)
        known = self.projection.frame.cache.get(name)
        if known is not None:
            return known[0]
        projection, values = joined_values(inputs)
        return remember(
            projection, name, inputs, constant_or_column(projection, ufunc(*values, **options))
        )

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        known = FUNCTIONS.get(function)
        return NotImplemented if known is None else known(*args, **options)


def _key(operation: Any, inputs: Sequence[Any]) -> Any:
    """Return the cache key of an operation, or None if it is not cached. Columns enter by identity.

    The ranks of a pipeline and the points of a step repeat two of three operations.
    """
    parts = [operation]
    for each in inputs:
        kind = type(each)
        if kind is FactoredColumn:
            parts.append(id(each))
        elif kind is float or kind is int or kind is bool:
            parts += (kind, each) if each else (kind, str(each))  # -0.0 is equal to 0.0
        elif kind is np.ndarray and each.size == 1:
            parts += (each.dtype.char, each.ndim, each.tobytes())
        else:
            return None
    return tuple(parts)


def remember(projection: Projection, name: Any, inputs: Sequence[Any], result: Any) -> Any:
    """Cache a short column with its inputs, which keeps the identities in its key alive."""
    if name is not None and projection.size <= MAX_CACHED_ROWS:
        projection.frame.cache[name] = result, inputs
    return result


def _boolean_or_column(projection: Projection, values: Any) -> Any:
    """Return a column, or an array of one element for a flag that is the same in all rows."""
    if values.dtype == bool and values.ndim == 1:
        first = values[0]
        if (values == first).all():
            return np.full(1, first)
    return FactoredColumn(projection, values)


def constant_or_column(projection: Projection, values: Any) -> Any:
    """Return a column, or an array of one element for a short column with one value."""
    if values.ndim == 1 and (len(values) <= MAX_CONSTANT_ROWS or values.dtype == bool):
        first = values[0]
        if (values == first).all():
            return np.full(1, first)
    return FactoredColumn(projection, values)


def joined_values(inputs: Sequence[Any]) -> tuple[Projection, list[Any]]:
    """Return the joint projection of all columns, and the values of every input there."""
    columns = [each for each in inputs if type(each) is FactoredColumn]
    projection = columns[0].projection
    for column in columns[1:]:
        if column.projection is not projection:
            projection = projection.join(column.projection)[0]
    return projection, [
        each._at(projection) if type(each) is FactoredColumn else each for each in inputs
    ]


def _operator(ufunc: np.ufunc, *, swapped: bool = False) -> Callable[[FactoredColumn, Any], Any]:
    """Return the method for a binary ``ufunc``: the fast path of ``__array_ufunc__``."""
    is_boolean, operation = (
        ufunc in BOOLEAN_UFUNCS,
        ("swapped " if swapped else "") + ufunc.__name__,
    )

    def operate(one: FactoredColumn, other: Any) -> Any:
        projection, mine, its, kind = one.projection, one.values, other, type(other)
        if kind is FactoredColumn:  # as ``_key``
            name: Any = (operation, id(one), id(other))
        elif (kind is float or kind is int) and other:
            name = (operation, id(one), kind, other)
        else:
            name = _key(operation, (one, other))
        known = projection.frame.cache.get(name)
        if known is not None:
            return known[0]
        if kind is FactoredColumn:
            its = other.values
            if other.projection is not projection:
                projection, my_way, its_way = projection.join(other.projection)
                mine = mine if my_way is None else mine.take(my_way, axis=-1)
                its = its if its_way is None else its.take(its_way, axis=-1)
        values = ufunc(its, mine) if swapped else ufunc(mine, its)
        result = (
            _boolean_or_column(projection, values)
            if is_boolean
            else FactoredColumn(projection, values)
        )
        return remember(projection, name, (one, other), result)

    return operate


BOOLEAN_UFUNCS: Final = {
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
    np.equal,
    np.not_equal,
    np.bitwise_and,
    np.bitwise_or,
    np.invert,
}
OPERATORS: Final = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
COMPARISONS: Final = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _name, _ufunc in OPERATORS.items():
    setattr(FactoredColumn, f"__{_name}__", _operator(_ufunc))
    setattr(FactoredColumn, f"__r{_name}__", _operator(_ufunc, swapped=True))
for _name, _ufunc in COMPARISONS.items():
    setattr(FactoredColumn, f"__{_name}__", _operator(_ufunc))


def _negative(column: FactoredColumn) -> FactoredColumn:
    return FactoredColumn(column.projection, -column.values)


def _inverted(column: FactoredColumn) -> Any:
    return _boolean_or_column(column.projection, ~column.values)


setattr(FactoredColumn, "__neg__", _negative)  # noqa: B010
setattr(FactoredColumn, "__invert__", _inverted)  # noqa: B010
FactoredColumn.__hash__ = None  # type: ignore[assignment]


def _chosen(flag: Any, yes: Any, no: Any) -> Any:
    """Return the branch of ``np.where`` that a constant condition selects, in the common type."""
    is_set = flag if type(flag) is bool else flag.all()
    chosen, kind, other = (yes if is_set else no), _kind(yes), _kind(no)
    if kind is not other:
        kind = np.result_type(kind, other)
    if type(chosen) is FactoredColumn:
        return chosen if chosen.dtype == kind else chosen.astype(kind)
    return np.full(1, chosen, dtype=kind) if np.size(chosen) == 1 else chosen.astype(kind)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    inputs = condition, yes, no
    if type(condition) is FactoredColumn:
        first = condition
    elif np.size(condition) == 1:
        return _chosen(condition, yes, no)
    else:
        first = next(each for each in inputs if type(each) is FactoredColumn)
    name = _key("where", inputs)
    known = first.projection.frame.cache.get(name)
    if known is not None:
        return known[0]
    projection, values = joined_values(inputs)
    return remember(projection, name, inputs, constant_or_column(projection, np.where(*values)))


def _kind(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else value


def _select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Any:
    result = default
    for condition, choice in reversed(list(zip(conditions, choices, strict=True))):
        result = np.where(condition, choice, result)
    return result


def _stack(columns: Sequence[Any], axis: int = 0) -> FactoredColumn:
    assert axis == 0
    projection, values = joined_values(columns)
    return FactoredColumn(
        projection, np.stack([np.broadcast_to(each, (projection.size,)) for each in values])
    )


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction over the leading axis."""

    def reduced(column: FactoredColumn, axis: int = 0) -> FactoredColumn:
        assert axis == 0
        assert column.ndim > 1
        return FactoredColumn(column.projection, function(column.values, axis=0))

    return reduced


def _take_along_axis(stacked: FactoredColumn, index: Any, axis: int) -> FactoredColumn:
    projection, (values, where) = joined_values((stacked, index))
    return FactoredColumn(projection, np.take_along_axis(values, where, axis=axis))


def _is_in(column: FactoredColumn, values: Sequence[Any]) -> Any:
    name = ("isin", id(column), *values)
    known = column.projection.frame.cache.get(name)
    if known is not None:
        return known[0]
    found = _boolean_or_column(column.projection, np.isin(column.values, values))
    return remember(column.projection, name, (column,), found)


FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    np.where: _where,
    np.select: _select,
    np.stack: _stack,
    np.argmax: _along(np.argmax),
    np.max: _along(np.max),
    np.sum: _along(np.sum),
    np.cumsum: _along(np.cumsum),
    np.take_along_axis: _take_along_axis,
    np.clip: lambda column, low, high: np.minimum(np.maximum(column, low), high),
    np.any: lambda column: column.any(),
    np.all: lambda column: column.all(),
    np.isin: _is_in,
    np.shape: lambda column: column.shape,
    np.size: lambda column: column.values.size,
    np.zeros_like: lambda column, dtype=None: np.zeros(1, dtype=dtype or column.dtype),
    np.ones_like: lambda column, dtype=None: np.ones(1, dtype=dtype or column.dtype),
    np.full_like: lambda column, value: np.zeros(1, dtype=_kind(column)) + value,
    np.broadcast_to: lambda column, shape: column,
}


def on_distinct_rows(formula: Callable[..., Result]) -> Callable[..., Result]:
    """Evaluate a formula of many operations on arrays: the distinct rows of its column arguments.

    Positional and named arguments that are columns are replaced by arrays. The formula may return
    an array, or a tuple or a record of arrays. The results for short columns and numbers are kept
    as those of operations are: the ranks of a pipeline repeat them.
    """

    @wraps(formula)
    def priced(*args: Any, **options: Any) -> Any:
        given = [*args, *options.values()]
        if not any(type(each) is FactoredColumn for each in given):
            return formula(*args, **options)
        name = _key(formula, given)
        if name is not None:
            name = (*name, *options)
            frame = next(each for each in given if type(each) is FactoredColumn).projection.frame
            known = frame.cache.get(name)
            if known is not None:
                return known[0]
        projection, values = joined_values(given)
        plain = dict(zip(options, values[len(args) :], strict=True))
        result = _at_level(projection, formula(*values[: len(args)], **plain))
        return remember(projection, name, given, result)

    return priced


def _at_level(projection: Projection, result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_at_level(projection, each) for each in result)
    if isinstance(result, Struct):
        parts = {name: _at_level(projection, value) for name, value in asdict(result).items()}
        return replace(result, **parts)
    if np.ndim(result) == 0 or np.shape(result)[-1] != projection.size:
        return result
    return _boolean_or_column(projection, result)


def by_value(column: Any) -> Any:
    """Return a column of few distinct values as one that depends on its own value only.

    Columns of repeated rows stay as they are.
    """
    if type(column) is not FactoredColumn or column.projection.times > 1:
        return column
    values, codes = np.unique(column.values, return_inverse=True)
    if len(values) == column.projection.size:
        return column
    return FactoredColumn(column.projection.group_rows(codes, len(values)), values)


def expand(value: Any, size: int) -> Array:
    """Return one value for every row of a table of ``size`` rows."""
    return value.expanded() if type(value) is FactoredColumn else np.broadcast_to(value, size)


def common_projection(frame: Frame, inputs: Sequence[Any]) -> Projection:
    """Return the joint projection of all columns among the inputs."""
    projection = None
    for column in inputs:
        if type(column) is FactoredColumn and column.projection is not projection:
            projection = (
                column.projection if projection is None else projection.join(column.projection)[0]
            )
    return frame.project(0) if projection is None else projection


def align(frame: Frame, inputs: Sequence[Any]) -> tuple[Projection, list[Array]]:
    """Return the joint projection of all inputs, and each input's values for its rows."""
    projection = common_projection(frame, inputs)
    return projection, [values_at(projection, each) for each in inputs]


def values_at(projection: Projection, value: Any) -> Array:
    """Return one value for each row of a projection."""
    return np.broadcast_to(
        value._at(projection) if type(value) is FactoredColumn else value, projection.size
    )
