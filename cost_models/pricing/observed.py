"""Memory and traffic that the ranks of a run counted in one step, in the form of a prediction.

A rank is the plain JSON values of run.json: its pipeline stage, its memory, its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from cost_models.plan_file import PlanFile
from hardware_profiles.cluster.catalogue import match_accelerator
from hardware_profiles.errors import InputError
from hardware_profiles.fields import convert

CONSTANT_PARTS: Final = ("weights", "optimizer")  # constant through a step
# transient parts, which depend on the moment of the peak
TRANSIENT_PARTS: Final = ("gradients", "activations", "logits", "buffers")
Key = tuple[str, str]  # axis and kind


class _Collective(Struct, frozen=True):
    axis: str
    kind: str
    bytes: int


class _Memory(Struct, frozen=True):
    peak_bytes: int
    parts: dict[str, int]
    allocated_bytes: int | None = None
    gathered_bytes: int | None = None


class _Rank(Struct, frozen=True):
    stage: Annotated[int, Meta(ge=0, le=10**6)]
    memory: _Memory
    communication: tuple[_Collective, ...]


def check_ranks(ranks: Iterable[Mapping[str, Any]], where: str) -> None:
    """Raise an InputError unless every rank has the values that this module reads."""
    for index, rank in enumerate(ranks):
        convert(rank, _Rank, f"{where}[{index}]")


def peak_bytes(rank: Mapping[str, Any]) -> int:
    """Return the bytes of live tensors; on a GPU those that the allocator counted."""
    memory = rank["memory"]
    allocated = memory.get("allocated_bytes")
    return int(memory["peak_bytes"] if allocated is None else allocated)


def other_machine(file: PlanFile, device: str, processes: int) -> str | None:
    """Return in words that a run used other devices than its plan was priced for; None: the same.

    ``device``: torch's name of a GPU, or "cpu". Times and rates of such a run are not comparable
    with the prediction; memory and traffic are.
    """
    chip, used = file.cluster.accelerator, None
    if device == "cpu" and chip.device != "cpu":
        used = f"{processes:,} CPU process{'es' if processes > 1 else ''}"
    elif device not in ("cpu", "unknown"):
        try:
            found = match_accelerator(device).entry
        except InputError:
            return None
        peaks = [one.peak_flops.get(file.workload.precision) for one in (chip, found)]
        if chip.device == "cpu" or len({peak and peak.value for peak in peaks}) > 1:
            used = f"{processes:,} {found.name}"
    if used is None:
        return None
    each = "CPU processes" if chip.device == "cpu" else chip.name
    return f"the plan was priced for {file.plan.world_size:,} {each}, the run used {used}"


def with_predicted_names(rank: Mapping[str, Any], file: PlanFile) -> dict[str, Any]:
    """Return a rank with the parts of its peak named as in predictions.

    Below ZeRO-3 the gathered weights count as weights, as do the shards that the optimizer updates.
    """
    memory = rank["memory"]
    gathered = memory.get("gathered_bytes") or 0
    if not gathered or file.plan.zero_stage == 3:
        return dict(rank)
    parts = {"weights": 0, **memory["parts"]}
    parts["weights"] += gathered
    parts["buffers"] -= gathered
    return {**rank, "memory": {**memory, "parts": parts}}


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

    If one axis spans all ranks, its group may be the world's; such traffic belongs to that axis.
    """
    world = ranks[0].get("world_axis", "world")
    expected = collective_bytes(
        {**record, "axis": world if record["axis"] == "world" else record["axis"]}
        for record in predicted
    )
    counted = measured_collective_bytes(ranks)
    keys = sorted({*expected, *counted})
    return [(key, expected.get(key, 0), counted.get(key, 0)) for key in keys]
