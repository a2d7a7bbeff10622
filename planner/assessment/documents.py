"""JSON values of model and cluster, the first entries of every answer."""

from __future__ import annotations

from typing import Any

from cost_models.model.parameters import active_parameters
from cost_models.model.spec import ModelSpec
from hardware_profiles.cluster.build import describe
from hardware_profiles.cluster.schema import Cluster


def model_document(model: ModelSpec) -> dict[str, Any]:
    """Return name and size of a model."""
    return {
        "name": model.name,
        "family": model.family,
        "parameters": model.num_parameters,
        "active_parameters": round(active_parameters(model)),
    }


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Return name and size of a cluster."""
    return {
        "name": cluster.name,
        "description": describe(cluster),
        "accelerator": cluster.accelerator.name,
        "num_gpus": cluster.num_gpus,
        "num_nodes": cluster.num_nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "capacity_bytes": cluster.accelerator.memory_capacity.value,
    }
