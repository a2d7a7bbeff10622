"""Plans by their degrees: what a search keeps if it shows one plan of every split of the ranks.

Degrees: of tensor, pipeline, context and expert parallelism. A search that ranks by them keeps the
``top`` fastest plans, the fastest plan of each of some best degrees (``distinct``), and every plan
within ``CLOSE`` of the fastest, from which the simplest is chosen.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cost_models.columnar.dictionary_encoding import decode
from cost_models.plan.plan import Plan, PlanTable
from planner.search.simplicity import CLOSE

TOP: Final = 10  # plans that are found, unless --top is given
DISTINCT: Final = 6  # splits of the ranks of which a plan is found, unless --top is given
Floats = NDArray[np.float64]
Codes = NDArray[np.uint64]


def degrees_of(table: Plan | PlanTable) -> Any:
    """Return a number for the degrees of a plan, or a column of these.

    Different degrees have different numbers: tp x cp is below 2^20, pp and ep are below 2^12.

    >>> int(degrees_of(Plan(tensor_parallel=2, pipeline_parallel=3)))
    35184388878337
    """
    tensor, pipeline, context, experts = (
        np.asarray(decode(column)).astype(np.uint64)
        for column in (
            table.tensor_parallel,
            table.pipeline_parallel,
            table.context_parallel,
            table.expert_parallel,
        )
    )
    code = ((tensor * 2**20 + context) * 2**12 + pipeline) * 2**12 + experts
    return code.astype(np.uint64)


class Standing(Struct, frozen=True):
    """Steps (seconds, ascending) and degrees of the plans that are known so far."""

    seconds: Floats
    degrees: Codes
    top: int  # fastest plans that are kept
    distinct: int  # best degrees of which a plan is kept

    def kept(self) -> NDArray[np.bool_]:
        """Return which of the plans stay."""
        kept: NDArray[np.bool_] = self.seconds <= (1.0 + CLOSE) * self.seconds[:1]
        kept[: self.top] = True
        kept[self._firsts()] = True
        return kept

    def limit(self, degrees: Codes) -> Floats:
        """Return the longest step with which a plan of these degrees is kept."""
        if len(self.seconds) == 0:
            return np.full(len(degrees), np.inf)
        firsts = self._firsts()
        known, best = self.degrees[firsts], self.seconds[firsts]
        last = best[-1] if len(firsts) == self.distinct else np.inf
        found = np.full(len(degrees), last)
        order = np.argsort(known)
        at = np.minimum(np.searchsorted(known[order], degrees), len(known) - 1)
        mine = known[order][at] == degrees
        found[mine] = best[order][at][mine]
        fastest = self.seconds[self.top - 1] if len(self.seconds) >= self.top else np.inf
        limit: Floats = np.maximum(found, max(fastest, (1.0 + CLOSE) * self.seconds[0]))
        return limit

    def _firsts(self) -> NDArray[np.intp]:
        """Return the positions of the fastest plan of each of the best degrees."""
        _, first = np.unique(self.degrees, return_index=True)
        found: NDArray[np.intp] = np.sort(first)[: self.distinct]
        return found
