"""Steps of plans on several clusters that differ in rates and bandwidths, priced at once.

The formulas are evaluated once for a table whose rows are on different clusters: rates of the
accelerator and bandwidths of links are columns as those of the plans are (``columnar.columns``), so
each step equals that of ``table_steps`` on its cluster. Clusters have the same accelerators, nodes,
domains and latencies; memory does not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec.structs import replace as replaced
from numpy.typing import NDArray

from cost_models.columnar.columns import FactoredColumn, by_value
from cost_models.columnar.projections import Index, Projection
from cost_models.communication.link_columns import LinkColumns
from cost_models.communication.seconds import achieved_by
from cost_models.compute.rates import Rates, training_rates
from cost_models.plan.plan import PlanTable
from cost_models.pricing.step_bounds import step_times
from cost_models.pricing.table import table_step_bounds
from cost_models.scenario import ClusterColumns, Scenario
from hardware_profiles.cluster.schema import Cluster

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClusterVariants:
    """Clusters of the rows of a table, with the rates of each and the distinct links."""

    scenario: Scenario
    rates: Sequence[Rates]
    links: Sequence[Cluster]
    link_of: Index  # of each cluster, the index of its links

    @classmethod
    def of(cls, scenario: Scenario, clusters: Sequence[Cluster]) -> ClusterVariants:
        """Return the rates and the links of clusters."""
        precision, software = scenario.workload.precision, scenario.software
        links: dict[Any, int] = {}
        kept: list[Cluster] = []
        link_of = []
        for cluster in clusters:
            key = cluster.tiers, cluster.levels
            if key not in links:
                links[key] = len(kept)
                kept.append(achieved_by(software, cluster))
            link_of.append(links[key])
        return cls(
            scenario,
            [training_rates(c.accelerator, precision, software, c.num_gpus) for c in clusters],
            kept,
            np.array(link_of, dtype=np.intp),
        )

    def columns(self, projection: Projection, present: Index) -> ClusterColumns:
        """Return rates and links as columns; ``present``: the cluster of each projected row."""

        def column(values: list[Any]) -> Any:
            few = [values[index] for index in present.tolist()]
            if all(value == few[0] for value in few):
                return few[0]
            return by_value(FactoredColumn(projection, np.array(few)))

        each = {n: column([getattr(r, n) for r in self.rates]) for n in Rates.__struct_fields__}
        number = column(self.link_of.tolist())
        links = LinkColumns(self.links if isinstance(number, FactoredColumn) else (), number)
        if not links.clusters:
            links = LinkColumns((self.links[number],), np.zeros(1, dtype=np.intp))
        return ClusterColumns(replaced(self.rates[0], **each), links)


def steps_on_clusters(
    scenario: Scenario, table: PlanTable, clusters: Sequence[Cluster], number: Index
) -> tuple[Floats, Floats]:
    """Return the step of each plan on its cluster, and a lower bound on faster machines.

    ``number``: index of each row's cluster. The columns are those of ``step_times``.
    """
    if len(table) == 0:
        return np.zeros(0), np.zeros(0)
    if scenario.on_gpu:
        variants = ClusterVariants.of(scenario, clusters)
        return table_step_bounds(scenario, table, number, variants.columns)
    seconds, least = np.empty(len(table)), np.empty(len(table))
    for index in np.unique(number).tolist():  # processes that share cores
        rows = np.flatnonzero(number == index)
        there = replace(scenario, cluster=clusters[index])
        seconds[rows], least[rows], _ = step_times(there, table.rows(rows).plain())
    return seconds, least
