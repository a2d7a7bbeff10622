from __future__ import annotations

from typing import Any

import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.prediction import time_prediction
from cost_models.uncertainty import TIME_ELSEWHERE, interval, time_spread
from planner.assessment.confidence import confidence
from tests.samples import make_scenario


@pytest.mark.parametrize(
    ("model", "cluster", "options", "word"),
    [
        ("llama", "8xA100-80GB", {}, "published"),
        ("llama", "8xH100-SXM", {}, "published"),
        ("llama", "8xA100-80GB", {"software": "megatron"}, "published"),
        # no run of that kind was compared with
        ("llama", "8xH100-SXM", {"software": "megatron"}, "datasheet"),
        ("llama", "8xA100-80GB", {"precision": "fp32"}, "datasheet"),
        ("mixtral", "8xA100-80GB", {}, "datasheet"),
        ("t5", "8xA100-80GB", {}, "datasheet"),
        ("llama", "8xH200", {}, "datasheet"),
        ("llama", "8xRTX4090", {}, "datasheet"),
    ],
)
def test_confidence_is_that_of_runs_of_the_same_kind(
    model: str, cluster: str, options: dict[str, Any], word: str
) -> None:
    assert confidence(make_scenario(model, cluster, **options)) == word


def test_mixtures_of_experts_have_intervals_of_their_own() -> None:
    chip = make_scenario("llama", "8xH100-SXM").cluster.accelerator
    for software in ("nemo", "megatron"):  # compared with runs, and not
        dense = time_spread(software, chip)
        routed = time_spread(software, chip, experts=True)
        assert routed.above > dense.above
    mixture = make_scenario("mixtral", "8xH100-SXM", software="nemo")
    assert mixture.model.has_experts
    assert not make_scenario("llama", "8xH100-SXM").model.has_experts
    time = time_prediction(mixture, Plan(8), price(mixture, PlanTable.from_plans([Plan(8)])))
    ends = time.low_seconds, time.high_seconds
    assert ends == interval(time.step_seconds, time_spread("nemo", chip, experts=True))


def test_what_was_never_compared_has_the_widest_interval() -> None:
    accelerator = make_scenario("llama", "8xH100-SXM").cluster.accelerator
    assert time_spread("megatron", accelerator) == TIME_ELSEWHERE
    assert time_spread("shardplan", accelerator).above <= TIME_ELSEWHERE.above
