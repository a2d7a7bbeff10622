"""What each target can run: the table ``capabilities.toml``, and checks of plans against it.

A table of a target lists, for each part of a plan and of a workload, the allowed values: a list, or
``any``. A part that is not listed has its default. ``never``: combinations that are not allowed,
each with its reason; a condition is a list of values, or ``>1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

from msgspec import Struct

from cost_models.plan.plan import FLAGS, WORDS, Plan, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import convert, read_toml
from hardware_profiles.options import declared
from planner.exchange.job import ONLY_WITH
from planner.exchange.names import FILE

ANY: Final = "any"
SEVERAL: Final = ">1"
DEFAULTS: Final = {**Plan().to_dict(), **Workload(seq_len=1, global_batch_size=1).to_dict()}
FREE: Final = ("data_parallel", "micro_batch_size", "num_microbatches")  # of every target
DERIVED: Final = ("dp_shard",)  # quantities of a plan that a combination may name
OF_WORKLOAD: Final = (
    "precision",
    "optimizer",
    "optimizer_state_precision",
    "gradient_precision",
    "master_weights",
    "attention_kernel",
    "adapter",
    "quantisation",
    "freeze",
)

Values = list[Any] | Literal["any"]


class Never(Struct, frozen=True, forbid_unknown_fields=True):
    """A combination that a target refuses."""

    parts: Mapping[str, list[Any] | Literal[">1"]]
    why: str
    of_experts: bool = False  # only of models with experts


class Capabilities(Struct, frozen=True, forbid_unknown_fields=True):
    """One target's table."""

    title: str
    version: str  # looked at
    source: str
    checked_by: str  # in CI, beside our own list of keys
    software: str  # that prices it (``--software``)
    plan: Mapping[str, Values]
    workload: Mapping[str, Values]
    never: tuple[Never, ...] = ()
    families: tuple[str, ...] = ()  # kinds of models (model_type); empty: all
    software_of_zero_stage: Mapping[str, str] = {}  # where another one prices a stage

    software_of_adapters: str = ""  # where another one prices LoRA without FSDP

    def software_for(self, zero_stage: int, *, adapters: bool = False) -> str:
        """Return the software profile that prices a ZeRO stage.

        >>> capabilities("deepspeed").software_for(3)
        'torch-trainer+deepspeed-zero3'
        """
        if adapters and zero_stage == 0 and self.software_of_adapters:
            return self.software_of_adapters
        return self.software_of_zero_stage.get(str(zero_stage), self.software)

    def problem(self, plan: Plan, workload: Workload, *, experts: bool = False) -> str | None:
        """Return what a plan or a workload has that the target cannot run; None: nothing."""
        found = self.problems_of_plan(plan, experts=experts)
        return self.problem_of_workload(workload) or next(iter(found), None)

    def problem_of_workload(self, workload: Workload) -> str | None:
        """Return the first part of a workload that the target cannot run."""
        values = workload.to_dict()
        if workload.adapter != "qlora":
            values["quantisation"] = DEFAULTS["quantisation"]
        for name in OF_WORKLOAD:
            allowed = self._allowed(self.workload, name)
            if allowed != ANY and values[name] not in allowed:
                return self._words(name, values[name], allowed)
        return None

    def problems_of_plan(self, plan: Plan, *, experts: bool = False) -> list[str]:
        """Return what a plan has that the target cannot run; ``experts``: whether the model has."""
        values = plan.to_dict() | {"dp_shard": plan.dp_shard}
        found = [
            self._words(name, values[name], allowed)
            for name, allowed in self.limits().items()
            if values[name] not in allowed and values.get(ONLY_WITH.get(name, ""), 2) > 1
        ]
        for never in self._combinations(experts=experts):
            if all(_holds(values[name], wanted) for name, wanted in never.parts.items()):
                parts = ", ".join(f"{name} {values[name]}" for name in never.parts)
                found.append(f"{parts}: {never.why}")
        return found

    def limits(self) -> dict[str, list[Any]]:
        """Return the parts of a plan whose values are limited, with the allowed values."""
        names = [name for name in DEFAULTS if name in declared(Plan) and name not in FREE]
        every = {name: self._allowed(self.plan, name) for name in names}
        return {name: allowed for name, allowed in every.items() if isinstance(allowed, list)}

    def _combinations(self, *, experts: bool) -> list[Never]:
        return [never for never in self.never if experts or not never.of_experts]

    def runnable(self, table: PlanTable, *, experts: bool = False) -> Any:
        """Return which rows of a table of plans the target can run."""
        import numpy as np

        rows = np.ones(len(table), dtype=bool)
        for name, allowed in self.limits().items():
            within = np.isin(getattr(table, name), [_code(name, value) for value in allowed])
            if name in ONLY_WITH:
                within |= getattr(table, ONLY_WITH[name]) == 1
            rows &= within
        for never in self._combinations(experts=experts):
            broken = np.ones(len(table), dtype=bool)
            for name, wanted in never.parts.items():
                column = getattr(table, name)
                broken &= (
                    column > 1
                    if wanted == SEVERAL
                    else np.isin(column, [_code(name, value) for value in wanted])
                )
            rows &= ~broken
        return rows

    def _allowed(self, table: Mapping[str, Values], name: str) -> Values:
        return table.get(name, [DEFAULTS[name]])

    def _words(self, name: str, value: Any, allowed: Values) -> str:
        return f"{name} = {value} (it runs {', '.join(map(str, allowed))})"


def _holds(value: Any, wanted: Sequence[Any] | str) -> bool:
    return value > 1 if wanted == SEVERAL else value in wanted


def _code(name: str, value: Any) -> Any:
    """Return the value of a column of plans for a value of a plan."""
    return WORDS[name].index(value) if name in WORDS else value


@cache
def all_capabilities() -> Mapping[str, Capabilities]:
    """Return the tables of all targets."""
    tables = {
        name: convert(table, Capabilities, f"{FILE.name}: {name}")
        for name, table in read_toml(FILE, "the targets").items()
    }
    for name, one in tables.items():
        _check(one, f"{FILE.name}: {name}")
    return tables


def _check(one: Capabilities, where: str) -> None:
    """Raise where a table names a part that does not exist, or a value that no plan has."""
    groups = [one.plan, *(never.parts for never in one.never)]
    for name, values in ((n, v) for group in groups for n, v in group.items()):
        if name not in (*declared(Plan), *DERIVED):
            raise InputError(f"{where}: {name} is no part of a plan")
        for value in values if isinstance(values, list) else ():
            if name in WORDS and value not in WORDS[name]:
                raise InputError(f"{where}: {name} = {value}")
            if name in FLAGS and not isinstance(value, bool):
                raise InputError(f"{where}: {name} = {value}")
    for name in one.workload:
        if name not in OF_WORKLOAD:
            raise InputError(f"{where}: {name} is no part of a workload that a target limits")


def capabilities(name: str) -> Capabilities:
    """Return a target's table, or raise with the nearest name."""
    known = all_capabilities()
    if name not in known:
        hint = did_you_mean(str(name), known)
        text = f"target {str(name)[:60]!r} is unknown (must be one of {', '.join(sorted(known))})"
        raise InputError(f"{text}. {hint}" if hint else text)
    return known[name]
