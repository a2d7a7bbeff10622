"""The request of ``oom``: options of a run as it was started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from hardware_profiles.options import Option
from planner.request.options.training import (
    AdapterOptions,
    CommonOptions,
    ConfigOptions,
    LayerOptions,
    MachineOptions,
)
from planner.request.requests import PlanOptions


@dataclass(frozen=True, kw_only=True)
class StatedRun(
    ConfigOptions, AdapterOptions, PlanOptions, LayerOptions, CommonOptions, MachineOptions
):
    """A run as it was started, of a model on a cluster."""

    CHECKS_ITSELF: ClassVar = True

    model: Annotated[
        str | None,
        Option("--model", metavar="MODEL", common=True, help="price fixes: the model of the run"),
    ] = None
    cluster: Annotated[
        str | None, Option("--cluster", metavar="CLUSTER", common=True, help="and its cluster")
    ] = None
