"""Steps worked out: docs/explanation/step_time.md prints these numbers."""

import numpy as np
import pytest

from cost_models.compute.attention import core_ratio
from cost_models.compute.flops import model_flops_per_step
from cost_models.compute.layer import (
    accumulation_seconds,
    elementwise_seconds,
    layer_matrices,
    layer_seconds,
)
from cost_models.compute.rates import training_rates
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.step_time.rank_time import layer_work
from planner.validation.measurement import measured_step
from planner.validation.pricing import predict_cases
from planner.validation.rows.case import case_of
from planner.validation.rows.runs_file import PUBLISHED, read_runs
from tests.samples import GPT3, make_scenario


def test_the_parts_of_a_step_of_llama_3_8b_on_eight_a100() -> None:
    scenario = make_scenario(
        model_spec(load_preset("llama-3-8b").config, name="llama-3-8b"),
        seq_len=4096,
        global_batch_size=32,
        software="megatron",
    )
    plan = Plan(
        tensor_parallel=2,
        sequence_parallel=True,
        data_parallel=4,
        zero_stage=1,
        num_microbatches=8,
        recompute="none",
    )
    table = PlanTable.from_plans([plan])
    parts = price(scenario, table).time
    seconds = [
        np.sum(part)
        for part in (
            parts.compute,
            parts.tensor_communication,
            parts.data_communication,
            parts.optimizer,
            parts.host,
        )
    ]
    assert seconds == pytest.approx([4.00, 0.18, 0.08, 0.02, 0.0], abs=0.005)

    workload, software = scenario.workload, scenario.software
    view = RankView(scenario, table, even_split_contents(scenario.model, 1, 1)[0])
    rate = training_rates(scenario.cluster.accelerator, workload.precision, software, 8)
    work = layer_work(view, view.layers[0].kind, rate)
    layer, matrices = layer_seconds(work), layer_matrices(work)
    of_layer = [
        *(matrices.forward, matrices.inputs + matrices.weights),
        *(layer.core, core_ratio(work.kernel, rate) * layer.core),
        *elementwise_seconds(work),
        accumulation_seconds(work),
        layer.forward + layer.backward,
    ]
    expected = [4.05, 8.07, 0.35, 1.03, 0.23, 0.47, 0.36, 14.6]
    assert [1e3 * np.sum(part) for part in of_layer] == pytest.approx(expected, abs=0.05)


def test_llama_3_405b_on_8192_and_16384_h100() -> None:
    """Dubey et al. (arXiv:2407.21783), table 4: 8,192 tokens on 8K and 16K, 131,072 on 16K."""
    rows = [row for row in read_runs(PUBLISHED) if row.source_group == "llama3-paper"]
    cases = [case_of(row) for row in rows]
    predictions, refused = predict_cases(cases)
    assert not refused
    measured = [measured_step(case.row, case) for case in cases]
    errors = [
        predictions[case.row.name].step / seconds - 1.0
        for case, seconds in zip(cases, measured, strict=True)
        if seconds
    ]
    assert errors == pytest.approx([-0.143, -0.124, -0.1], abs=0.01)


def test_gpt_3_of_82_billion_on_1024_a100() -> None:
    """Kim et al. (arXiv:2109.04650): 150 B tokens of HyperCLOVA 82B took 13.4 days."""
    config = GPT3 | {"n_embd": 10240, "n_head": 80, "n_layer": 64}
    scenario = make_scenario(
        model_spec(config, name="gpt-3-82b"),
        "128x8xA100-80GB",
        seq_len=2048,
        global_batch_size=1024,
        precision="fp16",
        attention_kernel="eager",
        software="megatron-2021",
    )
    plan = Plan(
        tensor_parallel=8,
        pipeline_parallel=8,
        data_parallel=16,
        num_microbatches=64,
        recompute="full",
    )
    tokens = 150e9
    steps = tokens / scenario.workload.tokens_per_step
    at_peak = 6.0 * 82e9 * tokens / (1024 * 312e12) / 86400.0
    flops = steps * float(model_flops_per_step(scenario.model, 2048, 1024))
    predicted = steps * float(price(scenario, PlanTable.from_plans([plan])).step[0]) / 86400.0
    assert at_peak == pytest.approx(2.67, abs=0.01)
    assert flops / (1024 * 312e12) / 86400.0 == pytest.approx(2.73, abs=0.01)
    assert predicted == pytest.approx(8.7, abs=0.2)
