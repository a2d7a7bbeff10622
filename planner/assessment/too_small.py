"""Clusters too small for any plan: lower bounds on the bytes of all accelerators and hosts."""

from __future__ import annotations

from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS
from cost_models.memory.outside_torch import context_bytes
from cost_models.scenario import Scenario
from planner.assessment.host_memory import HOST_SHARE
from planner.assessment.verdict import budget_bytes


def least_bytes(scenario: Scenario, offload: str = "none") -> float:
    """Return the least bytes that all accelerators together have to keep, however many they are.

    One copy of the trained weights in the precision of the updates, and the optimizer states,
    unless they are offloaded.
    """
    if "weights" in offload:
        return 0.0
    workload = scenario.workload
    states = 0.0 if "optimizer" in offload else _states(scenario)
    return scenario.model.num_trainable_parameters * (workload.master_bytes + states)


def least_host_bytes(scenario: Scenario, offload: str) -> float:
    """Return the least bytes that the hosts of all nodes together have to keep.

    Of an offloaded optimizer, with or without the weights: one copy of master weights, states and
    gradients (``cost_models.memory.host``).
    """
    if not ("optimizer" in offload or "weights" in offload):
        return 0.0
    workload = scenario.workload
    each = workload.master_bytes + _states(scenario) + workload.reduction_bytes
    return scenario.model.num_trainable_parameters * each


def _states(scenario: Scenario) -> float:
    """Bytes of optimizer states a parameter; 0 where they differ between tensors or are paged."""
    rule = OPTIMIZER_TRAITS[scenario.workload.optimizer]
    if not rule.is_uniform or rule.paged:
        return 0.0
    return scenario.workload.state_bytes * rule.states


def too_small(scenario: Scenario, offload: str = "none", device: str = "cpu") -> bool:
    """Whether no plan can fit: even the least bytes exceed the budgets of accelerators or hosts.

    ``device``: of offloaded states, as ``Plan.offload_device``.
    """
    if not scenario.on_gpu:
        return False
    cluster = scenario.cluster
    shared = least_bytes(scenario, offload) / cluster.num_gpus
    runtime = context_bytes(scenario.software, cluster.accelerator.architecture)
    if shared + runtime > budget_bytes(cluster):
        return True
    if cluster.host_memory is None or device != "cpu":
        return False
    hosts = HOST_SHARE * cluster.host_memory.value * cluster.num_nodes
    return least_host_bytes(scenario, offload) > hosts
