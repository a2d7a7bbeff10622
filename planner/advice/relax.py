"""Smallest changes of requirements and pins with which a plan exists, each verified by a search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs

from cost_models.columnar.dictionary_encoding import decode
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import FLAGS, WORDS, PlanTable
from cost_models.scenario import Scenario
from cost_models.units import GIB
from planner.advice.ways_out import WayOut
from planner.assessment.assess import assess
from planner.request.constraints import (
    Constraint,
    broken_by_plan,
    broken_by_result,
    parse_requirements,
)
from planner.request.pins import SHORT_NAMES, parse_fixed
from planner.search.candidates import Candidates
from planner.search.priced_candidates import with_batch
from planner.search.search import search
from planner.search.space import enumerate_plans

MOST_VALUES: Final = 12  # values of one field that are tried, the nearest first
DIGITS: Final = 3
LEFT_OUT: Final = "leave it out"


class Relaxation(Struct, frozen=True):
    """A weaker requirement, another pin or another batch with which a plan exists."""

    instead_of: str
    change: str

    def to_dict(self) -> dict[str, str]:
        """Return plain JSON values."""
        return structs.asdict(self)


def smallest_changes(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    offloads: Sequence[str] = ("none",),
) -> list[Relaxation]:
    """Return a change of every constraint and pin that alone is sufficient.

    Without one: another batch, else the first pair of changes that is sufficient together.
    """
    obstacles: list[Constraint | str] = [*(one for one in require if one.may_change), *fixed]
    found = [_of(scenario, fixed, require, one, offloads) for one in obstacles]
    known = [change for change in found if change is not None]
    known = known or list(_of_batch(scenario, fixed, require, offloads))
    return known or list(itertools.islice(_of_two(scenario, fixed, require, offloads), 1))


def _of(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    one: Constraint | str,
    offloads: Sequence[str],
) -> Relaxation | None:
    """Return the smallest sufficient change of a constraint or a pin."""
    of_one: Any = _of_pin if isinstance(one, str) else _of_constraint
    change: Relaxation | None = of_one(scenario, fixed, require, one, offloads)
    return change


def _of_two(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    offloads: Sequence[str],
) -> Iterator[Relaxation]:
    """Yield pairs of changes: the second is minimal without the first obstacle, then the first."""
    obstacles: list[Constraint | str] = [*(one for one in require if one.may_change), *fixed]
    for one, other in itertools.combinations(obstacles, 2):
        pins, constraints = _without(fixed, require, one)
        second = _of(scenario, pins, constraints, other, offloads)
        if second is None or second.change.startswith(("--budget", "--days")):
            continue
        pins, constraints = _without(fixed, require, other)
        if isinstance(other, str):
            pins |= parse_fixed(second.change.removeprefix("--fix "))
        elif second.change != LEFT_OUT:
            constraints += parse_requirements(second.change)
        first = _of(scenario, pins, constraints, one, offloads)
        if first is not None:
            yield Relaxation(
                f"{first.instead_of} and {second.instead_of}", f"{first.change} and {second.change}"
            )


def _without(
    fixed: Mapping[str, Any], require: Sequence[Constraint], one: Constraint | str
) -> tuple[dict[str, Any], list[Constraint]]:
    """Return pins and constraints except one."""
    pins = {name: value for name, value in fixed.items() if name != one}
    return pins, [constraint for constraint in require if constraint is not one]


def _of_batch(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    offloads: Sequence[str],
) -> Iterator[Relaxation]:
    """Yield the nearest global batch that has a plan, if the given one is no whole micro-batches.

    The data-parallel degrees come from a batch that all accelerators divide; the multiples of these
    degrees are tried, the nearest first.
    """
    workload, ranks = scenario.workload, scenario.cluster.num_gpus
    batch = workload.global_batch_size
    if batch % ranks == 0:
        return
    whole = -(-batch // ranks) * ranks
    candidates = Candidates.of(with_batch(scenario, whole), fixed, require, offloads)
    degrees = set(np.unique(decode(candidates.legal.data_parallel)).tolist())
    sizes = {size for n in degrees for size in (batch // n * n, -(-batch // n) * n)}
    near = sorted(sizes - {0, batch}, key=lambda size: (abs(size - batch), size))
    for nearest in near[:MOST_VALUES]:
        changed = with_batch(scenario, nearest)
        if search(changed, fixed, require=require, offloads=offloads, top=1).plans:
            given = f"--global-batch-size {batch}"
            yield Relaxation(given, f"--global-batch-size {nearest}")
            return


def _of_constraint(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    one: Constraint,
    offloads: Sequence[str],
) -> Relaxation | None:
    others = [other for other in require if other is not one]
    if one.of_result:
        objective: Any = "memory" if one.name == "memory" else "time"
        options: dict[str, Any] = {"offloads": offloads, "top": 1, "objective": objective}
        plans = search(scenario, fixed, require=others, **options).plans
        if not plans:
            return None
        return Relaxation(one.text, _result_words(scenario, one, plans[0]))
    if one.name in WORDS or one.name in FLAGS:
        plans = search(scenario, fixed, require=others, offloads=offloads, top=1).plans
        return Relaxation(one.text, LEFT_OUT) if plans else None

    def found(value: int | None) -> bool:
        exact = [] if value is None else [Constraint(one.name, "==", value, one.text)]
        changed = [*others, *exact]
        return bool(search(scenario, fixed, require=changed, offloads=offloads, top=1).plans)

    value = _nearest(_values(scenario, fixed, one.name, one.value, offloads), found)
    if value is None:
        return None
    short = next((key for key, name in SHORT_NAMES.items() if name == one.name), one.name)
    return Relaxation(one.text, f"{short}=={value}")


def _nearest(values: Iterator[int], found: Callable[[int | None], bool]) -> int | None:
    """Return the first value with a plan; ``found(None)``: whether any value has one."""
    for position, value in enumerate(values):
        if found(value):
            return value
        if position == 0 and not found(None):
            break
    return None


def _result_words(scenario: Scenario, one: Constraint, plan: Any) -> str:
    """Return the constraint that the best plan without it satisfies, rounded accordingly."""
    assessment = assess(scenario, plan)
    time = assessment.time
    if one.name == "memory":
        gib = assessment.memory.peak_bytes / GIB
        return f"memory<={math.ceil(10 * gib) / 10:g}GiB"
    if one.name == "step" and one.text.startswith(("--budget", "--days")):
        option, given = one.text.split()
        needed = float(given.replace(",", "")) * time.step_seconds / one.value
        return f"{option} {_rounded(needed, up=True):g}"
    if one.name == "step":
        return f"step<={_rounded(time.step_seconds, up=True):g}s"
    return f"{one.name}>={_rounded(getattr(time, one.name), up=False):g}"


def _rounded(value: float, *, up: bool) -> float:
    """Round to three digits, towards the weaker constraint."""
    unit = 10.0 ** (math.floor(math.log10(value)) - DIGITS + 1)
    return (math.ceil if up else math.floor)(value / unit) * unit


def _of_pin(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    name: str,
    offloads: Sequence[str],
) -> Relaxation | None:
    rest = {other: value for other, value in fixed.items() if other != name}
    text = f"--fix {name}={fixed[name]}"
    options: dict[str, Any] = {"require": require, "offloads": offloads, "top": 1}
    if name in WORDS or name in FLAGS or not isinstance(fixed[name], int):
        plans = search(scenario, rest, **options).plans
        if not plans:
            return None
        return Relaxation(text, f"--fix {name}={getattr(plans[0], name)}")

    def found(value: int | None) -> bool:
        pins = rest if value is None else {**rest, name: value}
        return bool(search(scenario, pins, **options).plans)

    value = _nearest(_values(scenario, rest, name, fixed[name], offloads), found)
    return None if value is None else Relaxation(text, f"--fix {name}={value}")


def _values(
    scenario: Scenario, fixed: Mapping[str, Any], name: str, given: int, offloads: Sequence[str]
) -> Iterator[int]:
    """Yield the values of a field in legal plans, the nearest to ``given`` first."""
    num_gpus = scenario.cluster.num_gpus
    table = enumerate_plans(scenario.model, scenario.workload, num_gpus, fixed, offloads=offloads)
    legal = legality_codes(scenario, table) == 0
    values = np.unique(getattr(table, name)[legal]).tolist()
    yield from sorted(values, key=lambda value: (abs(value - given), value))[:MOST_VALUES]


def satisfies(way: WayOut, require: Sequence[Constraint]) -> bool:
    """Whether a way out satisfies the requirements on plan, memory and time."""
    table = PlanTable.from_plans([way.plan])
    values = {
        "memory": way.peak_bytes,
        "step": way.step_seconds,
        "mfu": way.assessment.time.mfu,
        "tokens_per_second_per_gpu": 1.0 / way.device_seconds_per_token,
    }
    # an unknown MFU counts as 0
    results = {name: np.array([value or 0.0]) for name, value in values.items()}
    return not broken_by_plan(require, table)[0] and not broken_by_result(require, results, 1)[0]
