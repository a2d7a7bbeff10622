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

from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import LayerNeighbours, PipelineRank
from cost_models.plan.plan import PlanTable
from cost_models.scenario import Scenario

Column = Callable[[list[Any]], Any]  # one value for each rank -> a number, or a column
RankRows = tuple[NDArray[np.intp], PipelineRank]  # rows of a table, and a rank of their plans
Record = TypeVar("Record", bound=Struct)
COUNTS: Final = (
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
    """Return the properties of a rank that select formulas; the others are numbers."""
    near = rank.layer_neighbours
    return (
        rank.first,
        rank.last,
        rank.is_whole_model,
        rank.bridge,
        rank.shared_gradients,
        tuple(count > 0 for count in rank.kind_counts),
        (near[0].kind, near[-1].key) if near else (),
    )


def with_last(ranks: Sequence[PipelineRank], *, splits_backward: bool) -> list[PipelineRank]:
    """Return ranks, and the last one of those with the same contents where it differs.

    Under schedules that split the backward pass it has the most pending weight gradients.
    """
    late = [replace(r, index=r.last_index) for r in ranks if r.last_index > r.index]
    return [*ranks, *late] if splits_backward else list(ranks)


def joint_rank(ranks: Sequence[PipelineRank], column: Column) -> PipelineRank:
    """Return ranks of a kind as one, whose numbers are columns where they differ."""

    def joint(values: list[Any]) -> Any:
        return values[0] if len(set(values)) == 1 else column(values)

    def by_kind(counts: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        return tuple(joint(list(values)) for values in zip(*counts, strict=True))

    found: dict[str, Any] = {
        name: joint([getattr(rank, name) for rank in ranks]) for name in COUNTS
    }
    for name in COUNTS_BY_KIND:
        found[name] = by_kind([getattr(rank, name) for rank in ranks])
    by_key = [{near.key: near for near in rank.layer_neighbours} for rank in ranks]
    # every group of any rank; the one of the first layer, which all ranks have, is the last
    keys = list(dict.fromkeys(key for near in by_key for key in reversed(near)))[::-1]
    neighbours = [_joint_group([near.get(key) for near in by_key], joint) for key in keys]
    return replace(ranks[0], **found, layer_neighbours=tuple(neighbours))


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
        kinds.setdefault(kind_of(rank), []).append(number)
    found: list[Any] = [None] * len(ranks)
    for numbers in kinds.values():
        alike = [ranks[number] for number in numbers]
        sizes = [len(rows) for rows, _ in alike]

        def column(values: list[Any], sizes: list[int] = sizes) -> Any:
            return np.repeat(values, sizes)

        rank = joint_rank([rank for _, rank in alike], column)
        rows = np.concatenate([rows for rows, _ in alike])
        record = formula(RankView(scenario, table.rows(rows), rank))
        columns = [np.broadcast_to(value, len(rows)) for value in astuple(record)]
        end = 0
        for number, size in zip(numbers, sizes, strict=True):
            here = slice(end, end := end + size)
            found[number] = type(record)(*(values[here] for values in columns))
    return found
