import csv
import datetime
import math
from dataclasses import replace
from typing import Any

import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.prediction import time_prediction
from cost_models.uncertainty import ANY, TIME_INTERVALS, interval, time_spread
from planner.assessment.confidence import (
    COMPARED_RUNS,
    compared_runs,
    confidence,
    confidence_words,
)
from planner.validation.rows.runs_file import PUBLISHED
from tests.planner.runs.recorded import machine
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
        assert routed.below + routed.above > dense.below + dense.above
    mixture = make_scenario("mixtral", "8xH100-SXM", software="nemo")
    assert mixture.model.has_experts
    assert not make_scenario("llama", "8xH100-SXM").model.has_experts
    time = time_prediction(mixture, Plan(8), price(mixture, PlanTable.from_plans([Plan(8)])))
    ends = time.low_seconds, time.high_seconds
    assert ends == interval(time.step_seconds, time_spread("nemo", chip, experts=True))


def test_several_sources_that_agree_narrow_an_interval() -> None:
    hopper = make_scenario("llama", "8xH100-SXM").cluster.accelerator
    never = time_spread("not a profile", hopper)
    for software in ("shardplan", "composer", "torchtitan"):
        compared = time_spread(software, hopper)
        assert compared.below < never.below
        assert compared.above < never.above


def test_a_kind_without_runs_lies_between_its_trainer_and_its_accelerator() -> None:
    blackwell = make_scenario("llama", "8xB200").cluster.accelerator
    sizes = {
        (row["software"], row["architecture"], row["experts"]): math.log1p(float(row["above"]))
        for row in _intervals()
    }
    assert ("megatron", "Blackwell", "0") not in sizes
    dense = sizes[ANY, ANY, "0"] / sizes[ANY, ANY, ANY]
    least, most = sorted([sizes["megatron", ANY, ANY], sizes[ANY, "Blackwell", ANY]])
    found = math.log1p(time_spread("megatron", blackwell).above)
    assert dense * least < found < dense * most
    assert time_spread("not a profile", blackwell) == time_spread("another", blackwell)


def _intervals() -> list[dict[str, str]]:
    with TIME_INTERVALS.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_compared_runs_are_named() -> None:
    words = confidence_words(make_scenario("llama", "8xA100-80GB", software="megatron"))
    found = compared_runs(make_scenario("llama", "8xA100-80GB", software="megatron"))
    assert found is not None
    assert f"published: {found.runs:,} runs of Megatron-DeepSpeed, NeMo-Megatron" in words
    assert "on A100-SXM-80GB were compared, median error" in words
    assert "--only vtrain-multi" in words


@pytest.mark.parametrize(
    ("software", "words"),
    [
        ("shardplan", ""),  # traced
        ("megatron-core", ""),  # compared with published peaks
        ("internevo", "no peak of this trainer was compared"),
        ("nanotron", "no peak of this trainer was compared"),
        ("fsdp2+adamw-fused", "no peak of this trainer was compared"),
        ("torch-trainer", ""),
    ],
)
def test_an_interval_of_other_trainers_is_said_to_be_one(software: str, words: str) -> None:
    found = confidence_words(make_scenario("llama", "8xA100-80GB", software=software))
    assert words in found
    assert ("that of" in found) == bool(words)


@pytest.mark.parametrize(
    ("model", "cluster", "options", "words"),
    [
        ("llama", "8xH200", {}, "no run of this trainer on H200-SXM-141GB was compared"),
        ("mixtral", "8xA100-80GB", {}, "no run of a mixture of experts on A100-SXM-80GB"),
        ("t5", "8xA100-80GB", {}, "runs of fms-fsdp on A100-SXM-80GB were compared, median"),
        ("t5", "8xA100-80GB", {}, "but none of t5 in bf16 as here"),
        ("llama", "8xA100-80GB", {"precision": "fp32"}, "but none of llama in fp32 as here"),
    ],
)
def test_missing_runs_are_named(
    model: str, cluster: str, options: dict[str, Any], words: str
) -> None:
    found = confidence_words(make_scenario(model, cluster, **options))
    assert found.startswith("datasheet: ")
    assert words in found


def test_every_published_confidence_rests_on_runs() -> None:
    """Whatever is called published has compared runs."""
    for software in ("shardplan", "megatron", "nemo", "composer", "fms-fsdp", "xla"):
        for cluster in ("8xA100-80GB", "8xH100-SXM"):
            scenario = make_scenario("llama", cluster, software=software)
            if confidence(scenario) == "published":
                assert compared_runs(scenario) is not None


def test_the_table_counts_no_more_runs_than_were_published() -> None:
    with PUBLISHED.open(encoding="utf-8", newline="") as stream:
        published = [row["source_group"] for row in csv.DictReader(stream)]
    with COMPARED_RUNS.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows
    for row in rows:
        groups = row["sources"].split("; ")
        assert 0 < int(row["runs"]) <= sum(published.count(group) for group in groups)


def test_the_age_of_a_measurement_is_named() -> None:
    scenario = replace(make_scenario("llama", precision="fp32"), cluster=machine())
    days = (datetime.date.today() - datetime.date(2026, 1, 1)).days
    assert confidence_words(scenario) == (
        f"measured: rates were measured on this machine, 2026-01-01, torch 2.13.0 ({days} days ago)"
    )
