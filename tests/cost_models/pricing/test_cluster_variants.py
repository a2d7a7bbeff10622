"""Steps on several clusters at once: each equals the step on its cluster alone, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.legality.rules import legality_codes
from cost_models.pricing.cluster_variants import steps_on_clusters
from cost_models.pricing.step_bounds import step_times
from planner.explanation.machine_figures import figures
from planner.search.space import enumerate_plans
from tests.samples import make_scenario

CASES = [
    ("llama", "2x4xH100-SXM", "bf16"),
    pytest.param("mixtral", "2x4xA100-80GB", "bf16", marks=pytest.mark.slow(3)),
    pytest.param("t5", "8xRTX-4090", "bf16", marks=pytest.mark.slow(3)),
    pytest.param("llama", "8xV100-SXM2-32GB", "fp16", marks=pytest.mark.slow(3)),
    pytest.param("llama", "8xH100-SXM", "fp8", marks=pytest.mark.slow(3)),
    pytest.param("llama", "permuted 2x4xA100-80GB", "bf16", marks=pytest.mark.slow(3)),
    pytest.param("llama", "processor 2x4xA100-80GB", "bf16", marks=pytest.mark.slow(3)),
]


@pytest.mark.parametrize(("model", "cluster", "precision"), CASES)
def test_steps_on_clusters_are_those_on_each(model: str, cluster: str, precision: str) -> None:
    *kind, name = cluster.split()
    scenario = make_scenario(model, name, global_batch_size=16, seq_len=1024, precision=precision)
    if kind == ["processor"]:
        chip = replace(scenario.cluster.accelerator, device="cpu")
        scenario = replace(scenario, cluster=replace(scenario.cluster, accelerator=chip))
    if kind == ["permuted"]:  # no closed forms: bandwidths of a tree of links
        order = tuple(reversed(range(scenario.cluster.num_gpus)))
        scenario = replace(scenario, cluster=replace(scenario.cluster, rank_order=order))
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    table = table.rows(legality_codes(scenario, table) == 0)
    table = table.rows(np.arange(0, len(table), 1 + len(table) // 16)).plain()
    clusters = [scenario.cluster]
    rates = enumerate(figures(scenario)[1:])
    clusters += [rate.scaled(4.0 if number % 2 else 0.7) for number, rate in rates]
    rows = np.tile(np.arange(len(table)), len(clusters))
    number = np.repeat(np.arange(len(clusters)), len(table))
    seconds, least = steps_on_clusters(scenario, table.rows(rows), clusters, number)
    for index, there in enumerate(clusters):
        expected = step_times(replace(scenario, cluster=there), table)
        np.testing.assert_array_equal(seconds[number == index], expected[0])
        np.testing.assert_array_equal(least[number == index], expected[1])
