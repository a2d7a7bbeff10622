"""Constraints on the fields of a plan and on its results: ``--require 'tp<=8'``.

    tp<=8, zero!=2, schedule==1f1b, sp==on     parts of a plan, by the names of --fix
    gpus<=64, dp_shard>=8                      derived quantities
    memory<=70GiB, step<=10s, mfu>=0.4         results, once a plan is priced

Several constraints are joined by commas or "and". A contradiction, also with --fix, is an error
that names both sides. ``memory`` is the predicted peak of the fullest accelerator.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.plan.plan import FLAGS, WORDS, Plan, PlanTable
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.options import declared
from planner.request.pins import OFF, ON, SHORT_NAMES

OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}
SPELT: Final = {"=": "==", "≤": "<=", "≥": ">=", "≠": "!="}  # other ways to write them
EQUALITY: Final = ("==", "!=")
MEMORY_UNITS: Final = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
}
TIME_UNITS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0}
SHARE_UNITS: Final = {"": 1.0, "%": 0.01}
RATE_UNITS: Final = {"": 1.0}
# names of results, their units, and the largest value that means something
RESULTS: Final[Mapping[str, tuple[Mapping[str, float], float]]] = {
    "memory": (MEMORY_UNITS, math.inf),
    "step": (TIME_UNITS, math.inf),
    "mfu": (SHARE_UNITS, 1.0),
    "tokens_per_second_per_gpu": (RATE_UNITS, math.inf),
}
# of results that follow from the step, the comparisons that a longer step can only break
LONGER: Final = {"step": ("<=", "<"), "mfu": (">=", ">"), "tokens_per_second_per_gpu": (">=", ">")}
RESULT_NAMES: Final = {
    "peak": "memory",
    "peak_memory": "memory",
    "step_time": "step",
    "time": "step",
    "tokens_per_second": "tokens_per_second_per_gpu",
}
DERIVED: Final = {"gpus": "world_size", "dp_shard": "dp_shard"}  # columns that are no field
MOST: Final = 10**9  # a whole number in a constraint
UNBOUNDED: Final = 10**6  # a bound of a plan that keeps out nonsense alone
_ITEM: Final = re.compile(
    r"^\s*(?P<name>[\w.]+)\s*(?P<op><=|>=|==|!=|<|>|=|≤|≥|≠)\s*(?P<value>[^\s=<>].*?)\s*$"
)
_NUMBER: Final = re.compile(
    r"^(?P<number>[0-9]*\.?[0-9]+(?:e[+-]?[0-9]{1,2})?)\s*(?P<unit>[a-z%]*)$", re.I
)


class Constraint(Struct, frozen=True):
    """One comparison: the column or result, how, with what, and as it was typed."""

    name: str  # a column of PlanTable, or a key of RESULTS
    operator: str
    value: Any  # a word's position, a flag, a whole number, or a result in SI units
    text: str  # "--require 'tp<=8'"

    @property
    def of_result(self) -> bool:
        """Whether only pricing tells."""
        return self.name in RESULTS

    @property
    def may_change(self) -> bool:
        """Whether a weaker one may be proposed."""
        return True

    def column(self, table: PlanTable) -> Any:
        """Return what is compared, for every plan of a table."""
        return getattr(table, self.name)

    def holds(self, values: Any) -> Any:
        """Return where a value, or a column of them, satisfies it."""
        return OPERATORS[self.operator](values, self.value)


def parse_requirements(given: str | Sequence[str] | None) -> tuple[Constraint, ...]:
    """Read what was required.

    >>> [(c.name, c.operator, c.value) for c in parse_requirements("tp<=8 and memory<70GiB")]
    [('tensor_parallel', '<=', 8), ('memory', '<', 75161927680.0)]
    """
    texts = [given] if isinstance(given, str) else list(given or ())
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"require = {given!r} (must be text such as 'tp<=8', or a list of such)")
    items = [part for text in texts for part in re.split(r",|\band\b", text) if part.strip()]
    return tuple(_parse(item.strip()) for item in items)


def _parse(item: str) -> Constraint:
    where = f"--require {item[:60]!r}"
    match = _ITEM.match(item)
    if match is None:
        raise InputError(
            f"{where}: expected a comparison such as tp<=8, zero!=2, schedule==1f1b, "
            "memory<=70GiB, step<=10s or mfu>=0.4"
        )
    name, found = match["name"], SPELT.get(match["op"], match["op"])
    column = _column(name, where)
    if column in RESULTS:
        value: Any = _quantity(column, match["value"], where)
    elif column in WORDS or column in FLAGS:
        if found not in EQUALITY:
            raise InputError(f"{where}: {name} is a word; compare it with == or !=")
        value = _word(column, match["value"], where)
    else:
        value = _whole(match["value"], where)
    return Constraint(column, found, value, where)


def _column(name: str, where: str) -> str:
    known = [*SHORT_NAMES, *declared(Plan), *DERIVED, *RESULTS, *RESULT_NAMES]
    if name not in known:
        hint = did_you_mean(name, known)
        shown = ", ".join([*SHORT_NAMES, "recompute", "offload", *DERIVED, *RESULTS])
        raise InputError(
            f"{where}: {name!r} is no part of a plan and no result. {hint or f'Known: {shown}'}"
        )
    return SHORT_NAMES.get(name) or RESULT_NAMES.get(name) or DERIVED.get(name) or name


def _word(column: str, text: str, where: str) -> Any:
    if column in FLAGS:
        known = {**ON, **OFF}
        if text.lower() not in known:
            raise InputError(f"{where}: must be on or off")
        return known[text.lower()]
    if text not in WORDS[column]:
        hint = did_you_mean(text, WORDS[column])
        raise InputError(f"{where}: must be {_domain(column)}. {hint}".strip())
    return WORDS[column].index(text)


def _whole(text: str, where: str) -> int:
    digits = text.replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 10 or int(digits) > MOST:
        raise InputError(f"{where}: must be compared with a whole number from 0 to {MOST:,}")
    return int(digits)


def _quantity(name: str, text: str, where: str) -> float:
    units, highest = RESULTS[name]
    match = _NUMBER.match(text)
    unit = None if match is None else units.get(match["unit"].lower())
    if match is None or unit is None:
        named = {"memory": "70GiB, with its unit", "step": "10s", "mfu": "0.4 or 40%"}
        example = named.get(name, "1000")
        raise InputError(f"{where}: {name} is compared with a number such as {example}")
    value = float(match["number"]) * unit
    if not value <= highest or math.isinf(value):
        raise InputError(f"{where}: {name} is at most {highest:g}")
    return value


# --- contradictions ---


def require_consistent(
    constraints: Sequence[Constraint], fixed: Mapping[str, Any] | None = None
) -> None:
    """Raise an InputError where no value satisfies all constraints on a name; names both sides."""
    pinned = [
        Constraint(
            name,
            "==",
            WORDS[name].index(value) if name in WORDS else value,
            f"--fix {name}={_shown(value)}",
        )
        for name, value in (fixed or {}).items()
        if name in PlanTable.__slots__ and not isinstance(value, (tuple, list))
    ]
    by_name: dict[str, list[Constraint]] = {}
    for constraint in (*constraints, *pinned):
        by_name.setdefault(constraint.name, []).append(constraint)
    for name, group in by_name.items():
        if any(c in constraints for c in group):
            _require_some_value(name, group)


def _require_some_value(name: str, group: list[Constraint]) -> None:
    values = _candidates(name, group)

    def satisfiable(some: Sequence[Constraint]) -> bool:
        return any(all(c.holds(value) for c in some) for value in values)

    if satisfiable(group):
        return
    for one in group:
        if not satisfiable([one]):
            raise InputError(f"{one.text}: no plan has that ({name} is {_domain(name)})")
    for pair in combinations(group, 2):
        if not satisfiable(pair):
            raise InputError(f"{pair[0].text} contradicts {pair[1].text}: no {name} is both")
    named = ", ".join(dict.fromkeys(c.text for c in group[:-1]))
    raise InputError(f"{named} and {group[-1].text} contradict each other: no {name} is all of it")


def _candidates(name: str, group: Sequence[Constraint]) -> list[Any]:
    """Return values among which one satisfies the constraints, if any does."""
    if name in FLAGS:
        return [False, True]
    if name in WORDS:
        return list(range(len(WORDS[name])))
    points = sorted({c.value for c in group})
    low, high = _bounds(name)
    if name in RESULTS:
        between = [(a + b) / 2.0 for a, b in pairwise([low, *points])]
        above = [points[-1] * 2.0 + 1.0] if math.isinf(high) else [(points[-1] + high) / 2.0, high]
        near = [*points, *between, *above]
        return [value for value in near if low < value <= high]
    around = {low, high, *(p + step for p in points for step in (-1, 0, 1))}
    return sorted(value for value in around if low <= value <= high)


def _bounds(name: str) -> tuple[float, float]:
    if name in RESULTS:
        return 0.0, RESULTS[name][1]
    one = declared(Plan).get(name)
    low, high = (1.0, math.inf) if one is None else (one.low, one.high)
    return int(low), int(high) if high < UNBOUNDED else 2 * MOST


def _domain(name: str) -> str:
    if name in FLAGS:
        return "on or off"
    if name in WORDS:
        return f"one of {', '.join(declared(Plan)[name].values)}"
    low, high = _bounds(name)
    if name in RESULTS:
        return "above 0" + ("" if math.isinf(high) else f" and at most {high:g}")
    return f"{low} or more" if high > MOST else f"{low} to {high}"


def _shown(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


# --- which plans satisfy them ---


def broken_by_plan(constraints: Sequence[Constraint], table: PlanTable) -> NDArray[np.int16]:
    """Return, row by row, 0 or the position (from 1) of the first constraint that a plan breaks."""
    columns = {c.name: c.column(table) for c in constraints if not c.of_result}
    return _first_broken(list(enumerate(constraints, start=1)), columns, len(table))


def broken_by_result(
    constraints: Sequence[Constraint],
    results: Mapping[str, NDArray[np.float64]],
    rows: int,
    *,
    at_best: bool = False,
) -> NDArray[np.int16]:
    """Return the first broken constraint on results: columns by the names of RESULTS.

    ``at_best``: the results follow from lower bounds of the steps; a constraint that a longer step
    could satisfy is not broken.
    """
    for constraint in constraints:
        if constraint.of_result and constraint.name not in results:
            raise InputError(
                f"{constraint.text}: {constraint.name} is not known here (no peak FLOP/s of this "
                "accelerator in this precision)"
            )
    names = {c.name for c in constraints if c.of_result}
    columns = {name: results[name] for name in names}
    asked = [
        (position, c)
        for position, c in enumerate(constraints, start=1)
        if not at_best or c.name not in LONGER or only_breaks(c)
    ]
    return _first_broken(asked, columns, rows)


def fewest_layers_are_best(constraints: Sequence[Constraint]) -> bool:
    """Whether all constraints on results are a minimum speed or a maximum memory."""
    return all(only_breaks(c) or _is_most_memory(c) for c in constraints if c.of_result)


def most_memory(constraints: Sequence[Constraint], most: float) -> float:
    """Return the largest peak that is allowed, no more than ``most``."""
    return min([most, *(float(c.value) for c in constraints if _is_most_memory(c))])


def _is_most_memory(constraint: Constraint) -> bool:
    return constraint.name == "memory" and constraint.operator in ("<=", "<")


def only_breaks(constraint: Constraint) -> bool:
    """Whether a longer step can only break a constraint on what follows from it."""
    return constraint.operator in LONGER.get(constraint.name, ())


def holds_if_faster(constraint: Constraint) -> bool:
    """Whether a plan keeps a constraint on results with the same peak and a shorter step."""
    return only_breaks(constraint) or constraint.name == "memory"


def _first_broken(
    numbered: Sequence[tuple[int, Constraint]], columns: Mapping[str, Any], rows: int
) -> NDArray[np.int16]:
    codes = np.zeros(rows, dtype=np.int16)
    for position, constraint in reversed(numbered):
        if constraint.name in columns:
            codes[np.logical_not(constraint.holds(columns[constraint.name]))] = position
    return codes


def counts_by_text(constraints: Sequence[Constraint], codes: NDArray[np.int16]) -> dict[str, int]:
    """Return how many plans each constraint removed, most first."""
    counts = np.bincount(codes, minlength=len(constraints) + 1)[1:]
    found = {c.text: int(n) for c, n in zip(constraints, counts, strict=True) if n}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
