"""Predicted memory and time of a table of plans, from all formulas.

``fit`` prints the result of ``price`` for one plan; the search ranks a million plans by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import asdict, astuple, replace
from numpy.typing import NDArray

from cost_models.arrays import Real
from cost_models.communication.host_link import host_link, paged_seconds, usable_bytes
from cost_models.communication.traffic import Traffic
from cost_models.communication.volumes import rank_traffic
from cost_models.compute.rates import training_rates
from cost_models.memory.host import HostBytes, rank_host_bytes
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS, paged_bytes
from cost_models.memory.parts import MemoryParts, stack_ranks
from cost_models.memory.peak import rank_memory, stream_free_bytes
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank, stages_of
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.rank_rows import RankRows, fullest_ranks, joined, of_ranks
from cost_models.pricing.utilisation import counted_flops, peak_flops
from cost_models.scenario import Scenario
from cost_models.step_time.overlap import Hiding
from cost_models.step_time.parts import RankSeconds, TimeParts
from cost_models.step_time.rank_time import rank_seconds
from cost_models.step_time.step import step_seconds

Floats = NDArray[np.float64]
RankMemory = tuple[MemoryParts, int]  # and the moment of its peak


class PredictionTable(Struct, frozen=True):
    """Memory and time of legal plans: columns, one row a plan."""

    memory: MemoryParts
    limiting_rank: NDArray[np.int64]  # first pipeline rank with the largest peak
    moment: NDArray[np.int64]  # index into memory.MOMENTS
    typical_peak: Floats  # bytes, with the free blocks that a run typically needs
    time: TimeParts
    slowest_rank: NDArray[np.int64]
    host: HostBytes  # of a node

    @property
    def peak(self) -> Floats:
        """Bytes in use at the peak, on the rank with the largest peak; cautious (``allocator``)."""
        return np.asarray(self.memory.peak, dtype=float)

    @property
    def step(self) -> Floats:
        """Seconds of a step."""
        return np.asarray(self.time.step, dtype=float)

    def row(self, number: int) -> PredictionTable:
        """Return the prices of one plan."""
        here = slice(number, number + 1)

        def of(parts: Any) -> Any:
            return replace(parts, **{name: value[here] for name, value in asdict(parts).items()})

        at = self.limiting_rank[here], self.moment[here], self.typical_peak[here]
        time = of(self.time), self.slowest_rank[here]
        return PredictionTable(of(self.memory), *at, *time, of(self.host))


def price(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> PredictionTable:
    """Return the predictions of legal plans.

    Stages: ``layer_ranges``, else those of the scenario, else even ones.
    """
    return _price(scenario, table, layer_ranges, [])[0]


def price_with_ranks(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> tuple[PredictionTable, list[list[RankMemory]], list[PipelineSeconds]]:
    """Return ``price``, ``memories_by_rank``, and the seconds of ranks with the same contents."""
    every = _every_rank(scenario, table, layer_ranges)
    priced, memories, seconds = _price(scenario, table, layer_ranges, every)
    return priced, _by_plan(table, every, memories), seconds


def _price(
    scenario: Scenario,
    table: PlanTable,
    layer_ranges: Sequence[tuple[int, int]] | None,
    others: Sequence[RankRows],
) -> tuple[PredictionTable, list[_PeakAndHost], list[PipelineSeconds]]:
    """Return predictions of plans, the memory of other ranks, and the seconds of all ranks."""
    blocks = _blocks(scenario, table, layer_ranges)
    in_memory = [fullest_ranks(ranks, table.rows(rows)) for rows, ranks in blocks]
    pairs = [
        (rows, rank) for (rows, _), ranks in zip(blocks, in_memory, strict=True) for rank in ranks
    ]
    memories = of_ranks(scenario, table, [*pairs, *others], _memory_of)
    of_time = [(rows, rank) for rows, ranks in blocks for rank in ranks]
    each_memory = iter(memories)
    found_seconds = iter(of_ranks(scenario, table, of_time, seconds_of))
    each_seconds = [list(islice(found_seconds, len(ranks))) for _, ranks in blocks]
    priced = [
        _price_block(
            scenario,
            table.rows(rows),
            (ranks, seconds),
            (full, list(islice(each_memory, len(full)))),
        )
        for (rows, ranks), full, seconds in zip(blocks, in_memory, each_seconds, strict=True)
    ]
    back = np.argsort(np.concatenate([rows for rows, _ in blocks]), kind="stable")

    def join(columns: list[Any]) -> NDArray[Any]:
        joined: NDArray[Any] = np.concatenate([np.asarray(column) for column in columns])[back]
        return joined

    found = PredictionTable(
        memory=MemoryParts(
            **{
                name: join([getattr(b.memory, name) for b in priced])
                for name in MemoryParts.__struct_fields__
            }
        ),
        limiting_rank=join([b.limiting_rank for b in priced]).astype(np.int64),
        moment=join([b.moment for b in priced]).astype(np.int64),
        typical_peak=join([b.typical_peak for b in priced]),
        time=TimeParts(
            **{
                name: join([getattr(b.time, name) for b in priced])
                for name in TimeParts.__struct_fields__
            }
        ),
        slowest_rank=join([b.slowest_rank for b in priced]).astype(np.int64),
        host=HostBytes(join([b.host.memory for b in priced]), join([b.host.nvme for b in priced])),
    )
    by_pipeline = [
        (rows, tuple(rank.positions for rank in ranks), seconds)
        for (rows, ranks), seconds in zip(blocks, each_seconds, strict=True)
    ]
    return found, memories[len(pairs) :], by_pipeline


Positions = tuple[tuple[int, ...], ...]  # for each of the distinct ranks, those it stands for
PipelineSeconds = tuple[NDArray[np.intp], Positions, list[RankSeconds]]  # of rows, by rank
Block = tuple[NDArray[np.intp], Sequence[PipelineRank]]  # rows with the same stages, their ranks


def _blocks(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> list[Block]:
    group, contents = stages_of(scenario, table, layer_ranges)
    return [(np.flatnonzero(group == number), ranks) for number, ranks in enumerate(contents)]


def price_memory(scenario: Scenario, table: PlanTable) -> tuple[Floats, Floats, HostBytes]:
    """Return the largest peak of each legal plan's ranks, the typical one, and a host's bytes.

    The same figures as ``price`` without the time of a step. Stages: those of the scenario, else
    even ones.
    """
    columns = peak, typical, memory, nvme = tuple(np.zeros(len(table)) for _ in range(4))
    pairs = [
        (rows, rank)
        for rows, ranks in _blocks(scenario, table)
        for rank in fullest_ranks(ranks, table.rows(rows))
    ]
    found = of_ranks(scenario, table, pairs, _memory_of)
    for (rows, _), one in zip(pairs, found, strict=True):
        of_rank = one.peak, one.typical, one.host, one.nvme
        for largest, mine in zip(columns, of_rank, strict=True):
            largest[rows] = np.maximum(largest[rows], mine)
    return peak, typical, HostBytes(memory, nvme)


class _PeakAndHost(MemoryParts, frozen=True):
    """Memory of one rank: parts and moment of the peak, and bytes of a node off the device."""

    moment: Real
    typical: Real  # bytes of the typical peak
    host: Real
    nvme: Real


def _memory_of(view: RankView) -> _PeakAndHost:
    parts, moment, typical = rank_memory(view)
    host = rank_host_bytes(view).of_node(view.table, view.cluster.gpus_per_node)
    at_peak = {**asdict(parts), "moment": moment, "typical": typical}
    return _PeakAndHost(**at_peak, host=host.memory, nvme=host.nvme)


def _price_block(
    scenario: Scenario,
    table: PlanTable,
    by_time: tuple[Sequence[PipelineRank], Sequence[RankSeconds]],
    by_memory: tuple[Sequence[PipelineRank], Sequence[_PeakAndHost]],
) -> PredictionTable:
    """Price plans of the same stages: their number, positions and recomputed layers."""
    ranks, seconds = by_time
    full, memories = by_memory
    memory, limiting, moment = stack_ranks([(each, each.moment) for each in memories])
    typical, of_host, nvme = (
        np.max(np.stack([getattr(each, name) for each in memories]), axis=0)
        for name in ("typical", "host", "nvme")
    )
    time, slowest = block_time(scenario, table, [rank.positions for rank in ranks], seconds)
    indexes = np.stack([np.broadcast_to(rank.index, len(table)) for rank in full])
    limiting_index = indexes[np.asarray(limiting), np.arange(len(table))]
    slowest_index = np.array([rank.index for rank in ranks])[np.asarray(slowest)]
    at = limiting_index, np.asarray(moment), typical
    return PredictionTable(memory, *at, time, slowest_index, HostBytes(of_host, nvme))


def seconds_by_pipeline(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> Iterator[PipelineSeconds]:
    """Yield rows with the same pipeline, the positions of its ranks, and the seconds of each.

    The contents of the ranks may differ between the rows.
    """
    pipelines: dict[Positions, list[Block]] = {}
    for rows, ranks in _blocks(scenario, table, layer_ranges):
        positions = tuple(rank.positions for rank in ranks)
        pipelines.setdefault(positions, []).append((rows, ranks))
    pairs = [
        (rows, ranks[place])
        for positions, blocks in pipelines.items()
        for place in range(len(positions))
        for rows, ranks in blocks
    ]
    found = iter(of_ranks(scenario, table, pairs, seconds_of))
    for positions, blocks in pipelines.items():
        each = [joined(list(islice(found, len(blocks)))) for _ in positions]
        yield np.concatenate([rows for rows, _ in blocks]), positions, each


def seconds_of(view: RankView) -> RankSeconds:
    """Return the seconds of a rank."""
    scenario, columns = view.scenario, view.scenario.columns
    cluster, precision = scenario.cluster, scenario.workload.precision
    rate = (
        training_rates(cluster.accelerator, precision, scenario.software, cluster.num_gpus)
        if columns is None
        else columns.rates
    )
    seconds = rank_seconds(view, rate)
    if not (scenario.on_gpu and OPTIMIZER_TRAITS[scenario.workload.optimizer].paged):
        return seconds
    return structs.replace(seconds, optimizer=seconds.optimizer + _paged_seconds(view))


def _paged_seconds(view: RankView) -> Real:
    """Seconds of moving paged optimizer states that do not fit on the device."""
    paged = paged_bytes(view)
    memory, *_ = rank_memory(view)
    link = host_link(view.cluster, view.table, view.software)
    return paged_seconds(paged, memory.peak, usable_bytes(view.cluster.accelerator), link)


def block_time(
    scenario: Scenario,
    table: PlanTable,
    positions: Sequence[Sequence[int]],
    seconds: Sequence[RankSeconds],
    bound: Real | None = None,
) -> tuple[TimeParts, Real]:
    """Return the parts of a step of plans of the same stages, and the index of the slowest rank.

    ``bound``: seconds of the pipeline; None: their lower bound in closed form.
    """
    return step_seconds(
        seconds,
        positions,
        table,
        Hiding.of(scenario.software),
        on_gpu=scenario.on_gpu,
        core_share=scenario.core_share,
        bound=bound,
    )


def rank_memories(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]]
) -> list[RankMemory]:
    """Return the memory of every pipeline rank of one plan."""
    (found,) = memories_by_rank(scenario, PlanTable.from_plans([plan]), layer_ranges)
    return found


def paged_states(scenario: Scenario, plan: Plan, number: int) -> Real:
    """Return the bytes of a pipeline rank's paged optimizer states, with default stages."""
    return paged_bytes(_default_rank(scenario, plan, number))


def reserved_free_bytes(scenario: Scenario, plan: Plan, number: int) -> Real | None:
    """Return ``stream_free_bytes`` of a pipeline rank, with default stages."""
    return stream_free_bytes(_default_rank(scenario, plan, number))


def _default_rank(scenario: Scenario, plan: Plan, number: int) -> RankView:
    rank = pipeline_rank(scenario, plan, default_layer_ranges(scenario, plan), number)
    return RankView(scenario, PlanTable.from_plans([plan]), rank)


def memories_by_rank(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> list[list[RankMemory]]:
    """Return the memory of every pipeline rank of every plan; stages as in ``price``."""
    every = _every_rank(scenario, table, layer_ranges)
    return _by_plan(table, every, of_ranks(scenario, table, every, _memory_of))


def _every_rank(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None
) -> list[RankRows]:
    """Return every pipeline rank, in order, with the rows of its plans."""
    found = []
    for rows, _ in _blocks(scenario, table, layer_ranges):
        plan = table.plan(int(rows[0]))
        ranges = layer_ranges or default_layer_ranges(scenario, plan)
        for rank in range(plan.pipeline_parallel):
            found.append((rows, pipeline_rank(scenario, plan, ranges, rank)))
    return found


def _by_plan(
    table: PlanTable, ranks: Sequence[RankRows], memories: Sequence[_PeakAndHost]
) -> list[list[RankMemory]]:
    answers: list[list[RankMemory]] = [[] for _ in range(len(table))]
    for (rows, _), memory in zip(ranks, memories, strict=True):
        by_plan = zip(*(np.asarray(column).tolist() for column in astuple(memory)), strict=True)
        for row, (*terms, at, _, _, _) in zip(rows.tolist(), by_plan, strict=True):
            answers[row].append((MemoryParts(*terms), at))
    return answers


def rank_communication(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]]
) -> list[dict[tuple[str, str], Traffic]]:
    """Return the traffic of every pipeline rank of one plan in one step, by axis and kind."""
    table = PlanTable.from_plans([plan])
    return [
        rank_traffic(RankView(scenario, table, pipeline_rank(scenario, plan, layer_ranges, rank)))
        for rank in range(plan.pipeline_parallel)
    ]


def throughput(scenario: Scenario, plan: Plan, step: float) -> tuple[float, float | None]:
    """Return tokens/s per accelerator and the model FLOP utilisation (of the datasheet's peak)."""
    return throughput_of(scenario, plan, step, counted_flops(scenario).flops)


def throughput_of(
    scenario: Scenario, plan: Plan, step: float, flops: float
) -> tuple[float, float | None]:
    """Return ``throughput`` of the counted FLOP of a step."""
    tokens = scenario.workload.tokens_per_step / plan.world_size / step
    peak = peak_flops(scenario)
    mfu = None if peak is None else flops / (step * plan.world_size * peak)
    return tokens, mfu
