"""Groups of plans that are priced together, and their ranks with columns of numbers.

Plans are grouped by the kinds of contents of their pipeline ranks; the number of layers of each
kind is a column as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from cost_models.arrays import ascending
from cost_models.columnar.columns import FactoredColumn, on_distinct_rows
from cost_models.columnar.projections import Frame, Index, Projection, distinct
from cost_models.partition.in_flight import late_rank
from cost_models.partition.plan_stages import STAGES_BY, stages_of
from cost_models.partition.stages import PipelineRank
from cost_models.plan.factored import factored, find_projections, mask_of
from cost_models.plan.plan import PlanTable
from cost_models.pricing.rank_rows import RankRows, formulas_of, joint_rank, kind_of, late_position
from cost_models.scenario import Scenario
from hardware_profiles.progress import advance

Floats = NDArray[np.float64]
AT_ONCE: Final = 1_000_000  # plans of one group
ONE_GROUP: Final = 100_000  # plans below which all are one group
ONE_KIND: Final = 20_000  # plans up to which first and last ranks are rows of one table, too


def groups_of_plans(
    scenario: Scenario, table: PlanTable, cluster: Index | None = None
) -> Iterator[tuple[Index, PlanGroup]]:
    """Yield groups of plans that are priced together, with their rows of the table.

    Few plans are one group, so that all ranks share the results of operations; others are grouped
    by the kinds of their ranks. ``cluster``: number of each row's cluster.
    """
    block, contents = stages_of(scenario, table)
    groups: dict[Any, list[int]] = {}
    for number, ranks in enumerate(contents):
        key = () if len(table) < ONE_GROUP else tuple(dict.fromkeys(map(kind_of, ranks)))
        groups.setdefault(key, []).append(number)
    done = 0
    for blocks in groups.values():
        kinds = dict.fromkeys(kind_of(rank) for number in blocks for rank in contents[number])
        here = np.zeros(len(contents), dtype=bool)
        here[blocks] = True
        rows = np.flatnonzero(here[block])
        for part in np.array_split(rows, -(-len(rows) // AT_ONCE)):
            present, position = distinct(block[part])
            of_blocks = [contents[b] for b in present]
            own = None if cluster is None else cluster[part]
            mine = table if len(part) == len(table) else table.rows(part)
            yield part, PlanGroup.of(mine, position, of_blocks, tuple(kinds), kind_of, own)
            done += len(part)
            advance(done / len(table))


def groups_of_ranks(
    scenario: Scenario, table: PlanTable, wanted: Callable[[Index], NDArray[np.bool_]]
) -> Iterator[tuple[Index, PlanGroup]]:
    """Yield one group for each kind of rank: a row for each such rank of each plan.

    The rows of the table are repeated for plans with several ranks of a kind; of many plans, those
    with the most layers come first. ``wanted``: which rows are, when a group begins.
    """
    block, blocks = stages_of(scenario, table)
    bound: Any = late_rank(table.plain())
    kind = formulas_of if len(table) <= ONE_KIND else kind_of
    groups: dict[Any, list[RankRows]] = {}
    for position, ranks in enumerate(blocks):
        rows, known = np.flatnonzero(block == position), set[Any]()
        for rank in sorted(ranks, key=lambda one: -sum(one.kind_counts)):
            late = late_position(rank.positions, bound[rows])
            for index in ascending([rank.index], late)[::-1].tolist():
                own = rows if index == rank.index else rows[late == index]
                key = kind(rank), kind(rank) in known and len(table) > ONE_GROUP
                known.add(kind(rank))
                alike = groups.setdefault(key, [])
                alike.append((own, replace(rank, index=index, positions=(index,))))
    done, whole = 0, sum(len(rows) for alike in groups.values() for rows, _ in alike)
    for (key, _), alike in sorted(groups.items(), key=lambda one: one[0][1]):
        every = np.concatenate([rows for rows, _ in alike])
        number = np.repeat(np.arange(len(alike)), [len(rows) for rows, _ in alike])
        kept = wanted(every)
        every, number = every[kept], number[kept]
        if len(every) == 0:
            continue
        contents: list[Sequence[PipelineRank]] = [[rank] for _, rank in alike]
        yield every, PlanGroup.of(table.rows(every), number, contents, (key,), kind, block_by=())
        done += len(every)
        advance(done / whole)


class PlanGroup(Struct, frozen=True):
    """Plans whose ranks are of the same kinds, and these ranks with columns of numbers."""

    plain: PlanTable
    table: PlanTable
    frame: Frame
    block: Any  # column: index into ``contents``
    contents: list[Sequence[PipelineRank]]
    # of each rank below, its index in the contents of each block; None: not in that block
    slots: list[list[int | None]]
    ranks: list[PipelineRank]
    memory_ranks: list[PipelineRank]
    clusters: tuple[Projection, Index] | None  # column of the rows' clusters, and their numbers

    @classmethod
    def of(
        cls,
        plain: PlanTable,
        block: Index,
        contents: list[Sequence[PipelineRank]],
        kinds: tuple[Any, ...],
        key_of: Callable[[PipelineRank], Any],
        cluster: Index | None = None,
        *,
        block_by: Sequence[str] = STAGES_BY,
    ) -> PlanGroup:
        """Align the ranks of all blocks; a block with fewer ranks of a kind repeats its last one.

        ``kinds``: values of ``key_of`` of the ranks; ``block_by``: columns that determine a row's
        block.
        """
        slots: list[list[int | None]] = []
        kinds_of = [[key_of(rank) for rank in ranks] for ranks in contents]
        for kind in kinds:
            alike = [[i for i, own in enumerate(those) if own == kind] for those in kinds_of]
            for place in range(max(map(len, alike))):
                slots.append(
                    [found[min(place, len(found) - 1)] if found else None for found in alike]
                )
        table, frame = factored(plain)
        number = np.zeros(1, dtype=np.intp)
        if len(contents) > 1:
            projection = frame.add(block, len(contents), source=mask_of(table, block_by))
            number = FactoredColumn(projection, np.arange(len(contents)))  # type: ignore[assignment]
        clusters = None
        if cluster is not None:
            present, codes = distinct(cluster)
            clusters = frame.add(codes, len(present)), present
        find_projections(table, frame)
        columns = [_columns(ranks_of(contents, slot), number) for slot in slots]
        memory_ranks = list(columns)
        bound = late_rank(table)
        for slot, rank in zip(slots, columns, strict=True):
            late = _late_index([own.positions for own in ranks_of(contents, slot)], number, bound)
            if np.any(late > rank.index):
                memory_ranks.append(replace(rank, index=late))
        return cls(plain, table, frame, number, contents, slots, columns, memory_ranks, clusters)

    def numbers(self) -> Iterator[Any]:
        """Yield how many ranks of a pipeline each of ``ranks`` stands for, as columns."""
        seen: list[set[int | None]] = [set() for _ in self.contents]
        for slot in self.slots:
            alike = [
                0 if index is None or index in known else len(own[index].positions)
                for index, known, own in zip(slot, seen, self.contents, strict=True)
            ]
            for index, known in zip(slot, seen, strict=True):
                known.add(index)
            yield self.of_block(alike)

    def of_block(self, values: Sequence[Any]) -> Any:
        """Return a column with the value of each row's block."""
        if len(self.contents) == 1:
            return values[0]
        return FactoredColumn(self.block.projection, np.array(values)[self.block.values])


def ranks_of(
    contents: Sequence[Sequence[PipelineRank]], slot: Sequence[int | None]
) -> list[PipelineRank]:
    """Return a rank of each block; another block's where it has none."""
    found = [None if i is None else ranks[i] for ranks, i in zip(contents, slot, strict=True)]
    any_rank = next(rank for rank in found if rank is not None)
    return [rank or any_rank for rank in found]


def _late_index(positions: Sequence[tuple[int, ...]], number: Any, bound: Any) -> Any:
    """Return ``late_position`` of a rank; ``positions``: by block, ``number``: of a row's block."""

    @on_distinct_rows
    def index(number: Any, bound: Any) -> Any:
        number, bound = np.broadcast_arrays(number, bound)
        found = np.empty(len(number), dtype=np.intp)
        for block in ascending(number).tolist():
            rows = number == block
            found[rows] = late_position(positions[block], bound[rows])
        return found

    return index(number, bound)


def _columns(ranks: list[PipelineRank], number: Any) -> PipelineRank:
    """Return one rank whose numbers are columns, where they differ between the blocks."""
    return joint_rank(
        ranks, lambda values: FactoredColumn(number.projection, np.array(values)[number.values])
    )
