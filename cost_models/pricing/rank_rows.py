"""Ranks of many plans as rows of one table: the formulas of a rank are evaluated by kind of rank.

Ranks of a kind differ in numbers only (layers, recomputed layers, their place in the pipeline).
These are columns of the table, as the fields of the plans are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace
from numpy.typing import NDArray

from cost_models.arrays import Count
from cost_models.partition.in_flight import late_rank
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import LayerNeighbours, PipelineRank
from cost_models.plan.plan import PlanTable
from cost_models.scenario import Scenario

Column = Callable[[list[Any]], Any]  # one value for each rank -> a number, or a column
RankRows = tuple[NDArray[np.intp], PipelineRank]  # rows of a table, and a rank of their plans
Record = TypeVar("Record", bound=Struct)
NUMBERS: Final = (
    "first",
    "last",
    "index",
    "recomputed_first_layers",
    "num_stages",
    "has_adjacent_stages",
    "hidden_states_sent",
    "hidden_states_received",
    "max_message_states",
    "decoder_stages",
    "position_tables",
)
COUNTS_BY_KIND: Final = ("kind_counts", "recomputed", "after_recomputed")


def kind_of(rank: PipelineRank) -> tuple[Any, ...]:
    """Return the properties of a rank that are no numbers in a table of many plans."""
    return rank.first, rank.last, *formulas_of(rank)


def formulas_of(rank: PipelineRank) -> tuple[Any, ...]:
    """Return the properties of a rank that select formulas; the others are numbers."""
    near = rank.layer_neighbours
    return (
        rank.bridge,
        rank.shared_gradients,
        tuple(count > 0 for count in rank.kind_counts),
        (near[0].kind, near[-1].key) if near else (),
    )


def fullest_ranks(ranks: Sequence[PipelineRank], table: PlanTable) -> list[PipelineRank]:
    """Return ranks, and of those with the same contents the later one that may need more memory.

    Its index is a column (``in_flight.late_rank``).
    """
    bound = np.broadcast_to(late_rank(table), len(table))
    late = [replace(rank, index=late_position(rank.positions, bound)) for rank in ranks]
    return [*ranks, *(r for r in late if np.any(r.index > r.positions[0]))]


def late_position(positions: Sequence[int], bound: Count) -> NDArray[np.integer[Any]]:
    """Return the first of ascending positions from a bound on, or the last one.

    >>> late_position((1, 3, 5), np.array([0, 2, 9])).tolist()
    [1, 3, 5]
    """
    found = np.minimum(np.searchsorted(positions, bound), len(positions) - 1)
    return np.take(positions, found)


def joint_rank(ranks: Sequence[PipelineRank], column: Column) -> PipelineRank:
    """Return ranks of a kind as one, whose numbers are columns where they differ."""

    def joint(values: list[Any]) -> Any:
        same = not _have_columns(values) and len(set(values)) == 1
        return values[0] if same else column(values)

    def by_kind(counts: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        return tuple(joint(list(values)) for values in zip(*counts, strict=True))

    found: dict[str, Any] = {
        name: joint([getattr(rank, name) for rank in ranks]) for name in NUMBERS
    }
    for name in COUNTS_BY_KIND:
        found[name] = by_kind([getattr(rank, name) for rank in ranks])
    by_key = [{near.key: near for near in rank.layer_neighbours} for rank in ranks]
    # every group of any rank; the one of the first layer, which all ranks have, is the last
    keys = list(dict.fromkeys(key for near in by_key for key in reversed(near)))[::-1]
    neighbours = [_joint_group([near.get(key) for near in by_key], joint) for key in keys]
    return replace(ranks[0], **found, layer_neighbours=tuple(neighbours))


def _have_columns(values: Sequence[Any]) -> bool:
    return np.ndarray in set(map(type, values))


def _joint_group(alike: Sequence[LayerNeighbours | None], joint: Column) -> LayerNeighbours:
    """Return a group of layers of several ranks, with columns of counts; None: has no such layers.

    Counts of a rank without such layers are those of any other rank: its points do not exist.
    """
    known = [near for near in alike if near is not None]
    ends = [
        tuple(
            tuple(joint(list(counts)) for counts in zip(*each, strict=True))
            for each in zip(*(getattr(near or known[0], end) for near in alike), strict=True)
        )
        for end in ("first", "last")
    ]
    same = all(near.first is near.last for near in known)
    exists = joint([near is not None for near in alike])
    return replace(known[0], first=ends[0], last=ends[0] if same else ends[1], exists=exists)


def joined(records: Sequence[Record]) -> Record:
    """Return records of columns one after the other."""
    if len(records) == 1:
        return records[0]
    columns = zip(*map(astuple, records), strict=True)
    return type(records[0])(*map(np.concatenate, columns))


def of_ranks(
    scenario: Scenario,
    table: PlanTable,
    ranks: Sequence[RankRows],
    formula: Callable[[RankView], Record],
) -> list[Record]:
    """Return a formula's record of columns for each rank, evaluated once for each kind of rank."""
    kinds: dict[Any, list[int]] = {}
    for number, (_, rank) in enumerate(ranks):
        kinds.setdefault(formulas_of(rank), []).append(number)
    found: list[Any] = [None] * len(ranks)
    for numbers in kinds.values():
        alike = [ranks[number] for number in numbers]
        sizes = [len(rows) for rows, _ in alike]

        def column(values: list[Any], sizes: list[int] = sizes) -> Any:
            if not _have_columns(values):
                return np.repeat(values, sizes)
            return np.concatenate(
                [np.broadcast_to(*each) for each in zip(values, sizes, strict=True)]
            )

        rank = joint_rank([rank for _, rank in alike], column)
        rows = np.concatenate([rows for rows, _ in alike])
        record = formula(RankView(scenario, table.rows(rows), rank))
        shape, values = (len(rows),), astuple(record)
        columns = [v if np.shape(v) == shape else np.broadcast_to(v, shape) for v in values]
        end = 0
        for number, size in zip(numbers, sizes, strict=True):
            here = slice(end, end := end + size)
            found[number] = type(record)(*(values[here] for values in columns))
    return found
