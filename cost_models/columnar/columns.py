"""Columns that know which columns of a table they depend on, so that equal rows are priced once.

A table of plans is a product of few choices. What follows from the micro-batch size and the tensor
parallelism alone has as many values as there are pairs of these, however many plans there are. A
``Column`` holds one value for each distinct row of the columns it was computed from (its
``Level``); what combines two columns is computed for the distinct rows of both together. Formulas
are written for numbers and arrays, and numpy hands them on to here (NEP 13 and 18): each element is
computed by the operation that a whole array would see, so that values are the same bit for bit, and
no formula says by itself what it depends on, so that none can be wrong about it.

A factored table has the length 1, as has every column that is the same in all rows: what a formula
makes of ``len(table)`` broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, Final, TypeVar

import numpy as np

from cost_models.columnar.levels import Array, Level

REMEMBERED: Final = 16_384  # rows up to which what an operation gave is kept, for the next one
SMALL: Final = 256  # rows of which it is worth knowing that they are all the same
Made = TypeVar("Made")


class Column:
    """Values for each row of a level; leading axes, where there are any, are other things."""

    __slots__ = ("level", "values")
    __array_priority__ = 1000.0

    def __init__(self, level: Level, values: Array) -> None:
        self.level, self.values = level, values

    def __len__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        if self.values.all():
            return True
        if self.values.any():
            raise TypeError("a column whose rows differ has no truth value")
        return False

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise TypeError("a column is no array: formulas use numpy's functions")

    def __getitem__(self, index: Any) -> Column:
        """Pick along the leading axes."""
        if index is None:
            return Column(self.level, self.values[None])
        if isinstance(index, slice) or self.values.ndim < 2:
            raise TypeError("rows of a column are not picked one by one")
        return Column(self.level, self.values[index])

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """What it broadcasts like: one row."""
        return (*self.values.shape[:-1], 1)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self.values.ndim

    def any(self) -> bool:
        """Whether any value is true."""
        return bool(self.values.any())

    def all(self) -> bool:
        """Whether all values are."""
        return bool(self.values.all())

    def astype(self, kind: Any) -> Column:
        """Return the same in another type."""
        return Column(self.level, self.values.astype(kind))

    def whole(self) -> Array:
        """Return a value for every row of the table."""
        return self._at(self.level.frame.whole)

    def _at(self, level: Level) -> Array:
        way = level.way(self.level)
        return self.values if way is None else self.values.take(way, axis=-1)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or "out" in options:
            return NotImplemented
        name = None if options else _key(ufunc, inputs)
        known = self.level.frame.made.get(name)
        if known is not None:
            return known[0]
        level, values = together(inputs)
        return _kept(level, name, inputs, _folded(level, ufunc(*values, **options)))

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        known = FUNCTIONS.get(function)
        return NotImplemented if known is None else known(*args, **options)


def _key(operation: Any, inputs: Sequence[Any]) -> Any:
    """Return what an operation is remembered by; None: it is not. Columns are named by identity.

    Ranks of a pipeline and places of a step repeat most of their terms: two of three operations.
    """
    parts = [operation]
    for each in inputs:
        kind = type(each)
        if kind is Column:
            parts.append(id(each))
        elif kind is float or kind is int or kind is bool:
            parts += (kind, each) if each else (kind, str(each))  # -0.0 is equal to 0.0
        elif kind is np.ndarray and each.size == 1:
            parts += (each.dtype.char, each.ndim, each.tobytes())
        else:
            return None
    return tuple(parts)


def _kept(level: Level, name: Any, inputs: Sequence[Any], made: Any) -> Any:
    """Remember a short column with what it was made of, whose identities its name is."""
    if name is not None and level.size <= REMEMBERED:
        level.frame.made[name] = made, inputs
    return made


def _made(level: Level, values: Any) -> Any:
    """Return a column, or the one value of a flag that is the same everywhere."""
    if values.dtype == bool and values.ndim == 1:
        first = values[0]
        if (values == first).all():
            return np.full(1, first)
    return Column(level, values)


def _folded(level: Level, values: Any) -> Any:
    """Return a column, or what is the same in few rows, once."""
    if values.ndim == 1 and (len(values) <= SMALL or values.dtype == bool):
        first = values[0]
        if (values == first).all():
            return np.full(1, first)
    return Column(level, values)


def together(inputs: Sequence[Any]) -> tuple[Level, list[Any]]:
    """Return the level of all columns together, and every input's values there."""
    columns = [each for each in inputs if type(each) is Column]
    level = columns[0].level
    for column in columns[1:]:
        if column.level is not level:
            level = level.join(column.level)[0]
    return level, [each._at(level) if type(each) is Column else each for each in inputs]


def _operator(ufunc: np.ufunc, *, swapped: bool = False) -> Callable[[Column, Any], Any]:
    """Return what ``ufunc`` does with two columns, the short way."""
    tells, operation = ufunc in FLAGGING, ("swapped " if swapped else "") + ufunc.__name__

    def operate(one: Column, other: Any) -> Any:
        level, mine, its, kind = one.level, one.values, other, type(other)
        if kind is Column:  # as ``_key``
            name: Any = (operation, id(one), id(other))
        elif (kind is float or kind is int) and other:
            name = (operation, id(one), kind, other)
        else:
            name = _key(operation, (one, other))
        known = level.frame.made.get(name)
        if known is not None:
            return known[0]
        if kind is Column:
            its = other.values
            if other.level is not level:
                level, my_way, its_way = level.join(other.level)
                mine = mine if my_way is None else mine.take(my_way, axis=-1)
                its = its if its_way is None else its.take(its_way, axis=-1)
        values = ufunc(its, mine) if swapped else ufunc(mine, its)
        made = _made(level, values) if tells else Column(level, values)
        return _kept(level, name, (one, other), made)

    return operate


FLAGGING: Final = {
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
    setattr(Column, f"__{_name}__", _operator(_ufunc))
    setattr(Column, f"__r{_name}__", _operator(_ufunc, swapped=True))
for _name, _ufunc in COMPARISONS.items():
    setattr(Column, f"__{_name}__", _operator(_ufunc))
setattr(Column, "__neg__", lambda column: Column(column.level, -column.values))  # noqa: B010
setattr(Column, "__invert__", lambda column: _made(column.level, ~column.values))  # noqa: B010
Column.__hash__ = None  # type: ignore[assignment]


def _chosen(flag: Any, yes: Any, no: Any) -> Any:
    """Return what one flag for all rows chooses, in the type that both together have."""
    is_set = flag if type(flag) is bool else flag.all()
    chosen, kind, other = (yes if is_set else no), _kind(yes), _kind(no)
    if kind is not other:
        kind = np.result_type(kind, other)
    if type(chosen) is Column:
        return chosen if chosen.dtype == kind else chosen.astype(kind)
    return np.full(1, chosen, dtype=kind) if np.size(chosen) == 1 else chosen.astype(kind)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    inputs = condition, yes, no
    if type(condition) is Column:
        first = condition
    elif np.size(condition) == 1:
        return _chosen(condition, yes, no)
    else:
        first = next(each for each in inputs if type(each) is Column)
    name = _key("where", inputs)
    known = first.level.frame.made.get(name)
    if known is not None:
        return known[0]
    level, values = together(inputs)
    return _kept(level, name, inputs, _folded(level, np.where(*values)))


def _kind(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else value


def _select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Any:
    result = default
    for condition, choice in reversed(list(zip(conditions, choices, strict=True))):
        result = np.where(condition, choice, result)
    return result


def _stack(columns: Sequence[Any], axis: int = 0) -> Column:
    assert axis == 0
    level, values = together(columns)
    return Column(level, np.stack([np.broadcast_to(each, (level.size,)) for each in values]))


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function over the leading axis."""

    def reduced(column: Column, axis: int = 0) -> Column:
        assert axis == 0
        assert column.ndim > 1
        return Column(column.level, function(column.values, axis=0))

    return reduced


def _take_along_axis(stacked: Column, index: Any, axis: int) -> Column:
    level, (values, where) = together((stacked, index))
    return Column(level, np.take_along_axis(values, where, axis=axis))


def _is_in(column: Column, values: Sequence[Any]) -> Any:
    name = ("isin", id(column), *values)
    known = column.level.frame.made.get(name)
    if known is not None:
        return known[0]
    found = _made(column.level, np.isin(column.values, values))
    return _kept(column.level, name, (column,), found)


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


def on_distinct_rows(formula: Callable[..., Made]) -> Callable[..., Made]:
    """Let a formula of many operations see plain arrays: of the distinct rows of its arguments.

    Its positional and named arguments that are columns are replaced; what it returns may be an
    array, or a tuple or a dataclass of them.
    """

    @wraps(formula)
    def priced(*args: Any, **options: Any) -> Any:
        given = [*args, *options.values()]
        if not any(type(each) is Column for each in given):
            return formula(*args, **options)
        level, values = together(given)
        plain = dict(zip(options, values[len(args) :], strict=True))
        return _at_level(level, formula(*values[: len(args)], **plain))

    return priced


def _at_level(level: Level, made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(_at_level(level, each) for each in made)
    if is_dataclass(made) and not isinstance(made, type):
        parts = {f.name: _at_level(level, getattr(made, f.name)) for f in fields(made)}
        return replace(made, **parts)
    if np.ndim(made) == 0 or np.shape(made)[-1] != level.size:
        return made
    return _made(level, made)


def by_value(column: Any) -> Any:
    """Return a column of few values as one that depends on nothing but its own value."""
    if type(column) is not Column:
        return column
    values, codes = np.unique(column.values, return_inverse=True)
    if len(values) == column.level.size:
        return column
    return Column(column.level.grouped(codes, len(values)), values)
