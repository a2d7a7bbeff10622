"""Rank correlation and regret of plans."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from benchmarks.accuracy.cross_validate import Work
from benchmarks.accuracy.ranking import by_source, ranking, seconds_a_token, sweeps, table_of
from cost_models.plan.plan import Plan, PlanTable
from tests.samples import make_scenario


def test_regret_is_of_the_plan_that_is_predicted_fastest() -> None:
    found = ranking([3.0, 1.0, 2.0], [4.0, 5.0, 6.0])
    assert found.regret == pytest.approx(0.25)
    assert (found.spearman, found.kendall) == (-0.5, -0.33)
    tied = ranking([1.0, 1.0, 2.0], [4.0, 5.0, 6.0])
    assert tied.regret == pytest.approx(0.125)
    assert ranking([1.0, 1.0, 1.0], [4.0, 5.0, 6.0]).spearman == 0.0


def test_batches_of_a_sweep_are_compared_by_token() -> None:
    plans = [Plan(data_parallel=2, micro_batch_size=b, num_microbatches=4) for b in (1, 2, 4)]
    small = make_scenario("llama", "2xH100-SXM", global_batch_size=8)
    works = []
    for plan, seconds in zip(plans, (8.0, 12.0, 20.0), strict=True):
        workload = replace(small.workload, global_batch_size=plan.global_batch_size)
        scenario = replace(small, workload=workload)
        table = PlanTable.from_plans([plan, plan])
        works.append(Work(scenario, table, "a source", np.array([seconds, seconds])))
    assert sweeps(works[:2]) == []
    (sweep,) = sweeps(works)
    predicted, measured = seconds_a_token(sweep, [np.array([0.5, 1.5])] * 3)
    tokens = 8 * small.workload.seq_len
    assert measured == pytest.approx([8.0 / tokens, 6.0 / tokens, 5.0 / tokens])
    assert predicted == pytest.approx(measured)
    table = table_of([sweep], lambda work: np.ones(len(work.measured)))
    assert table.regret.to_list() == [0.0]
    assert table["by chance"].to_list() == pytest.approx([(8 + 6 + 5) / 15 - 1])


def test_means_weigh_every_source_alike() -> None:
    names = ["source", "spearman", "kendall", "regret", "by chance"]
    rows = [("a", 1.0, 1.0, 0.0, 0.2), ("a", 0.0, 0.0, 0.2, 0.2), ("b", 1.0, 1.0, 0.0, 0.4)]
    found = by_source(pd.DataFrame(rows, columns=names)).set_index("source")
    mean = found.loc["mean over sources"]
    assert mean.sweeps == 3
    assert mean.spearman == pytest.approx(0.75)
    assert mean.regret == pytest.approx(0.05)
    assert mean.worst == pytest.approx(0.2)
