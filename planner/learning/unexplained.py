r"""What mechanisms leave of step times, as a Gaussian process over plan, workload and model.

    w = inv(K + n² I) r        K_ij = k(run i, run j)

Symbols   r  log(measured / predicted) of the learned runs, with all mechanisms
          n  standard deviation of what a run has for itself, over that of what runs alike share
          k  likeness (cost_models/step_time/unexplained.py)

The prior of r is 0: a plan unlike all learned runs keeps the step that mechanisms predict.

Leaves out: peaks, where this gained nothing on sources that were left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cost_models.plan.plan import PlanTable
from cost_models.step_time.unexplained import CHOICES, COUNTS, distances, likeness
from hardware_profiles.software.profile import LearnedRun, Unexplained
from planner.learning.effects import Logs
from planner.learning.mechanisms import Likeness
from planner.validation.rows.case import Case


def as_learned(case: Case, weight: float = 0.0) -> LearnedRun:
    """Return a run as a profile describes it."""
    workload = case.scenario.workload
    return LearnedRun(
        run=case.row.name,
        weight=weight,
        num_parameters=case.scenario.model.num_parameters,
        seq_len=workload.seq_len,
        **{name: getattr(case.plan, name) for name in COUNTS},
        **{name: getattr(workload, name) for name in CHOICES},
    )


def distances_between(cases: Sequence[Case], runs: Sequence[Case]) -> Logs:
    """Return the distance of cases (rows) to runs (columns), in doublings."""
    learned = [as_learned(run) for run in runs]
    found = np.zeros((len(cases), len(runs)))
    for number, case in enumerate(cases):
        of_plan = distances(case.scenario, PlanTable.from_plans([case.plan]), learned)
        found[number] = [float(np.ravel(one)[0]) for _, one in of_plan]
    return found


def weights(left: Logs, apart: Logs, prior: Likeness) -> tuple[Logs, Logs]:
    """Return the weight of each run, and what the other runs do not predict of each.

    ``left``: logarithms (runs,), NaN: not measured, with weight 0; ``apart``: distances of the runs
    to each other. The second: Rasmussen and Williams, 2006, eq. 5.12.
    """
    known = np.flatnonzero(~np.isnan(left))
    alike = likeness(apart[np.ix_(known, known)], prior.length)
    inverse = np.linalg.inv(alike + prior.noise**2 * np.eye(len(known)))
    found, alone = np.zeros(len(left)), np.full(len(left), np.nan)
    found[known] = inverse @ left[known]
    alone[known] = found[known] / np.diag(inverse)
    return found, alone


def unexplained(cases: Sequence[Case], weight: Logs, source: str, length: float) -> Unexplained:
    """Return the errors of runs for a profile."""
    runs = [as_learned(case, float(f"{w:.6g}")) for case, w in zip(cases, weight, strict=True) if w]
    return Unexplained(length, source, tuple(runs))
