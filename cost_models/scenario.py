"""The scenario that plans are priced for: model, cluster, workload and software."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from cost_models.model.spec import ModelSpec
from cost_models.plan.workload import Workload
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import SoftwareProfile


class ClusterColumns(Struct, frozen=True):
    """Rates and links where the rows of a table are on different clusters."""

    rates: Any  # compute.rates.Rates, of columns
    links: Any  # communication.link_columns.LinkColumns


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a price depends on except the plan."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    software: SoftwareProfile
    layer_ranges: tuple[tuple[int, int], ...] | None = None  # pinned stages; None: even ones
    # number of layers recomputed in each stage, from its first; None: the plan's recompute_layers
    stage_recompute_layers: tuple[int, ...] | None = None
    num_ranks: int | None = None  # of a run; None: one rank for each accelerator of the cluster
    columns: ClusterColumns | None = None  # None: all plans are on ``cluster``

    @property
    def world_size(self) -> int:
        """Ranks that a plan must have."""
        return self.cluster.num_gpus if self.num_ranks is None else self.num_ranks

    def pinned_stages(self, num_stages: int) -> tuple[tuple[int, int], ...] | None:
        """Return the pinned layers [first, last) of every stage, if as many stages are pinned."""
        ranges = self.layer_ranges
        return ranges if ranges is not None and len(ranges) == num_stages else None

    def smallest_stage(self, num_stages: Any) -> Any:
        """Layers of the smallest stage: of the pinned ones, else of even ones."""
        if self.layer_ranges is not None:
            return min(last - first for first, last in self.layer_ranges)
        return self.model.num_layers // num_stages

    @property
    def on_gpu(self) -> bool:
        """Whether the accelerator is a device of its own and not the host's processor."""
        return self.cluster.accelerator.device != "cpu"

    @property
    def core_share(self) -> float:
        """Share of a processor core that a process has while all processes compute; 1 on a GPU."""
        share = self.cluster.accelerator.core_share
        return 1.0 if share is None else share.value
