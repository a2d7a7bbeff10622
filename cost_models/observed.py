"""What the ranks of a run counted in one step, brought to the shape of a prediction.

A rank is the plain JSON values of run.json: its pipeline stage, its memory, its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

KEPT: Final = ("weights", "optimizer")  # there at every moment of a step, whatever its peak is
# what comes and goes: how much of it is what depends on the very moment of the peak
PASSING: Final = ("gradients", "activations", "logits", "buffers")
Key = tuple[str, str]  # axis and kind


def peak_bytes(rank: Mapping[str, Any]) -> int:
    """Return the bytes of live tensors; on a GPU those that the allocator counted."""
    memory = rank["memory"]
    allocated = memory.get("allocated_bytes")
    return int(memory["peak_bytes"] if allocated is None else allocated)


def collective_bytes(records: Iterable[Mapping[str, Any]]) -> dict[Key, int]:
    """Add up the bytes of records ``{axis, kind, bytes}`` by axis and kind."""
    total: dict[Key, int] = {}
    for record in records:
        key = (record["axis"], record["kind"])
        total[key] = total.get(key, 0) + record["bytes"]
    return total


def measured_collective_bytes(ranks: Iterable[Mapping[str, Any]]) -> dict[Key, int]:
    """Return the bytes of the busiest rank of every pipeline rank, added up over the pipeline."""
    by_stage: dict[tuple[int, str, str], int] = {}
    for rank in ranks:
        for (axis, kind), size in collective_bytes(rank["communication"]).items():
            key = (rank["stage"], axis, kind)
            by_stage[key] = max(by_stage.get(key, 0), size)
    return collective_bytes(
        {"axis": axis, "kind": kind, "bytes": size} for (_, axis, kind), size in by_stage.items()
    )


def collectives_side_by_side(
    predicted: Iterable[Mapping[str, Any]], ranks: list[Any]
) -> list[tuple[Key, int, int]]:
    """Return (axis, kind), predicted and counted bytes of a step, sorted.

    Where one axis spans all ranks, its group may be the world's, and counts as that axis.
    """
    world = ranks[0].get("world_axis", "world")
    expected = collective_bytes(
        {**record, "axis": world if record["axis"] == "world" else record["axis"]}
        for record in predicted
    )
    counted = measured_collective_bytes(ranks)
    keys = sorted({*expected, *counted})
    return [(key, expected.get(key, 0), counted.get(key, 0)) for key in keys]
