"""The request of ``compare-techniques``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cost_models.plan.plan import Plan
from hardware_profiles.options import declared
from planner.request.options.training import (
    AdapterOptions,
    CommonOptions,
    LayerOptions,
    MachineOptions,
)
from planner.request.requests import Subject

_MICRO_BATCH = declared(Plan)["micro_batch_size"].option


@dataclass(frozen=True)
class TechniquesRequest(AdapterOptions, LayerOptions, CommonOptions, MachineOptions, Subject):
    """Techniques of training compared for one model on one cluster."""

    micro_batch_size: Annotated[int | None, _MICRO_BATCH] = field(default=None, kw_only=True)
