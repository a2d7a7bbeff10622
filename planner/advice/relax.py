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
from cost_models.plan.plan import FLAGS, WORDS, Plan, PlanTable
from cost_models.scenario import Scenario
from cost_models.units import GIB
from hardware_profiles.record import Record
from planner.advice.ways_out import WayOut
from planner.assessment.assess import assess
from planner.request.constraints import (
    Constraint,
    broken_by_plan,
    broken_by_result,
    parse_requirements,
)
from planner.request.options.choices import Objective
from planner.request.pins import SHORT_NAMES, parse_fixed
from planner.search.candidates import Candidates
from planner.search.priced_candidates import with_batch
from planner.search.search import search
from planner.search.space import enumerate_plans

MOST_VALUES: Final = 12  # values of one field that are tried, the nearest first
DIGITS: Final = 3
LEFT_OUT: Final = "leave it out"


class Relaxation(Record, frozen=True):
    """A weaker requirement, another pin or another batch with which a plan exists."""

    instead_of: str
    change: str


class _Conflict(Struct, frozen=True):
    """A search without a plan: its scenario, pins, requirements and values of offload."""

    scenario: Scenario
    fixed: Mapping[str, Any]
    require: Sequence[Constraint]
    offloads: Sequence[str]

    @property
    def obstacles(self) -> list[Constraint | str]:
        """The constraints and pins that a change may weaken."""
        return [*(one for one in self.require if one.may_change), *self.fixed]

    def best(self, objective: Objective = "time") -> Plan | None:
        """Return the best plan, if there is one."""
        options: dict[str, Any] = {"require": self.require, "offloads": self.offloads}
        found = search(self.scenario, self.fixed, top=1, objective=objective, **options)
        return found.plans[0] if found.plans else None

    def without(self, one: Constraint | str) -> _Conflict:
        """Return the question without a constraint or a pin."""
        pins = {name: value for name, value in self.fixed.items() if name != one}
        others = [constraint for constraint in self.require if constraint is not one]
        return structs.replace(self, fixed=pins, require=others)

    def values(self, name: str, given: int) -> Iterator[int]:
        """Yield the values of a field in legal plans, the nearest to ``given`` first."""
        scenario, num_gpus = self.scenario, self.scenario.cluster.num_gpus
        table = enumerate_plans(
            scenario.model, scenario.workload, num_gpus, self.fixed, offloads=self.offloads
        )
        legal = legality_codes(scenario, table) == 0
        values = np.unique(getattr(table, name)[legal]).tolist()
        yield from sorted(values, key=lambda value: (abs(value - given), value))[:MOST_VALUES]


def smallest_changes(
    scenario: Scenario,
    fixed: Mapping[str, Any],
    require: Sequence[Constraint],
    offloads: Sequence[str] = ("none",),
) -> list[Relaxation]:
    """Return a change of every constraint and pin that alone is sufficient.

    Without one: another batch, else the first pair of changes that is sufficient together.
    """
    question = _Conflict(scenario, fixed, require, offloads)
    found = [_of(question, one) for one in question.obstacles]
    known = [change for change in found if change is not None]
    known = known or list(_of_batch(question))
    return known or list(itertools.islice(_of_two(question), 1))


def _of(question: _Conflict, one: Constraint | str) -> Relaxation | None:
    """Return the smallest sufficient change of a constraint or a pin."""
    return _of_pin(question, one) if isinstance(one, str) else _of_constraint(question, one)


def _of_two(question: _Conflict) -> Iterator[Relaxation]:
    """Yield pairs of changes: the second is minimal without the first obstacle, then the first."""
    for one, other in itertools.combinations(question.obstacles, 2):
        second = _of(question.without(one), other)
        if second is None or second.change.startswith(("--budget", "--days")):
            continue
        rest = question.without(other)
        if isinstance(other, str):
            pins = parse_fixed(second.change.removeprefix("--fix "))
            rest = structs.replace(rest, fixed={**rest.fixed, **pins})
        elif second.change != LEFT_OUT:
            changed = parse_requirements(second.change)
            rest = structs.replace(rest, require=[*rest.require, *changed])
        first = _of(rest, one)
        if first is not None:
            yield Relaxation(
                f"{first.instead_of} and {second.instead_of}", f"{first.change} and {second.change}"
            )


def _of_batch(question: _Conflict) -> Iterator[Relaxation]:
    """Yield the nearest global batch that has a plan, if the given one is no whole micro-batches.

    The data-parallel degrees come from a batch that all accelerators divide; the multiples of these
    degrees are tried, the nearest first.
    """
    scenario, fixed, require, offloads = structs.astuple(question)
    batch, ranks = scenario.workload.global_batch_size, scenario.cluster.num_gpus
    if batch % ranks == 0:
        return
    whole = -(-batch // ranks) * ranks
    candidates = Candidates.of(with_batch(scenario, whole), fixed, require, offloads)
    degrees = set(np.unique(decode(candidates.legal.data_parallel)).tolist())
    sizes = {size for n in degrees for size in (batch // n * n, -(-batch // n) * n)}
    near = sorted(sizes - {0, batch}, key=lambda size: (abs(size - batch), size))
    for nearest in near[:MOST_VALUES]:
        if structs.replace(question, scenario=with_batch(scenario, nearest)).best():
            given = f"--global-batch-size {batch}"
            yield Relaxation(given, f"--global-batch-size {nearest}")
            return


def _of_constraint(question: _Conflict, one: Constraint) -> Relaxation | None:
    rest = question.without(one)
    if one.of_result:
        plan = rest.best("memory" if one.name == "memory" else "time")
        if plan is None:
            return None
        return Relaxation(one.text, _result_words(question.scenario, one, plan))
    if one.name in WORDS or one.name in FLAGS:
        return Relaxation(one.text, LEFT_OUT) if rest.best() else None

    def found(value: int | None) -> bool:
        exact = [] if value is None else [Constraint(one.name, "==", value, one.text)]
        return structs.replace(rest, require=[*rest.require, *exact]).best() is not None

    value = _nearest(question.values(one.name, one.value), found)
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


def _result_words(scenario: Scenario, one: Constraint, plan: Plan) -> str:
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


def _of_pin(question: _Conflict, name: str) -> Relaxation | None:
    rest, given = question.without(name), question.fixed[name]
    text = f"--fix {name}={given}"
    if name in WORDS or name in FLAGS or not isinstance(given, int):
        plan = rest.best()
        return None if plan is None else Relaxation(text, f"--fix {name}={getattr(plan, name)}")

    def found(value: int | None) -> bool:
        pins = rest.fixed if value is None else {**rest.fixed, name: value}
        return structs.replace(rest, fixed=pins).best() is not None

    value = _nearest(rest.values(name, given), found)
    return None if value is None else Relaxation(text, f"--fix {name}={value}")


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
