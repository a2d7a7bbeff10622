"""The prediction for one plan: memory, time and collectives, of the plan and of each stage.

``predict`` returns the records; ``to_dict`` gives the JSON that ``fit``, ``plan`` and plan.json
show. Units: bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from cost_models.memory.allocator import shown_bytes
from cost_models.memory.ledger import MOMENTS, first
from cost_models.memory.outside_torch import outside_bytes
from cost_models.memory.parts import MemoryParts
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import (
    PredictionTable,
    RankMemory,
    paged_states,
    price,
    rank_communication,
    rank_memories,
    reserved_free_bytes,
    throughput_of,
)
from cost_models.pricing.utilisation import counted_flops, hardware_utilisation, time_interval
from cost_models.scenario import Scenario
from cost_models.step_time.parts import TimeParts
from cost_models.uncertainty import MemoryKind, memory_spread, peak_interval
from hardware_profiles.record import Record, to_json
from hardware_profiles.software.trainer import software_profile

MEMORY_PARTS: Final = MemoryParts.__struct_fields__
TIME_PARTS: Final = TimeParts.__struct_fields__
Ranges = Sequence[tuple[int, int]]
SHOWN: Final[tuple[MemoryKind, ...]] = ("allocated", "reserved", "device")
SAME: Final = 1e-9  # relative difference below which two predictions are equal


class StageMemory(Struct, frozen=True):
    """Peak memory of one pipeline rank."""

    stage: int
    peak_bytes: float
    allocated_bytes: float  # live tensors, without runtime and allocator
    moment: str  # one of MOMENTS, at which the peak falls
    parts: MemoryParts


class MemoryPrediction(Record, frozen=True):
    """Peak memory of the accelerator with the largest peak, its 90 % interval and its parts.

    ``peak_bytes`` is what the plan needs; the three figures are what torch and nvidia-smi show
    where memory is plentiful (``cost_models.memory.allocator``).
    """

    peak_bytes: float
    low_bytes: float
    high_bytes: float
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    device_used_bytes: float
    limiting_stage: int  # first pipeline rank with the largest peak
    moment: str  # one of MOMENTS, at which the peak falls
    parts: MemoryParts
    stages: tuple[StageMemory, ...]


class TimePrediction(Record, frozen=True):
    """Seconds of a step with their 90 % interval and parts, and the throughput of the plan."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    parts: TimeParts
    slowest_stage: int
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: float | None  # model FLOP utilisation; None: peak unknown
    hfu: float | None  # hardware FLOP utilisation
    utilisation_convention: str  # of mfu and hfu, see pricing/utilisation.py


class Collective(Struct, frozen=True):
    """Collectives of one kind on one axis, of one pipeline rank in one step."""

    stage: int
    axis: str
    kind: str
    count: int
    bytes: int


class Prediction(Record, frozen=True):
    """Memory, time and traffic of one plan."""

    memory: MemoryPrediction
    time: TimePrediction
    communication: tuple[Collective, ...]


def predict(scenario: Scenario, plan: Plan, layer_ranges: Ranges) -> Prediction:
    """Return memory, time and communication of one legal plan."""
    table = price(scenario, PlanTable.from_plans([plan]), layer_ranges)
    return Prediction(
        memory=memory_prediction(
            scenario, plan, table, rank_memories(scenario, plan, layer_ranges)
        ),
        time=time_prediction(scenario, plan, table),
        communication=communication_prediction(scenario, plan, layer_ranges),
    )


def scenario_of(file: PlanFile) -> Scenario:
    """Return the scenario of a plan.json: everything in it except the plan and its stages."""
    return Scenario(
        file.model,
        file.cluster,
        file.workload,
        software_profile(file.software),
        stage_recompute_layers=file.stage_recompute_layers,
    )


def still_holds(file: PlanFile, fresh: Prediction) -> bool:
    """Return whether the prediction in a plan.json equals a fresh one for its plan."""
    try:
        kept: Mapping[str, Any] = file.prediction
        numbers = [(kept["memory"]["peak_bytes"], fresh.memory.peak_bytes)]
        numbers += [(kept["time"]["step_seconds"], fresh.time.step_seconds)]
        same = all(abs(a - b) <= SAME * abs(b) for a, b in numbers)
        return same and bool(kept["communication"] == to_json(fresh.communication))
    except (KeyError, TypeError):
        return False


def memory_prediction(
    scenario: Scenario, plan: Plan, table: PredictionTable, ranks: Sequence[RankMemory]
) -> MemoryPrediction:
    """Return the peak of a table's first plan; ``ranks``: the memory of every pipeline rank."""
    peak = float(table.peak[0])
    typical, spread = (
        float(table.typical_peak[0]),
        memory_spread(scenario.software.name, experts=scenario.model.has_experts),
    )
    low, high = peak_interval(peak, typical, spread)
    parts = MemoryParts(**{n: float(getattr(table.memory, n)[0]) for n in MEMORY_PARTS})
    allocated, reserved, device = _shown(scenario, plan, parts, int(table.limiting_rank[0]))
    return MemoryPrediction(
        peak_bytes=peak,
        low_bytes=low,
        high_bytes=high,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used_bytes=device,
        limiting_stage=int(table.limiting_rank[0]),
        moment=MOMENTS[int(table.moment[0])],
        parts=parts,
        stages=tuple(
            StageMemory(
                stage=index,
                peak_bytes=float(parts.peak),
                allocated_bytes=float(parts.allocated),
                moment=MOMENTS[moment],
                parts=MemoryParts(**{n: float(getattr(parts, n)) for n in MEMORY_PARTS}),
            )
            for index, (parts, moment) in enumerate(ranks)
        ),
    )


def _shown(scenario: Scenario, plan: Plan, parts: MemoryParts, number: int) -> list[float]:
    """Return the peak of a pipeline rank as allocated, as reserved, and as in use on the device.

    On CPUs, without an allocator of segments, all are the live bytes.
    """
    software, cluster = scenario.software, scenario.cluster
    if not scenario.on_gpu:
        return [float(parts.allocated)] * len(SHOWN)
    table, capacity = PlanTable.from_plans([plan]), cluster.accelerator.memory_capacity.value
    outside = outside_bytes(software, cluster, table)
    extra = paged_states(scenario, plan, number), reserved_free_bytes(scenario, plan, number)
    sizes = outside, software, table, capacity, *extra
    return [first(shown_bytes(kind, parts, *sizes)) for kind in SHOWN]


def time_prediction(scenario: Scenario, plan: Plan, table: PredictionTable) -> TimePrediction:
    """Return the step time of a table's first plan, and the rates that follow from it."""
    step = float(table.step[0])
    parts = TimeParts(**{name: float(getattr(table.time, name)[0]) for name in TIME_PARTS})
    counted = counted_flops(scenario)
    tokens, mfu = throughput_of(scenario, plan, step, counted.flops)
    hfu = hardware_utilisation(mfu, float(parts.compute), float(parts.recompute))
    low, high = time_interval(scenario, step, hfu, float(parts.communication))
    return TimePrediction(
        step_seconds=step,
        low_seconds=low,
        high_seconds=high,
        parts=parts,
        slowest_stage=int(table.slowest_rank[0]),
        tokens_per_second=scenario.workload.tokens_per_step / step,
        tokens_per_second_per_gpu=tokens,
        mfu=mfu,
        hfu=hfu,
        utilisation_convention=counted.convention,
    )


def communication_prediction(
    scenario: Scenario, plan: Plan, ranges: Ranges
) -> tuple[Collective, ...]:
    """Return the collectives of every pipeline rank in one step."""
    return tuple(
        Collective(
            stage,
            axis,
            kind,
            count=round(float(traffic.count[0])),  # type: ignore[index]
            bytes=round(float(traffic.size[0])),  # type: ignore[index]
        )
        for stage, by_axis in enumerate(rank_communication(scenario, plan, ranges))
        for (axis, kind), traffic in sorted(by_axis.items())
        if float(traffic.count[0]) > 0  # type: ignore[index]
    )
