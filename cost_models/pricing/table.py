"""Step, peak and host bytes of many plans: the formulas of ``estimate`` on distinct rows.

The formulas of one rank of a group of plans (``plan_groups``) see columns of distinct rows
(``columns``). The results equal those of ``estimate.price`` bit for bit, up to the order of
summation of the parts of the peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from cost_models.arrays import among, ascending, holds
from cost_models.columnar.columns import FactoredColumn, align, expand
from cost_models.columnar.dictionary_encoding import decode
from cost_models.columnar.largest_sums import MISSING, largest_sums
from cost_models.columnar.projections import Index, Projection
from cost_models.compute.kernel_launch import launch_wait
from cost_models.memory.allocator import free_bytes, free_shares
from cost_models.memory.host import HostBytes, rank_host_bytes
from cost_models.memory.ledger import total
from cost_models.memory.model_states import rank_weights
from cost_models.memory.optimizer_states import optimizer_rows
from cost_models.memory.outside_torch import outside_bytes
from cost_models.memory.peak import rank_ledger
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.plan.factored import distinct_plans
from cost_models.plan.plan import OFFLOADS, PlanTable
from cost_models.plan.recompute import NONE
from cost_models.pricing.estimate import (
    block_time,
    price,
    price_memory,
    seconds_by_pipeline,
    seconds_of,
)
from cost_models.pricing.plan_groups import PlanGroup, groups_of_plans, groups_of_ranks, ranks_of
from cost_models.pricing.rank_rows import formulas_of, joint_rank
from cost_models.pricing.step_bounds import step_times
from cost_models.scenario import ClusterColumns, Scenario
from cost_models.step_time.overlap import Hiding, exposed_data_seconds, least_message_share
from cost_models.step_time.parts import RankSeconds, TimeParts
from cost_models.step_time.pipeline_bound import balanced_bound, owners, pipeline_bound
from hardware_profiles.software.trainer import SoftwareProfile

Floats = NDArray[np.float64]
Ranks = Sequence[tuple[Any, RankSeconds]]  # how many of each kind in each row, and their seconds
ACTIVATIONS: Final = ("activations", "logits")  # they depend on other columns than model states
IN_CACHE: Final = 32_768  # passes of ranks whose pipelines are bounded together
LATE: Final = 1e-9  # seconds; waits for the host that are no longer are rounding
FEW: Final = 4_000  # plans for whose steps distinct rows are not worth finding
OF_MEMORY: Final = 3 / 8  # of FEW, for their memory: more of its terms depend on few columns


class PricedTable(Struct, frozen=True):
    """Step, peak and host bytes of plans, one row a plan."""

    step: Floats
    peak: Floats
    host: HostBytes


def price_table(scenario: Scenario, table: PlanTable) -> PricedTable:
    """Price legal plans."""
    if by_row(scenario, table):
        priced = price(scenario, table.plain())
        return PricedTable(priced.step, priced.peak, priced.host)
    return PricedTable(table_steps(scenario, table), *table_memory(scenario, table))


def table_memory(
    scenario: Scenario, table: PlanTable, enough: float = np.inf, *, exact_if_all: bool = True
) -> tuple[Floats, HostBytes]:
    """Return the peaks of legal plans, and their bytes on hosts.

    ``enough``: for a plan with more bytes in torch's allocator than that at some point, the result
    may come of those bytes instead of the peak, unless all plans have more (``exact_if_all``); if
    it offloads nothing, its ranks of further kinds are not priced.
    """
    if len(table) == 0:
        return np.zeros(0), HostBytes(np.zeros(0), np.zeros(0))
    if by_row(scenario, table, of_memory=True):
        peak, _, host = price_memory(scenario, table.plain())
        return peak, host
    used, outside, memory, nvme = (np.zeros(len(table)) for _ in range(4))
    moved = decode(table.offload) != OFFLOADS.index("none")  # every rank uses the host
    for rows, group in groups_of_ranks(
        scenario, table, lambda rows: (used[rows] <= enough) | moved[rows]
    ):
        found = _peaks(scenario, group, enough), *_hosts(scenario, group)
        for largest, mine in zip((used, memory, nvme), found, strict=True):
            np.maximum.at(largest, rows, mine)
        fixed = outside_bytes(scenario.software, scenario.cluster, group.table)
        outside[rows] = expand(fixed, len(group.plain))
        group.frame.release()
    if exact_if_all and used.min() > enough:
        return table_memory(scenario, table)
    return used + outside, HostBytes(memory, nvme)


def table_steps(scenario: Scenario, table: PlanTable) -> Floats:
    """Return the steps of legal plans."""
    if len(table) == 0:
        return np.zeros(0)
    if by_row(scenario, table):
        return step_times(scenario, table.plain())[0]
    step = np.empty(len(table))
    for rows, group in groups_of_plans(scenario, table):
        step[rows] = _steps(scenario, group)
        group.frame.release()
    return step


def table_steps_and_ends(scenario: Scenario, table: PlanTable) -> tuple[Floats, Floats]:
    """Return the steps of legal plans, and their seconds that follow or precede all passes."""
    if len(table) == 0:
        return np.zeros(0), np.zeros(0)
    if by_row(scenario, table):
        step, _, once = step_times(scenario, table.plain())
        return step, once
    step, once = np.empty(len(table)), np.empty(len(table))
    for rows, group in groups_of_plans(scenario, table):
        time, size = _time(scenario, group), len(group.plain)
        step[rows] = expand(time.step, size)
        once[rows] = expand(time.data_communication + time.optimizer, size)
        group.frame.release()
    return step, once


def table_least_steps(
    scenario: Scenario, table: PlanTable, limit: Floats | float = np.inf
) -> Floats:
    """Return lower bounds of the steps of legal plans that recompute all of their layers or fewer.

    The step without recomputation, which may only hide communication at its ends. ``limit``:
    seconds; steps that take longer may have a lower bound from there on.
    """
    none = dataclasses.replace(table, recompute=np.full_like(table.recompute, NONE))
    family, first = distinct_plans(none)
    step, once = (each[family] for each in table_steps_and_ends(scenario, none.rows(first)))
    rows = np.flatnonzero(step - once < limit)
    ends = np.zeros(len(table))
    ends[rows] = table_steps_and_ends(scenario, table.rows(rows))[1]
    least: Floats = step - np.maximum(0.0, once - ends)
    return least


def table_step_bounds(
    scenario: Scenario,
    table: PlanTable,
    number: Index | None = None,
    columns: Callable[[Projection, Index], ClusterColumns] | None = None,
) -> tuple[Floats, Floats]:
    """Return the first two columns of ``step_times``: steps of legal plans, and their lower bounds.

    ``number``: of each row's cluster; ``columns``: rates and links of the clusters, as columns of
    the projection to ``number``.
    """
    if number is None and by_row(scenario, table):
        return step_times(scenario, table.plain())[:2]
    seconds, least = np.empty(len(table)), np.empty(len(table))
    for rows, group in groups_of_plans(scenario, table, number):
        there = scenario
        if columns is not None and group.clusters is not None:
            there = dataclasses.replace(scenario, columns=columns(*group.clusters))
        seconds[rows], least[rows] = _steps_and_bounds(there, group)
        group.frame.release()
    return seconds, least


class BalancedSteps(Struct, frozen=True):
    """Lower bounds of the seconds of plans for every number of layers of each stage."""

    step: Floats
    whole: Floats  # both passes of a micro-batch, of all ranks together
    once: Floats  # once a step

    def rows(self, index: Index) -> BalancedSteps:
        """Return a selection of rows."""
        return BalancedSteps(*(bound[index] for bound in astuple(self)))


def table_balanced_steps(
    scenario: Scenario, table: PlanTable, most_stages: Index | None = None
) -> BalancedSteps:
    """Return lower bounds of legal plans for every number of layers of each stage.

    On accelerators; also for every number of recomputed layers if the table recomputes none.
    ``most_stages``: of a rank of each plan; None: one. All ranks together do the same work for each
    number of layers, and no less with more stages, but for messages that these hide
    (``least_message_share``). Waits for hosts are those of ``_least_host_waits``; waits for tokens
    of experts count only if all ranks wait, since a rank that does not could hide those of more
    layers. One rank has no fewer layers than in the even split: the shortest time once a step of
    any rank is added, less the forward passes in which recomputation may hide communication.
    """
    bounds = BalancedSteps(*(np.empty(len(table)) for _ in range(3)))
    if most_stages is not None:
        table = dataclasses.replace(table, virtual_stages=np.ones_like(most_stages))
    if by_row(scenario, table):
        for mine, positions, seconds in seconds_by_pipeline(scenario, table.plain()):
            few, numbers = table.rows(mine).plain(), map(len, positions)
            most = np.ones(len(mine)) if most_stages is None else most_stages[mine]
            alike = list(zip(numbers, seconds, strict=True))
            found = _balanced(scenario, few, alike, most)
            for bound, values in zip(astuple(bounds), found, strict=True):
                bound[mine] = values
        return bounds
    for rows, group in groups_of_plans(scenario, table, most_stages):
        stages: Any = np.ones(1) if group.clusters is None else FactoredColumn(*group.clusters)
        ranks = list(zip(group.numbers(), _seconds_of_ranks(scenario, group), strict=True))
        found = _balanced(scenario, group.table, ranks, stages)
        for bound, values in zip(astuple(bounds), found, strict=True):
            bound[rows] = expand(values, len(group.plain))
        group.frame.release()
    return bounds


def _balanced(
    scenario: Scenario, plans: PlanTable, ranks: Ranks, stages: Any
) -> tuple[Any, Any, Any]:
    """Return the columns of ``BalancedSteps``; ``ranks``: how many of each kind, their seconds."""
    looped = dataclasses.replace(plans, virtual_stages=stages)
    reduces = (plans.zero_stage >= 3) | (plans.pipeline_parallel == 1)
    hidden = np.where(reduces, 1.0 * plans.num_microbatches, 1.0)
    in_turn = np.minimum(plans.pipeline_parallel, plans.num_microbatches)
    hidden = np.where(stages > 1, np.maximum(hidden, in_turn), hidden)

    behind = 1.0 - least_message_share(scenario.software)
    works = [
        one.microbatch - one.host - one.expert_communication - behind * one.pipeline_communication
        for _, one in ranks
    ]
    whole = _sum(ranks, works)
    every = [one.expert_communication for _, one in ranks]
    whole = whole + np.where(_least(ranks, every) > 0.0, _sum(ranks, every), 0.0)
    whole = whole + _least_host_waits(scenario.software, plans, ranks)
    once, hiding = [], Hiding.of(scenario.software)
    for _, one in ranks:
        exposed = exposed_data_seconds(one, looped, hiding, on_gpu=True)
        once.append(np.maximum(0.0, exposed - hidden * one.forward_pass) + one.optimizer)
    forward = _least(ranks, [one.forward_pass / one.microbatch for _, one in ranks])
    least = _least(ranks, once)
    return balanced_bound(plans, whole, forward, stages) + least, whole, least


def _least_host_waits(software: SoftwareProfile, plans: PlanTable, ranks: Ranks) -> Any:
    """Return a lower bound of a micro-batch's waits for the host, of all ranks together.

    All ranks together launch and run the same for every number of layers of each stage, and wait
    no less than one rank that does it all (``launch_wait``). If every rank also waits for what
    is offloaded, the link to the host is always busy, and all waits count.
    """
    offloads = plans.offloads_activations | plans.offloads_weights
    wait = partial(launch_wait, adds=software.host.synchronous)
    launches = [zip(one.launches, one.queued, strict=True) for _, one in ranks]
    forward, backward = zip(*launches, strict=True)
    waits: Any = sum(
        wait(*(_sum(ranks, values) for values in zip(*passes, strict=True)))
        for passes in (forward, backward)
    )
    if not holds(offloads):
        return waits
    host = [one.host for _, one in ranks]
    offloaded = [
        seconds - wait(*ahead) - wait(*back)
        for seconds, ahead, back in zip(host, forward, backward, strict=True)
    ]
    return np.where(offloads & (_least(ranks, offloaded) > LATE), _sum(ranks, host), waits)


def _sum(ranks: Ranks, values: Sequence[Any]) -> Any:
    return reduce(np.add, [n * value for (n, _), value in zip(ranks, values, strict=True)])


def _least(ranks: Ranks, values: Sequence[Any]) -> Any:
    present = zip(ranks, values, strict=True)
    return reduce(np.minimum, [np.where(n > 0, value, np.inf) for (n, _), value in present])


def table_least_states(scenario: Scenario, table: PlanTable) -> Floats:
    """Return lower bounds of the peaks of plans with any layers of each stage, in bytes.

    Of plans that offload nothing, on accelerators, for every recomputation and number of stages on
    a rank; 0 for others. All ranks together have the same weights and optimizer states for each
    number of layers, and one rank has no fewer than all on average.
    """
    found = np.zeros(len(table))
    for rows, group in groups_of_plans(scenario, table):
        plans, kept = group.table, outside_bytes(scenario.software, scenario.cluster, group.table)
        for number, rank in zip(group.numbers(), group.ranks, strict=True):
            view = RankView(scenario, plans, rank)
            held = [row for row in (*rank_weights(view), *optimizer_rows(view)) if row.persists]
            kept = kept + number * total(held) / plans.pipeline_parallel
        kept = np.where(plans.offload == OFFLOADS.index("none"), kept, 0.0)
        found[rows] = expand(kept, len(group.plain))
        group.frame.release()
    return found


def by_row(scenario: Scenario, table: PlanTable, *, of_memory: bool = False) -> bool:
    """Whether plans are priced row by row, without finding distinct rows."""
    return not scenario.on_gpu or len(table) < FEW * (OF_MEMORY if of_memory else 1.0)


def _steps(scenario: Scenario, group: PlanGroup) -> Floats:
    return expand(_time(scenario, group).step, len(group.plain))


def _steps_and_bounds(scenario: Scenario, group: PlanGroup) -> tuple[Floats, Floats]:
    """Return steps, and steps without the bubbles of schedules that split the backward pass."""
    time, size = _time(scenario, group), len(group.plain)
    splits = among(group.table.pipeline_schedule, SPLIT_CODES)
    step = time.step
    return expand(step, size), expand(np.where(splits, step - time.bubble, step), size)


def _time(scenario: Scenario, group: PlanGroup) -> TimeParts:
    seconds = [
        _where_present(group, slot, rank)
        for slot, rank in zip(group.slots, _seconds_of_ranks(scenario, group), strict=True)
    ]
    positions = [rank.positions for rank in group.ranks]
    time, _ = block_time(scenario, group.table, positions, seconds, _bound(group, seconds))
    return time


def _seconds_of_ranks(scenario: Scenario, group: PlanGroup) -> list[RankSeconds]:
    """Return the seconds of each of the group's ranks; of those with the same formulas at once."""
    of_slots = [ranks_of(group.contents, slot) for slot in group.slots]
    alike: dict[Any, list[int]] = {}
    for number, (rank, *_) in enumerate(of_slots):
        alike.setdefault(formulas_of(rank), []).append(number)
    found: dict[int, RankSeconds] = {}
    for numbers in alike.values():
        ranks = [rank for number in numbers for rank in of_slots[number]]
        rank = joint_rank(ranks, partial(_column_of_ranks, group, len(numbers)))
        seconds = astuple(seconds_of(RankView(scenario, group.table, rank)))
        for place, number in enumerate(numbers):
            found[number] = RankSeconds(*(_of_rank(value, place) for value in seconds))
    return [found[number] for number in range(len(of_slots))]


def _column_of_ranks(group: PlanGroup, times: int, values: Sequence[Any]) -> FactoredColumn:
    """Return a column of repeated rows, one repetition for each rank.

    ``values``: of each rank in each block.
    """
    by_rank = np.array(values).reshape(times, -1)
    blocks = group.frame.project(0) if by_rank.shape[1] == 1 else group.block.projection
    if (by_rank == by_rank[0]).all():
        return FactoredColumn(blocks, by_rank[0])
    if (by_rank == by_rank[:, :1]).all():
        return FactoredColumn(group.frame.project(0).repeated(times), by_rank[:, 0])
    return FactoredColumn(blocks.repeated(times), by_rank.ravel())


def _of_rank(value: Any, number: int) -> Any:
    return value.repetition(number) if type(value) is FactoredColumn else value


def _where_present(
    group: PlanGroup, slot: Sequence[int | None], seconds: RankSeconds
) -> RankSeconds:
    """Return the seconds of a rank; 0 in blocks without it, so that it is never the slowest."""
    present = np.array([index is not None for index in slot])
    if present.all():
        return seconds
    exists = group.of_block(present.tolist())
    return RankSeconds(*(np.where(exists, value, 0) for value in astuple(seconds)))


def _bound(group: PlanGroup, seconds: list[RankSeconds]) -> Any:
    """Return ``pipeline_bound`` of the distinct rows of its arguments."""
    names = ("forward_pass", "backward_pass", "weights")
    passes = [getattr(rank, name) for name in names for rank in seconds]
    table = group.table
    projection, (*values, _, _, block) = align(
        group.frame, [*passes, table.pipeline_schedule, table.num_microbatches, group.block]
    )
    stacked, found = np.stack(values), np.empty(projection.size)
    slots = [_slots_of_ranks(group, number) for number in range(len(group.contents))]
    depth = np.array([len(each) for each in slots])
    first = len(seconds) * np.arange(len(names))[:, None, None]  # row of each name's first slot
    for pipeline in ascending(depth).tolist():
        mine = np.flatnonzero(depth == pipeline)
        owner = np.zeros((pipeline, len(slots)), dtype=np.intp)
        owner[:, mine] = np.stack([slots[number] for number in mine], axis=1)
        rows = np.flatnonzero(depth[block] == pipeline)
        for some in np.array_split(rows, -(-len(rows) * pipeline // IN_CACHE)):
            few = group.plain.rows(projection.rows[some]).plain()
            found[some] = pipeline_bound(few, *stacked[first + owner[:, block[some]], some])
    return FactoredColumn(projection, found)


def _slots_of_ranks(group: PlanGroup, number: int) -> Index:
    """Return the slot of each pipeline rank of a block."""
    slot_of = {slot[number]: position for position, slot in reversed(list(enumerate(group.slots)))}
    contents = owners([rank.positions for rank in group.contents[number]])
    return np.array([slot_of[each] for each in contents.tolist()])


def _peaks(scenario: Scenario, group: PlanGroup, enough: float = np.inf) -> Floats:
    """Return the largest bytes of any rank at any point of a step, or some above ``enough``.

    Of tensors, and of the free blocks that they need.
    """
    free = 1.0 + free_shares(scenario.software, group.table).needed
    of_gradients = 1.0 + free_bytes(scenario.software, group.table, 1.0, 0.0)
    # bytes as sums of two columns, since many points of many ranks share one of them
    firsts: dict[tuple[int, int], Any] = {}
    seconds: dict[int, Any] = {}
    for rank in group.memory_ranks:
        ledger = rank_ledger(RankView(scenario, group.table, rank))
        known: dict[tuple[int, ...], Any] = {}
        for moment, points in enumerate(ledger.points):
            live = ledger.live(moment)
            states = total(ledger.kept())
            changing = [row for row in live if row.part != "buffers" and not row.persists]
            if changing:
                states = states + free * total(changing)
            constant = [row for row in live if row.part == "buffers"]
            for point in points:
                if not np.any(point.exists):
                    continue
                own = [row for row in point.rows if row.part not in ACTIVATIONS]
                gradients = total(row for row in own if row.part == "gradients")
                rest = total(row for row in own if row.part != "gradients")
                one = states + (of_gradients * gradients + free * rest)
                if point.exists is not True:
                    one = np.where(point.exists, one, MISSING)
                rows = [*(row for row in point.rows if row.part in ACTIVATIONS), *constant]
                key = tuple(id(row.size) for row in rows)
                if key not in known:
                    known[key] = free * total(rows)
                other = known[key]
                seconds[id(other)] = other
                firsts[id(one), id(other)] = one
    position = {name: number for number, name in enumerate(seconds)}
    partners = [position[second] for _, second in firsts]
    return largest_sums(
        group.frame, list(firsts.values()), list(seconds.values()), partners, enough
    )


def _hosts(scenario: Scenario, group: PlanGroup) -> tuple[Floats, Floats]:
    """Return the bytes of a node of each plan in host memory and on drives."""
    gpus = scenario.cluster.gpus_per_node
    hosts = [
        rank_host_bytes(RankView(scenario, group.table, rank)).of_node(group.table, gpus)
        for rank in group.memory_ranks
    ]
    size = len(group.plain)

    def largest(name: str) -> Floats:
        parts = np.stack([getattr(host, name) for host in hosts])
        return expand(np.max(parts, axis=0), size)

    return largest("memory"), largest("nvme")
