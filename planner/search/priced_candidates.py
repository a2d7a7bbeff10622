"""Legal candidates with their prices, shared by several searches of one explanation.

Searches whose scenarios differ only in the global batch size price plans by the same formulas, so
the candidates of all batches are priced as one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.plan.plan import COLUMNS, WORDS
from cost_models.pricing.table import table_step_bounds
from cost_models.scenario import Scenario
from hardware_profiles.progress import stages, tracked
from planner.assessment.verdict import VERDICTS, budget_bytes
from planner.search.candidates import Candidates, joined
from planner.search.feasible import device_and_host

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Codes = NDArray[np.int8]
MOST_JOINT: Final = 300_000  # plans; more are priced batch by batch
SIZES: Final = (1.0, 3.0)  # seconds, relative: steps, memory
EXACT: Final = 4.0  # peaks up to so many budgets are exact


class PricedCandidates(Struct, frozen=True):
    """Candidates, and of each legal one: steps, peak and verdicts."""

    candidates: Candidates
    step: Floats  # seconds
    least: Floats  # seconds, lower bound of a step, also on faster machines (``step_times``)
    peak: Floats  # bytes; above EXACT budgets a lower bound, unless all are above
    host: Codes  # verdict codes of the host of a node
    verdicts: Codes  # the worse of the verdicts on accelerator and host

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        fixed: Mapping[str, Any] | None = None,
        *,
        offloads: Sequence[str] = ("none",),
    ) -> PricedCandidates:
        """Enumerate the candidates of one scenario and price the legal ones."""
        return cls.of_batches(scenario, [scenario.workload.global_batch_size], fixed, offloads)[0]

    @classmethod
    def of_batches(
        cls,
        scenario: Scenario,
        sizes: Sequence[int],
        fixed: Mapping[str, Any] | None = None,
        offloads: Sequence[str] = ("none",),
    ) -> list[PricedCandidates]:
        """Enumerate the candidates of several global batch sizes and price all legal ones."""
        found = [
            Candidates.of(with_batch(scenario, size), fixed or {}, (), offloads) for size in sizes
        ]
        tables = [candidates.legal for candidates in found]
        if sum(map(len, tables)) > MOST_JOINT:
            return [
                _priced(scenario, [one])[0]
                for one in tracked(found, size=lambda one: len(one.legal))
            ]
        return _priced(scenario, found)


def candidates_table(priced: PricedCandidates) -> pd.DataFrame:
    """Return the plans with peak (bytes), step (seconds) and verdict, a row each."""
    import pandas as pd

    plans = priced.candidates.legal.plain()
    columns = {name: np.asarray(getattr(plans, name)) for name in COLUMNS}
    for name, words in WORDS.items():
        columns[name] = np.array(words)[columns[name]]
    verdicts = np.array(VERDICTS)[priced.verdicts]
    return pd.DataFrame(
        columns | {"peak_bytes": priced.peak, "step_seconds": priced.step, "verdict": verdicts}
    )


def with_batch(scenario: Scenario, size: int) -> Scenario:
    """Return the scenario with another global batch size."""
    return replace(scenario, workload=replace(scenario.workload, global_batch_size=size))


def _priced(scenario: Scenario, found: Sequence[Candidates]) -> list[PricedCandidates]:
    tables = [candidates.legal for candidates in found]
    table = tables[0]
    if len(tables) > 1:
        table = joined(tables)
    budget = budget_bytes(scenario.cluster)
    with stages(*SIZES) as begin:
        begin(f"pricing the steps of {len(table):,} plans")
        step, least = table_step_bounds(scenario, table)
        begin(f"pricing the memory of {len(table):,} plans")
        peaks, devices, hosts = device_and_host(scenario, table, EXACT * budget)
    priced, end = [], 0
    for candidates in found:
        here = slice(end, end := end + len(candidates.legal))
        peak, on_device, host = peaks[here], devices[here], hosts[here]
        if len(peak) and peak.min() > EXACT * budget:
            peak, on_device, host = device_and_host(scenario, candidates.legal)
        verdicts = np.maximum(on_device, host)
        priced.append(PricedCandidates(candidates, step[here], least[here], peak, host, verdicts))
    return priced
