"""Two runs that everybody knows, worked out: docs/explanation/step_time.md prints these numbers."""

from __future__ import annotations

import pytest

from cost_models.compute.flops import model_flops_per_step
from cost_models.model.families import model_spec
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from planner.validation.measurement import measured_step
from planner.validation.pricing import predict_cases
from planner.validation.rows.case import case_of
from planner.validation.rows.runs_file import PUBLISHED, read_runs
from tests.samples import GPT3, make_scenario


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
    assert errors == pytest.approx([-0.13, -0.124, -0.1], abs=0.01)


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
