"""Links of a group of ranks where the rows of a table are on different clusters.

The clusters have the same accelerators, nodes and domains and differ in bandwidths. A formula of
``hardware_profiles.cluster`` is evaluated for the distinct rows of the cluster and its arguments:
at once where the links are regular, otherwise once for each cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.columns import on_distinct_rows
from hardware_profiles.cluster.links.tree import is_regular
from hardware_profiles.cluster.schema import Cluster, Figure, Tier


class LinkColumns(Struct, frozen=True):
    """The links of each row: ``number`` is the index of its cluster among ``clusters``."""

    clusters: Sequence[Cluster]  # with the bandwidths that collectives reach
    number: Any  # column

    def of(self, formula: Callable[..., Any], *groups: Any, **options: Any) -> Any:
        """Return ``formula(cluster, *groups, **options)`` for the cluster of each row."""

        @on_distinct_rows
        def of_rows(number: NDArray[Any], *groups: Any) -> Any:
            number, *sizes = np.broadcast_arrays(number, *groups)
            if is_regular(self.clusters[0]):
                return formula(self._of_rows(number), *sizes, **options)
            return self._one_by_one(number, sizes, lambda c, *s: formula(c, *s, **options))

        return of_rows(self.number, *groups)

    def _of_rows(self, number: NDArray[Any]) -> Cluster:
        """Return one cluster whose bandwidths are arrays, one value for each row."""
        tiers = list(self.clusters[0].tiers)
        for place, tier in enumerate(tiers):
            those = [cluster.tiers[place] for cluster in self.clusters]
            tiers[place] = _with_bandwidth_arrays(tier, those, number)
        return replace(self.clusters[0], tiers=tuple(tiers))

    def _one_by_one(
        self, number: NDArray[Any], sizes: Sequence[NDArray[Any]], formula: Callable[..., Any]
    ) -> Any:
        parts, rows = [], []
        for index in np.unique(number).tolist():
            here = np.flatnonzero(number == index)
            rows.append(here)
            parts.append(formula(self.clusters[index], *(size[here] for size in sizes)))
        back = np.argsort(np.concatenate(rows), kind="stable")
        if isinstance(parts[0], tuple):
            columns = zip(*parts, strict=True)
            return tuple(np.concatenate(column)[back] for column in columns)
        return np.concatenate(parts)[back]


def _with_bandwidth_arrays(tier: Tier, tiers: Sequence[Tier], number: NDArray[Any]) -> Tier:
    def figure(first: Figure, values: list[float]) -> Figure:
        if len(set(values)) == 1:
            return first
        return replace(first, value=np.array(values)[number])

    peers = [each.peer_bandwidth for each in tiers]
    values = [peer.value for peer in peers if peer is not None]
    return replace(
        tier,
        bandwidth=figure(tier.bandwidth, [each.bandwidth.value for each in tiers]),
        peer_bandwidth=None if peers[0] is None else figure(peers[0], values),
    )
