r"""Factor of a step for what measured runs showed and no mechanism explains (``shardplan learn``).

    f  = exp(Σ_i w_i k_i)      k_i = exp(-d_i / l)      d_i² = Σ_n log2²(n / n_i) + Σ_c [c ≠ c_i]

Symbols   w_i  weight of run i, from the errors that mechanisms leave   k_i  likeness to run i
          d_i  distance to run i in doublings   l  distance at which likeness is 1/e
          n    parameters of the model, sequence length, micro-batch size, number of micro-batches,
               data-, tensor-, pipeline-, context- and expert-parallel ranks
          c    precision, adapter, attention kernel

The mean of a Gaussian process whose covariance is k (Rasmussen and Williams, Gaussian Processes for
Machine Learning, 2006, eq. 2.25 and 4.18). Choices that a lower bound of a step leaves open
(recomputation, offload, ZeRO stage, schedule, virtual stages) are not in d: a bound of plans is
multiplied by the factor of the plans, and stays one.

Leaves out: the accelerator; on another one than that of the runs the factor is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cost_models.arrays import Real
from cost_models.columnar.columns import on_distinct_rows
from cost_models.plan.plan import PlanTable
from cost_models.scenario import Scenario
from hardware_profiles.software.profile import LearnedRun

COUNTS: Final = (
    "micro_batch_size",
    "num_microbatches",
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
)
CHOICES: Final = ("precision", "adapter", "attention_kernel")


def unexplained_factor(scenario: Scenario, table: PlanTable) -> Real:
    """Return the factor of the steps of plans; 1 where nothing was learned."""
    learned = scenario.software.learned
    if learned is None or learned.accelerator != scenario.cluster.accelerator.name:
        return 1.0
    left = learned.unexplained
    if left is None:
        return 1.0
    apart = distances(scenario, table, left.runs)
    found: Real = np.exp(sum(run.weight * likeness(d, left.length) for run, d in apart))
    return found


def likeness(distance: Any, length: float) -> Any:
    """Return the likeness of plans to a run.

    >>> float(likeness(np.log(2.0) * 3.0, length=3.0))
    0.5
    """
    return np.exp(-distance / length)


def distances(
    scenario: Scenario, table: PlanTable, runs: Sequence[LearnedRun]
) -> list[tuple[LearnedRun, Real]]:
    """Return the distance of plans to each run, in doublings."""
    columns = [getattr(table, name) for name in COUNTS]
    return [(run, _distance(run, _fixed(scenario, run), *columns)) for run in runs]


def _fixed(scenario: Scenario, run: LearnedRun) -> float:
    """Return the squared distance of model and workload, the same for all plans."""
    workload = scenario.workload
    size = np.log2(scenario.model.num_parameters / run.num_parameters)
    others = sum(getattr(workload, name) != getattr(run, name) for name in CHOICES)
    return float(size**2 + np.log2(workload.seq_len / run.seq_len) ** 2 + others)


@on_distinct_rows
def _distance(run: LearnedRun, fixed: float, *columns: Any) -> Any:
    pairs = zip(COUNTS, columns, strict=True)
    return np.sqrt(fixed + sum(np.log2(each / getattr(run, name)) ** 2 for name, each in pairs))
