"""The rank that needs the most memory is among those that are priced."""

from itertools import product

import numpy as np
import pytest

from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import SCHEDULES, Plan, PlanTable
from cost_models.pricing.estimate import memories_by_rank, price, price_memory
from cost_models.pricing.table import table_memory
from cost_models.scenario import Scenario
from tests.samples import make_scenario, sample_model

BATCH = 48


def pipelines(scenario: Scenario, seed: int, most: int) -> PlanTable:
    """Legal plans of all schedules, with few and with many micro-batches."""
    microbatches = [m for m in range(1, BATCH + 1) if BATCH % m == 0]
    found = [
        Plan(
            pipeline_parallel=pipeline,
            tensor_parallel=scenario.cluster.num_gpus // pipeline,
            virtual_stages=virtual,
            pipeline_schedule=schedule,
            num_microbatches=count,
            micro_batch_size=BATCH // count,
            recompute=recompute,
        )
        for pipeline, virtual, schedule, count, recompute in product(
            (4, 8, 16), (1, 2, 3), SCHEDULES, microbatches, ("none", "full")
        )
    ]
    table = PlanTable.from_plans(found)
    legal = np.flatnonzero(legality_codes(scenario, table) == 0)
    return table.rows(np.random.default_rng(seed).permutation(legal)[:most])


@pytest.mark.parametrize("software", ["shardplan", "megatron"])
@pytest.mark.parametrize(
    "layers",
    [16, pytest.param(48, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.slow)],
)
def test_no_other_rank_is_fuller(
    layers: int, software: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, and by distinct rows, all ranks of a kind together or the first apart."""
    model = sample_model("llama", num_hidden_layers=layers)
    scenario = make_scenario(
        model, "2x8xH100-SXM", seq_len=256, global_batch_size=BATCH, software=software
    )
    table = pipelines(scenario, layers, 60 if layers == 16 else 400)
    ranks = memories_by_rank(scenario, table)
    alone = [max(float(parts.peak) for parts, _ in each) for each in ranks]
    priced = price(scenario, table)
    np.testing.assert_allclose(priced.peak, alone, rtol=1e-12)
    limiting = [float(each[i][0].peak) for each, i in zip(ranks, priced.limiting_rank, strict=True)]
    np.testing.assert_allclose(limiting, alone, rtol=1e-12)
    np.testing.assert_allclose(price_memory(scenario, table)[0], alone, rtol=1e-12)
    monkeypatch.setattr("cost_models.pricing.table.FEW", 0)
    for most in (10**6, 0):
        monkeypatch.setattr("cost_models.pricing.plan_groups.ONE_GROUP", most)
        np.testing.assert_allclose(table_memory(scenario, table)[0], alone, rtol=1e-12)
