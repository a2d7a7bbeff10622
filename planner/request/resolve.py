"""What may stand for a model and for clusters, in Python as on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner.request.clusters import MOST_CLUSTERS, split_clusters
from planner.request.model import resolve_model

ModelLike = str | Path | Mapping[str, Any] | ModelSpec
ClusterLike = str | Path | Cluster


def model_of(model: ModelLike) -> ModelSpec:
    """Return the model that a name, a path or the values of a config.json stand for."""
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, (str, Path)):
        return resolve_model(str(model))
    if isinstance(model, Mapping):
        return model_spec(model, name=str(model.get("_name_or_path") or "config"), where="model")
    raise InputError(
        f"model = {model!r} (must be a name, a path, the values of a config.json or a ModelSpec)"
    )


def cluster_of(cluster: ClusterLike) -> Cluster:
    """Return the one cluster that a text or a path stands for."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, (str, Path)):
        return parse_cluster(str(cluster))
    raise InputError(f"cluster = {cluster!r} (must be a name, a path or a Cluster)")


def clusters_of(clusters: ClusterLike | Sequence[ClusterLike]) -> list[Cluster]:
    """Return the clusters that a text or a list names (``8xA100-80GB,1..4x8xH100-SXM``)."""
    if isinstance(clusters, str):
        return [parse_cluster(name) for name in split_clusters(clusters)]
    if not isinstance(clusters, Sequence):
        return [cluster_of(clusters)]
    if not 1 <= len(clusters) <= MOST_CLUSTERS:
        raise InputError(f"{len(clusters)} clusters (must be 1 to {MOST_CLUSTERS:,})")
    return [cluster_of(cluster) for cluster in clusters]
