"""Everything but the plan: model, cluster, workload, software."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.model.spec import ModelSpec
from cost_models.plan.workload import Workload
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import SoftwareProfile


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything but the plan."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    software: SoftwareProfile
    layer_ranges: tuple[tuple[int, int], ...] | None = None  # pinned stages; None: even ones
    # the first layers of each stage that are recomputed; None: as the plan says
    stage_recompute_layers: tuple[int, ...] | None = None

    def pinned_stages(self, num_stages: int) -> tuple[tuple[int, int], ...] | None:
        """Return the pinned layers [first, last) of every stage, where there are so many."""
        ranges = self.layer_ranges
        return ranges if ranges is not None and len(ranges) == num_stages else None

    @property
    def on_gpu(self) -> bool:
        """Whether a device works beside the host."""
        return self.cluster.accelerator.device != "cpu"

    @property
    def core_share(self) -> float:
        """Of a core, what a process has while all work; 1 on a GPU."""
        share = self.cluster.accelerator.core_share
        return 1.0 if share is None else share.value
