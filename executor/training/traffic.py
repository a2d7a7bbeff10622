"""Counted traffic of the ranks in a step, compared with the prediction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cost_models.communication.volumes import AXES, KINDS, rank_traffic
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import contents_of_rank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan_file import PlanFile
from cost_models.pricing.prediction import scenario_of
from executor.counters.collectives_and_flops import CommunicationCounter
from executor.data.batch import Batch
from executor.training.trainer import StepTotals, Trainer

Key = tuple[str, str]  # axis and kind


def counted_traffic(
    trainer: Trainer,
    batch: Batch,
    *also: AbstractContextManager[Any],
    inspect: Callable[[StepTotals], None] | None = None,
) -> list[dict[str, Any]]:
    """Count the collectives of one step; return counts and predictions of every rank.

    Not the first step, in which FSDP2 initialises itself. ``also``: further contexts around the
    step. ``inspect``: see ``Trainer.step``; no counter sees what it does.
    """

    def unseen(totals: StepTotals) -> None:
        if inspect is not None:
            with _disable_current_modes():
                inspect(totals)

    file, groups = trainer.file, trainer.grid.groups()
    with ExitStack() as watching, CommunicationCounter(groups) as counter:
        for other in also:
            watching.enter_context(other)
        trainer.step(batch, unseen)
    # where one axis spans all ranks, its group may be the world's
    world = groups["world"].group_name
    known = [axis for axis in AXES if axis in groups]
    world_axis = next((axis for axis in known if groups[axis].group_name == world), "world")
    keys = [(axis, kind) for axis in AXES for kind in KINDS]
    keys += sorted(set(counter.count) - set(keys))[:1] or [("other", "none")]
    own = [float(table[key]) for key in keys for table in (counter.count, counter.bytes)]
    sent = torch.tensor(own, dtype=torch.float64, device=trainer.device)
    every = [torch.empty_like(sent) for _ in range(file.plan.world_size)]
    dist.all_gather(every, sent)
    _average_all_to_all(every, keys, file.plan)
    rows = []
    for rank, numbers in enumerate(every):
        of_stage = file.plan.world_size // file.plan.pipeline_parallel
        pipeline_rank, place = divmod(rank, of_stage)
        predicted = predicted_traffic(file, pipeline_rank, world_axis)
        for key, (count, size) in zip(keys, numbers.view(-1, 2).tolist(), strict=True):
            expected_count, expected_size = predicted.get(key, (0.0, 0.0))
            if count or expected_count:
                rows.append(
                    {
                        "rank": rank,
                        "axis": key[0],
                        "kind": key[1],
                        "fullest": place == 0,  # first rank of its stage
                        "predicted_count": expected_count,
                        "counted_count": count,
                        "predicted_bytes": expected_size,
                        "counted_bytes": size,
                    }
                )
    return rows


def is_as_predicted(row: dict[str, Any]) -> bool:
    """Return whether a rank's traffic is as predicted (a bound except on the fullest rank)."""
    short = row["predicted_bytes"] - row["counted_bytes"]
    same_count = row["counted_count"] == row["predicted_count"]
    return bool(same_count and (short == 0 or (short > 0 and not row["fullest"])))


def _average_all_to_all(every: list[Tensor], keys: list[Key], plan: Plan) -> None:
    """Average the bytes of all_to_all over a stage: only their sum is predictable."""
    table = torch.stack(every).view(plan.pipeline_parallel, -1, len(keys), 2)
    for position, (_, kind) in enumerate(keys):
        if kind == "all_to_all":
            table[:, :, position, 1] = table[:, :, position, 1].mean(1, keepdim=True)
    every[:] = table.flatten(0, 1).flatten(1).unbind()


def predicted_traffic(
    file: PlanFile, pipeline_rank: int, world_axis: str = "world"
) -> dict[Key, tuple[float, float]]:
    """Return count and bytes of a rank's collectives by axis and kind."""
    plan = file.plan
    rank = contents_of_rank(
        file.model,
        file.layer_ranges,
        ranks_of_stages(plan),
        pipeline_rank,
        recomputed=file.recomputed,
    )
    found: dict[Key, tuple[float, float]] = {}
    table = PlanTable.from_plans([plan])
    for (axis, kind), traffic in rank_traffic(RankView(scenario_of(file), table, rank)).items():
        key = (world_axis if axis == "world" else axis, kind)
        count, size = found.get(key, (0.0, 0.0))
        found[key] = (count + _scalar(traffic.count), size + _scalar(traffic.size))
    return found


def _scalar(column: Any) -> float:
    """Return the value of a column with one row."""
    return float(column[0])
