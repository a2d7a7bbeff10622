"""Seconds of a step whose pipeline is simulated action by action, of one plan.

All else is as in the closed form (``estimate.price``), of which the bubble is a lower bound.
"""

from __future__ import annotations

import numpy as np

from cost_models.estimate import Setting, stages_of
from cost_models.pipeline_time import makespan
from cost_models.plan import Plan, PlanTable
from cost_models.rates import rates
from cost_models.schedules import stages_of_rank
from cost_models.step_time import owners, rank_seconds, step_seconds


def simulated_step(setting: Setting, plan: Plan, known: dict[object, float] | None = None) -> float:
    """Return the seconds of a step; stages of one rank are equal shares of its time.

    ``known``: pipelines that were simulated before, to be asked and added to.
    """
    table = PlanTable.from_plans([plan])
    model, workload, software = setting.model, setting.workload, setting.software
    rate = rates(setting.cluster.accelerator, workload.precision, software)
    ranks = stages_of(setting, table)[1][0]
    seconds = [
        rank_seconds(model, workload, setting.cluster, software, rate, table, rank)
        for rank in ranks
    ]
    places = [rank.positions for rank in ranks]
    passes = [
        [float(np.ravel(getattr(each, name))[0]) / plan.virtual_stages for each in seconds]
        for name in ("forward_pass", "backward_pass", "weights")
    ]
    key = plan.pipeline_schedule, plan.num_stages, plan.num_microbatches, str(passes)
    known = {} if known is None else known
    if key not in known:
        by_stage = np.zeros((len(passes), plan.num_stages))
        for rank, owner in enumerate(owners(places).tolist()):
            for stage in stages_of_rank(plan, rank):
                by_stage[:, stage] = [each[owner] for each in passes]
        known[key] = makespan(plan, *by_stage.tolist())
    time, _ = step_seconds(
        seconds,
        places,
        table,
        software.data_parallel_overlap,
        on_gpu=setting.on_gpu,
        interference=software.data_parallel_interference,
        core_share=setting.core_share,
        bound=np.array([known[key]]),
    )
    return float(np.ravel(time.step)[0])
