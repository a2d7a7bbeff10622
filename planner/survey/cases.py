"""Scenarios of one request: clusters, parts of them and precisions with one workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from cost_models.model.spec import ModelSpec
from cost_models.plan.workload import Precision
from hardware_profiles.cluster.schema import MAX_GPUS, Cluster
from hardware_profiles.errors import InputError
from planner.request.clusters import parts_of
from planner.request.scenario import AssumedScenario, build_scenario, check_choice, check_count

MOST_AUTOMATIC: Final = 8  # clusters up to which parts of them are tried by default
BATCH_NOTE: Final = "default: one micro-batch for each accelerator of the largest cluster"


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """Model and workload of every case: the arguments of ``build_scenario`` without the cluster."""

    model: ModelSpec
    options: Mapping[str, Any]
    batch: int | None  # if given

    def scenario(
        self, cluster: Cluster, batch: int | None = None, **changes: Any
    ) -> AssumedScenario:
        """Return the scenario of one case; ``batch``: default of all cases."""
        size = self.batch or batch
        options = {**self.options, **changes, "global_batch_size": size}
        assumed = build_scenario(options.pop("model", self.model), cluster, **options)
        if self.batch is None and batch is not None:
            note = f"global_batch_size {batch} ({BATCH_NOTE})"
            assumed = replace(assumed, assumptions=(*assumed.assumptions, note))
        return assumed


def read_precisions(text: str | None) -> list[str | None]:
    """Read ``bf16,fp8``; None: the default of the accelerator.

    >>> read_precisions("bf16, fp8")
    ['bf16', 'fp8']
    """
    if text is None:
        return [None]
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    return [check_choice("precision", word, get_args(Precision)) for word in words]


def read_at_most(number: int | None) -> int | None:
    """Return a checked limit of accelerators."""
    return None if number is None else check_count("gpus_at_most", number, MAX_GPUS)


def sizes_of(clusters: Sequence[Cluster], at_most: int | None, *, fewer: bool) -> list[Cluster]:
    """Return the clusters to search: as given, or with smaller parts of them."""
    if at_most is None and not (fewer and len(clusters) <= MOST_AUTOMATIC):
        return list(clusters)
    parts = [part for cluster in clusters for part in parts_of(cluster, at_most)]
    if not parts:
        raise InputError(f"gpus_at_most = {at_most}: every cluster has more")
    return list(
        {
            (part.accelerator.name, part.num_nodes, part.gpus_per_node): part
            for part in reversed(parts)
        }.values()
    )[::-1]


def scenarios_of(
    job: WorkloadRequest,
    clusters: Sequence[Cluster],
    precisions: Sequence[str | None],
    largest: int,
) -> list[AssumedScenario]:
    """Return a scenario for each cluster and precision; ``largest``: default batch size."""
    several = len(clusters) > 1
    return [
        job.scenario(cluster, largest if several else None, precision=precision)
        for cluster in clusters
        for precision in precisions
    ]
