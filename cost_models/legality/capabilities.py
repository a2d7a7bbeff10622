"""What each trainer can run: the table ``capabilities.toml``, and checks of plans against it.

A table of a trainer lists, for each part of a plan and of a workload, the allowed values: a list,
or ``any``. A part that is not listed has its default. ``never``: combinations that are not allowed,
each with its reason; a condition is a list of values, or ``>1``. ``like``: a table whose entries
hold where this one has none. A table with ``checked_by`` is a target of ``--to``; a software
profile names the table of its trainer (``capabilities``), which restricts every search with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct

from cost_models.arrays import among
from cost_models.plan.plan import FLAGS, WORDS, Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import convert, read_toml
from hardware_profiles.options import declared
from hardware_profiles.software.trainer import SoftwareProfile, software_names

FILE: Final = Path(__file__).parent / "capabilities.toml"
ANY: Final = "any"
SEVERAL: Final = ">1"
DEFAULTS: Final = {**Plan().to_dict(), **Workload(seq_len=1, global_batch_size=1).to_dict()}
# free unless a table limits them
FREE: Final = ("data_parallel", "micro_batch_size", "num_microbatches")
DERIVED: Final = ("dp_shard",)  # quantities of a plan that a combination may name
# fields of a plan that mean something only where another one is above 1
ONLY_WITH: Final = {
    "virtual_stages": "pipeline_parallel",
    "pipeline_schedule": "pipeline_parallel",
    "sequence_parallel": "tensor_parallel",
    "context_parallel_method": "context_parallel",
}
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
    """A combination that a trainer refuses."""

    parts: Mapping[str, list[Any] | Literal[">1"]]
    why: str
    of_experts: bool = False  # only of models with experts


class Capabilities(Struct, frozen=True, forbid_unknown_fields=True):
    """One trainer's table."""

    title: str
    version: str  # looked at
    source: str
    plan: Mapping[str, Values] = {}
    workload: Mapping[str, Values] = {}
    checked_by: str = ""  # in CI, in addition to our own list of keys; empty: no target of ``--to``
    also: tuple[str, ...] = ()  # other names that ``--software`` takes, in addition to the title
    software: str = ""  # profile that prices its runs (``--software``)
    never: tuple[Never, ...] = ()
    own_stages: bool = False  # whether stages may have any layers
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

    @property
    def name(self) -> str:
        """Title and version."""
        return f"{self.title} {self.version}".strip()

    def problems(self, plan: Plan, workload: Workload, *, experts: bool = False) -> list[str]:
        """Return what a workload or a plan has that the trainer cannot run."""
        of_workload = self.problem_of_workload(workload)
        of_plan = self.problems_of_plan(plan, experts=experts)
        return [*([] if of_workload is None else [of_workload]), *of_plan]

    def problem_of_workload(self, workload: Workload) -> str | None:
        """Return the first part of a workload that the trainer cannot run."""
        values = workload.to_dict()
        if workload.adapter != "qlora":
            values["quantisation"] = DEFAULTS["quantisation"]
        for name in OF_WORKLOAD:
            allowed = self._allowed(self.workload, name)
            if allowed != ANY and values[name] not in allowed:
                return self._words(name, values[name], allowed)
        return None

    def problems_of_plan(
        self, plan: Plan, *, experts: bool = False, only: Collection[str] | None = None
    ) -> list[str]:
        """Return what of a plan the trainer cannot run; ``experts``: whether the model has.

        ``only``: the parts that are looked at, if not all.
        """
        known = {*DEFAULTS, *DERIVED} if only is None else set(only)
        if {"data_parallel", "dp_replicate"} <= known:
            known |= {*DERIVED}
        values = plan.to_dict() | {"dp_shard": plan.dp_shard}
        found = [
            self._words(name, values[name], allowed)
            for name, allowed in self.limits().items()
            if name in known
            and values[name] not in allowed
            and values.get(ONLY_WITH.get(name, ""), 2) > 1
        ]
        for never in self._combinations(experts=experts):
            holds = all(_holds(values[name], wanted) for name, wanted in never.parts.items())
            if holds and known.issuperset(never.parts):
                parts = ", ".join(f"{name} {values[name]}" for name in never.parts)
                found.append(f"{parts}: {never.why}")
        return found

    def limits(self) -> dict[str, list[Any]]:
        """Return the parts of a plan whose values are limited, with the allowed values."""
        free = set(FREE).difference(self.plan)
        names = [name for name in DEFAULTS if name in declared(Plan) and name not in free]
        every = {name: self._allowed(self.plan, name) for name in names}
        return {name: allowed for name, allowed in every.items() if isinstance(allowed, list)}

    def _combinations(self, *, experts: bool) -> list[Never]:
        return [never for never in self.never if experts or not never.of_experts]

    def runnable(self, table: PlanTable, *, experts: bool = False) -> Any:
        """Return which rows of a table of plans the trainer can run."""
        rows: Any = np.ones(len(table), dtype=bool)
        for name, allowed in self.limits().items():
            within = among(getattr(table, name), [_code(name, value) for value in allowed])
            if name in ONLY_WITH:
                within = within | (getattr(table, ONLY_WITH[name]) == 1)
            rows = rows & within
        for never in self._combinations(experts=experts):
            broken: Any = np.ones(len(table), dtype=bool)
            for name, wanted in never.parts.items():
                column = getattr(table, name)
                broken = broken & (
                    column > 1
                    if wanted == SEVERAL
                    else among(column, [_code(name, value) for value in wanted])
                )
            rows = rows & np.logical_not(broken)
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
    """Return the tables of all trainers."""
    documents = read_toml(FILE, "the trainers")
    tables = {
        name: convert(_joined(documents, name), Capabilities, f"{FILE.name}: {name}")
        for name in documents
    }
    for name, one in tables.items():
        _check(one, f"{FILE.name}: {name}")
    return tables


def targets() -> dict[str, Capabilities]:
    """Return the tables of the trainers whose files are written and read (``--to``, ``--from``)."""
    return {name: one for name, one in all_capabilities().items() if one.checked_by}


def _joined(documents: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table with the entries of the one that it is ``like``."""
    own = dict(documents[name])
    if "like" not in own:
        return own
    base = _joined(documents, own.pop("like"))
    for part in ("plan", "workload"):
        own[part] = {**base.get(part, {}), **own.get(part, {})}
    never = [*base.get("never", ()), *own.get("never", ())]
    inherited = {key: base[key] for key in ("version", "source", "own_stages") if key in base}
    return {**inherited, **own, "never": never}


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


def capabilities(target: str, of: str = "target") -> Capabilities:
    """Return a target's table, or raise with the nearest name; ``of``: where it stands."""
    known = sorted(targets())
    if target not in known:
        hint = did_you_mean(str(target), known)
        text = f"{of} {str(target)[:60]!r} is unknown (must be one of {', '.join(known)})"
        raise InputError(f"{text}. {hint}" if hint else text)
    return all_capabilities()[target]


def trainer_named(name: str) -> str:
    """Return the software profile, or the table of several profiles, that a name stands for.

    Names of profiles and engines stay as they are, and so do names that nothing is known by.

    >>> [trainer_named(one) for one in ("LLaMA-Factory", "Megatron Core", "megatron")]
    ['llamafactory', 'megatron-core', 'megatron']
    """
    if not isinstance(name, str) or name in software_names():
        return name
    profiles = {_squeezed(one): one for one in software_names()}
    if _squeezed(name) in profiles:
        return profiles[_squeezed(name)]
    for table, one in all_capabilities().items():
        if one.software and _squeezed(name) in map(_squeezed, (table, one.title, *one.also)):
            return table if one.software_of_zero_stage else one.software
    return name


def _squeezed(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def capabilities_of(software: SoftwareProfile) -> Capabilities | None:
    """Return the table of a software profile's trainer; None: it runs every plan."""
    return all_capabilities()[software.capabilities] if software.capabilities else None


def usual(software: SoftwareProfile, name: str, value: Any) -> Any:
    """Return a default of a plan or a workload; the trainer's first value where it has others."""
    limits = capabilities_of(software)
    table = {} if limits is None else limits.workload if name in OF_WORKLOAD else limits.plan
    allowed = table.get(name, ANY if limits is None else [DEFAULTS[name]])
    return value if allowed == ANY or value in allowed else allowed[0]


def require_runnable_workload(software: SoftwareProfile, workload: Workload) -> None:
    """Raise where the trainer of a software profile cannot run a workload."""
    limits = capabilities_of(software)
    problem = None if limits is None else limits.problem_of_workload(workload)
    if limits is not None and problem is not None:
        raise InputError(f"--software {software.name}: {limits.name} has no {problem}")


def beyond_trainer(scenario: Scenario, table: PlanTable) -> Any:
    """Return the plans that the trainer of the software profile cannot run."""
    limits = capabilities_of(scenario.software)
    if limits is None:
        return np.zeros(len(table), dtype=bool)
    if limits.problem_of_workload(scenario.workload) is not None:
        return np.ones(len(table), dtype=bool)
    return np.logical_not(limits.runnable(table, experts=scenario.model.has_experts))


def beyond_trainer_in_words(scenario: Scenario, plan: Plan) -> str:
    """Return what one plan has that the trainer cannot run."""
    limits = capabilities_of(scenario.software)
    assert limits is not None
    problems = limits.problems(plan, scenario.workload, experts=scenario.model.has_experts)
    return f"{limits.name} cannot run this plan: {'; '.join(problems)}"
