"""Step times of a table of plans without their memory: what a changed rate or link asks for.

The formulas are those of ``estimate.price``; a test holds both to the same seconds.
"""

from __future__ import annotations

import numpy as np

from cost_models.estimate import Floats, Setting
from cost_models.plan import PlanTable
from cost_models.rates import rates
from cost_models.recomputed import Recomputed
from cost_models.schedules import SPLIT_CODES, V_CODES
from cost_models.stages import even_rank_contents, rank_contents
from cost_models.step_time import Hiding, TimeParts, rank_seconds, step_seconds


def step_times(setting: Setting, table: PlanTable) -> tuple[Floats, Floats]:
    """Return seconds of a step of every legal plan, and what they are at least on faster machines.

    Stages: those of the setting, else even ones. A faster machine shortens what every plan
    computes, waits for and sends. It may lengthen the bubble of a schedule that splits the backward
    pass, where weight gradients become shorter than what they fill: their bubble is not counted in
    the second column, which therefore never grows as a rate does.
    """
    v_shaped = np.isin(table.pipeline_schedule, V_CODES)
    columns = (
        table.pipeline_parallel,
        table.virtual_stages,
        v_shaped,
        table.recompute_layers,
        table.recompute_every,
    )
    keys, group = np.unique(np.stack(columns).astype(np.int64), axis=1, return_inverse=True)
    seconds, least = np.empty(len(table)), np.empty(len(table))
    for position, key in enumerate(keys.T.tolist()):
        rows = np.flatnonzero(np.ravel(group) == position)
        parts = _of_block(setting, table.rows(rows), *key)
        splits = np.isin(table.pipeline_schedule[rows], SPLIT_CODES)
        seconds[rows] = parts.step
        least[rows] = np.where(splits, parts.step - parts.bubble, parts.step)
    return seconds, least


def _of_block(
    setting: Setting, table: PlanTable, pipeline: int, virtual: int, v: int, layers: int, every: int
) -> TimeParts:
    """Price plans of the same stages."""
    model, workload, software = setting.model, setting.workload, setting.software
    recomputed = Recomputed(layers, every, setting.stage_recompute_layers)
    pinned = setting.pinned_stages(pipeline * virtual)
    if pinned is None:
        ranks = list(
            even_rank_contents(model, pipeline, virtual, v_shaped=bool(v), recomputed=recomputed)
        )
    else:
        ranks = rank_contents(model, pinned, pipeline, v_shaped=bool(v), recomputed=recomputed)
    rate = rates(setting.cluster.accelerator, workload.precision, software)
    parts, _ = step_seconds(
        [
            rank_seconds(model, workload, setting.cluster, software, rate, table, rank)
            for rank in ranks
        ],
        [rank.positions for rank in ranks],
        table,
        Hiding.of(software),
        on_gpu=setting.on_gpu,
        core_share=setting.core_share,
    )
    return parts
