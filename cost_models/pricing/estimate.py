"""Predicted memory and time of a table of plans, from all formulas.

``fit`` prints the result of ``price`` for one plan; the search ranks a million plans by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import asdict, astuple, replace
from numpy.typing import NDArray

from cost_models.arrays import Real
from cost_models.communication.host_link import host_link, paged_seconds, usable_bytes
from cost_models.communication.traffic import Traffic
from cost_models.communication.volumes import rank_traffic
from cost_models.compute.rates import rates
from cost_models.memory.host import HostBytes
from cost_models.memory.optimizer_states import OPTIMIZER_TRAITS, rank_states
from cost_models.memory.parts import MemoryParts, stack_ranks
from cost_models.memory.peak import rank_host_bytes, rank_memory
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank, stages_of
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.stages import (
    PipelineRank,
)
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.utilisation import counted_flops, peak_flops
from cost_models.scenario import Scenario
from cost_models.step_time.overlap import Hiding
from cost_models.step_time.parts import RankSeconds, TimeParts
from cost_models.step_time.rank_time import rank_seconds
from cost_models.step_time.step import step_seconds

Floats = NDArray[np.float64]


class PredictionTable(Struct, frozen=True):
    """Memory and time of legal plans: columns, one row a plan."""

    memory: MemoryParts
    limiting_rank: NDArray[np.int64]  # first pipeline rank with the largest peak
    moment: NDArray[np.int64]  # index into memory.MOMENTS
    time: TimeParts
    slowest_rank: NDArray[np.int64]
    host: HostBytes  # of a node

    @property
    def peak(self) -> Floats:
        """Bytes in use at the peak, on the rank with the largest peak."""
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

        ranks = self.limiting_rank[here], self.moment[here], of(self.time), self.slowest_rank[here]
        return PredictionTable(of(self.memory), *ranks, of(self.host))


def price(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> PredictionTable:
    """Return the predictions of legal plans.

    Stages: ``layer_ranges``, else those of the scenario, else even ones.
    """
    blocks = []
    order = []
    group, contents = stages_of(scenario, table, layer_ranges)
    for position, ranks in enumerate(contents):
        rows = np.flatnonzero(group == position)
        blocks.append(_price_block(scenario, table.rows(rows), ranks))
        order.append(rows)
    back = np.argsort(np.concatenate(order), kind="stable")

    def join(columns: list[Any]) -> NDArray[Any]:
        joined: NDArray[Any] = np.concatenate([np.asarray(column) for column in columns])[back]
        return joined

    return PredictionTable(
        memory=MemoryParts(
            **{
                name: join([getattr(b.memory, name) for b in blocks])
                for name in MemoryParts.__struct_fields__
            }
        ),
        limiting_rank=join([b.limiting_rank for b in blocks]).astype(np.int64),
        moment=join([b.moment for b in blocks]).astype(np.int64),
        time=TimeParts(
            **{
                name: join([getattr(b.time, name) for b in blocks])
                for name in TimeParts.__struct_fields__
            }
        ),
        slowest_rank=join([b.slowest_rank for b in blocks]).astype(np.int64),
        host=HostBytes(join([b.host.memory for b in blocks]), join([b.host.nvme for b in blocks])),
    )


def price_memory(scenario: Scenario, table: PlanTable) -> tuple[NDArray[Any], HostBytes]:
    """Return the largest peak of each legal plan's ranks, and the bytes of a node's host.

    The same figures as ``price`` without the time of a step. Stages: those of the scenario, else
    even ones.
    """
    peak, memory, nvme = (np.zeros(len(table)) for _ in range(3))
    group, contents = stages_of(scenario, table, None)
    for position, ranks in enumerate(contents):
        rows = np.flatnonzero(group == position)
        parts, _, _, host = _block_memory(scenario, table.rows(rows), ranks)
        peak[rows], memory[rows], nvme[rows] = parts.peak, host.memory, host.nvme
    return peak, HostBytes(memory, nvme)


def _block_memory(
    scenario: Scenario, table: PlanTable, ranks: Sequence[PipelineRank]
) -> tuple[MemoryParts, NDArray[np.int64], NDArray[np.int64], HostBytes]:
    """Return the memory of the rank with the largest peak, the rank, its moment, the host bytes."""
    priced = list(ranks)
    if np.isin(table.pipeline_schedule, SPLIT_CODES).any():
        # of ranks with the same contents the last one has the most pending weight gradients
        priced += [structs.replace(r, index=r.last_index) for r in ranks if r.last_index > r.index]
    views = [RankView(scenario, table, rank) for rank in priced]
    memory, limiting, moment = stack_ranks([rank_memory(view) for view in views])
    gpus = scenario.cluster.gpus_per_node
    hosts = [rank_host_bytes(view).of_node(table, gpus) for view in views]
    host = HostBytes(
        np.max(np.stack([h.memory for h in hosts]), axis=0),
        np.max(np.stack([h.nvme for h in hosts]), axis=0),
    )
    limiting_index = np.array([rank.index for rank in priced])[np.asarray(limiting)]
    return memory, limiting_index, np.asarray(moment), host


def _price_block(
    scenario: Scenario, table: PlanTable, ranks: Sequence[PipelineRank]
) -> PredictionTable:
    """Price plans of the same stages: their number, positions and recomputed layers."""
    memory, limiting, moment, host = _block_memory(scenario, table, ranks)
    time, slowest = block_time(scenario, table, ranks, block_seconds(scenario, table, ranks))
    slowest_index = np.array([rank.index for rank in ranks])[np.asarray(slowest)]
    return PredictionTable(memory, limiting, moment, time, slowest_index, host)


def block_seconds(
    scenario: Scenario, table: PlanTable, ranks: Sequence[PipelineRank]
) -> list[RankSeconds]:
    """Return the seconds of every rank under plans of the same stages."""
    columns = scenario.columns
    rate = (
        rates(scenario.cluster.accelerator, scenario.workload.precision, scenario.software)
        if columns is None
        else columns.rates
    )
    views = [RankView(scenario, table, rank) for rank in ranks]
    seconds = [rank_seconds(view, rate) for view in views]
    if not (scenario.on_gpu and OPTIMIZER_TRAITS[scenario.workload.optimizer].paged):
        return seconds
    return [
        structs.replace(one, optimizer=one.optimizer + _paged_seconds(view))
        for one, view in zip(seconds, views, strict=True)
    ]


def _paged_seconds(view: RankView) -> Real:
    """Seconds of moving paged optimizer states that do not fit on the device."""
    paged = np.where(view.table.offloads_optimizer, 0.0, rank_states(view).paged)
    memory, _ = rank_memory(view)
    link = host_link(view.cluster, view.table, view.software)
    return paged_seconds(paged, memory.peak, usable_bytes(view.cluster.accelerator), link)


def block_time(
    scenario: Scenario,
    table: PlanTable,
    ranks: Sequence[PipelineRank],
    seconds: Sequence[RankSeconds],
    bound: Real | None = None,
) -> tuple[TimeParts, Real]:
    """Return the parts of a step of plans of the same stages, and the index of the slowest rank.

    ``bound``: seconds of the pipeline; None: their lower bound in closed form.
    """
    return step_seconds(
        seconds,
        [rank.positions for rank in ranks],
        table,
        Hiding.of(scenario.software),
        on_gpu=scenario.on_gpu,
        core_share=scenario.core_share,
        bound=bound,
    )


RankMemory = tuple[MemoryParts, int]  # and the moment of its peak


def rank_memories(
    scenario: Scenario, plan: Plan, layer_ranges: Sequence[tuple[int, int]]
) -> list[RankMemory]:
    """Return the memory of every pipeline rank of one plan."""
    (found,) = memories_by_rank(scenario, PlanTable.from_plans([plan]), layer_ranges)
    return found


def memories_by_rank(
    scenario: Scenario, table: PlanTable, layer_ranges: Sequence[tuple[int, int]] | None = None
) -> list[list[RankMemory]]:
    """Return the memory of every pipeline rank of every plan; stages as in ``price``."""
    answers: list[list[RankMemory]] = [[] for _ in range(len(table))]
    group, blocks = stages_of(scenario, table, layer_ranges)
    for number in range(len(blocks)):
        rows = np.flatnonzero(group == number)
        few, plan = table.rows(rows), table.plan(int(rows[0]))
        ranges = layer_ranges or default_layer_ranges(scenario, plan)
        for rank in range(plan.pipeline_parallel):
            parts, moment = rank_memory(
                RankView(scenario, few, pipeline_rank(scenario, plan, ranges, rank))
            )
            columns = (*astuple(parts), moment)
            by_plan = zip(*(np.broadcast_to(c, len(rows)).tolist() for c in columns), strict=True)
            for row, (*terms, at) in zip(rows.tolist(), by_plan, strict=True):
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
    tokens = scenario.workload.tokens_per_step / plan.world_size / step
    peak = peak_flops(scenario)
    flops = counted_flops(scenario).flops
    mfu = None if peak is None else flops / (step * plan.world_size * peak)
    return tokens, mfu
