"""The rows of a peak to be printed: their formulas in the papers' letters, and with numbers.

Units: bytes. The rows are those that ``peak`` adds up; a sum in a formula is printed as it is made.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from cost_models.memory.allocator import free_shares
from cost_models.memory.ledger import Factor, Item, first
from cost_models.memory.outside_torch import communicator_bytes, context_bytes
from cost_models.memory.parts import PART_WORDS, MemoryParts
from cost_models.memory.peak import rank_ledger
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from cost_models.units import format_bytes, format_count

SMALL: Final = 0.005  # of the peak: smaller rows of a part are one term
LARGE: Final = 1e6  # from which on a factor is printed with a unit


class Term(Struct, frozen=True):
    """One term of one part."""

    part: str
    name: str
    formula: str  # in symbols
    numbers: str  # the formula with numbers
    size: float  # bytes

    @property
    def size_words(self) -> str:
        """The size with its unit, with a minus sign where it is freed."""
        return "−" * (self.size < 0.0) + format_bytes(abs(self.size))


def memory_terms(
    scenario: Scenario, plan: Plan, rank: PipelineRank, parts: MemoryParts, moment: int
) -> list[Term]:
    """Return the rows of a rank at one of ``MOMENTS``, largest first.

    The terms of a part add up to it; what is freed counts negative. Rows below ``SMALL`` of the
    peak are one term of their part, or none where their sum is as small.
    """
    table = PlanTable.from_plans([plan])
    ledger = rank_ledger(RankView(scenario, table, rank))
    rows = [(row, first(row.size)) for row in ledger.leaves(moment)]
    least = SMALL * first(parts.peak)
    terms = [_term(row, size) for row, size in rows if abs(size) >= least]
    for part, words in PART_WORDS.items():
        rest = [(row.name, size) for row, size in rows if row.part == part and abs(size) < least]
        if abs(total := sum(size for _, size in rest)) >= least:
            names = ", ".join(dict.fromkeys(name for name, _ in rest))
            terms.append(Term(part, f"smaller {words}", names, "", total))
    if scenario.on_gpu:
        terms += _runtime(scenario, table, parts)
    return sorted(terms, key=lambda term: -term.size)


def _term(row: Item, size: float) -> Term:
    if not row.factors:
        return Term(row.part, row.name, row.formula, "", size)
    # a letter that divides by one rank is left out
    factors = [f for f in row.factors if f.symbol[0] != "/" or first(f.value) != 1.0]
    formula = " · ".join(f.symbol for f in factors).replace(" · /", "/")
    numbers = " × ".join(_number(f) for f in factors).replace(" × ÷", " ÷")
    return Term(row.part, row.name, formula, numbers, size)


def _number(factor: Factor) -> str:
    value, sign = first(factor.value), "÷ " if factor.symbol[0] == "/" else ""
    if abs(value) >= LARGE:
        shown = format_count(value) if factor.unit != "bytes" else format_bytes(value)
    else:
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    unit = "" if shown[-1].isalpha() and factor.unit == "bytes" else f" {factor.unit}"
    return f"{sign}{shown}{unit}".replace("-", "−")


def _runtime(scenario: Scenario, table: PlanTable, parts: MemoryParts) -> list[Term]:
    """Return the terms of memory outside tensors: context, communicators, free blocks."""
    software, cluster = scenario.software, scenario.cluster
    architecture = cluster.accelerator.architecture
    context = context_bytes(software, architecture)
    groups = first(communicator_bytes(cluster, table))
    share, free = (
        first(free_shares(software, table).needed),
        first(parts.runtime) - context - groups,
    )
    segments = "expandable segments" if software.memory.expandable_segments else "segments"
    transient = f"{100 * share:.3g} % × {format_bytes(free / share)}"
    terms = [
        Term(
            "runtime", f"CUDA context of {architecture}", "a figure of the generation", "", context
        ),
        Term("runtime", "NCCL communicators", "channels · FIFOs, group by group", "", groups),
        Term("runtime", f"free blocks in {segments}", "share · transient tensors", transient, free),
    ]
    return [term for term in terms if term.size]
