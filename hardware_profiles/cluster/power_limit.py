"""A cluster whose boards are held to fewer watts than they are built for."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hardware_profiles.cluster.schema import Cluster, Figure
from hardware_profiles.errors import InputError

LEAST: Final = 0.25  # of the board's watts: drivers accept no less


def with_power_limit(cluster: Cluster, watts: float) -> Cluster:
    """Return the cluster with every board held to ``watts`` (``nvidia-smi --power-limit``).

    The clock falls until the power is met, so that matmuls in long runs slow down; memory and
    links keep their rates. A board at its own watts is the cluster as it is.

    >>> from hardware_profiles.cluster.parse import parse_cluster
    >>> held = with_power_limit(parse_cluster("8xH100-SXM"), 500)
    >>> held.name, held.accelerator.words
    ('8xH100-SXM@500W', 'H100-SXM-80GB@500W')
    >>> with_power_limit(held, 700).name
    '8xH100-SXM'
    """
    accelerator = cluster.accelerator
    board = accelerator.power
    if board is None:
        raise InputError(
            f"{accelerator.name}: its power is not known, so that --power says nothing about its "
            "rates (set power in a cluster file)"
        )
    if not LEAST * board.value <= watts <= board.value:
        raise InputError(
            f"--power {watts:.12g}: {accelerator.name} takes {LEAST * board.value:g} to "
            f"{board.value:g} watts"
        )
    before = "" if accelerator.power_limit is None else f"@{accelerator.power_limit.value:g}W"
    name = cluster.name.removesuffix(before)
    if watts == board.value:
        limit, name_held = None, name
    else:
        limit = Figure(watts, "assumed", "the power limit given")
        name_held = f"{name}@{watts:g}W"
    return replace(cluster, name=name_held, accelerator=replace(accelerator, power_limit=limit))
