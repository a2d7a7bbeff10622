"""What a target can run, as a constraint of a search and as a check of pins and workloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.legality.capabilities import Capabilities, capabilities
from cost_models.plan.plan import Plan, PlanTable
from hardware_profiles.errors import InputError
from planner.request.constraints import Constraint


@dataclass(frozen=True, slots=True)
class Runnable(Constraint):
    """That a target can run a plan."""

    limits: Capabilities
    experts: bool  # whether the model has

    @property
    def may_change(self) -> bool:
        """No weaker constraint exists."""
        return False

    def column(self, table: PlanTable) -> Any:
        """Return whether the target can run each plan of a table."""
        return self.limits.runnable(table, experts=self.experts)


def runnable(name: str, *, experts: bool) -> Runnable:
    """Return the constraint that a target can run a plan; ``experts``: whether the model has.

    >>> runnable("deepspeed", experts=False).text
    '--to deepspeed'
    """
    return Runnable(f"runs on {name}", "==", True, f"--to {name}", capabilities(name), experts)


def require_possible(name: str, fixed: Mapping[str, Any]) -> None:
    """Raise where pins alone are beyond a target."""
    plain = {key: value for key, value in fixed.items() if not isinstance(value, (tuple, list))}
    problems = capabilities(name).problems_of_plan(Plan(**plain))
    if problems:
        raise InputError(f"--fix contradicts --to {name}: {problems[0]}")


def pins_of(name: str) -> dict[str, Any]:
    """Return the pins that a search needs beside the constraint.

    Numbers of recomputed layers are varied where none is pinned.
    """
    limits = capabilities(name).limits()
    return {"recompute_layers": 0} if limits.get("recompute_layers") == [0] else {}
