"""MFU, HFU and the interval of a step stay within the peak of the accelerator."""

import random
from dataclasses import replace

import pytest

from cost_models.compute.rates import best_matmul
from cost_models.legality.rules import legality_codes
from cost_models.model.presets import preset_names
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.pricing.prediction import TimePrediction, predict
from cost_models.pricing.utilisation import FULL, KEPT, counted_flops, time_interval
from cost_models.scenario import Scenario
from hardware_profiles.cluster.catalogue import accelerators
from hardware_profiles.errors import ShardplanError
from planner.request.clusters import cluster_of
from planner.request.model import model_of
from planner.request.scenario import build_scenario
from tests.planner.runs.recorded import machine
from tests.samples import make_scenario

PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8")
LENGTHS = (128, 2048, 4096, 16384, 65536, 2**20)
ACCELERATORS = sorted(one.name for one in accelerators())
TRIES = 20  # scenarios of a seed


def utilisation_at_low_end(time: TimePrediction) -> float:
    assert time.hfu is not None
    return time.hfu * time.step_seconds / time.low_seconds


def check(time: TimePrediction) -> None:
    assert time.low_seconds <= time.step_seconds <= time.high_seconds
    if time.mfu is None or time.hfu is None:
        return
    assert 0.0 < time.mfu <= time.hfu <= 1.0
    assert utilisation_at_low_end(time) <= 1.0 + 1e-12


def sampled(seed: int) -> list[tuple[Scenario, Plan]]:
    """Return legal plans of random models, accelerators, precisions and lengths."""
    chosen = random.Random(seed)
    found = []
    while len(found) < TRIES:
        ranks, precision = chosen.choice((1, 8)), chosen.choice(PRECISIONS)
        cluster = cluster_of(f"{ranks}x{chosen.choice(ACCELERATORS)}")
        model, seq_len = model_of(chosen.choice(preset_names())), chosen.choice(LENGTHS)
        if best_matmul(cluster.accelerator, precision) is None:
            continue
        try:
            scenario = build_scenario(
                model, cluster, seq_len=seq_len, precision=precision, global_batch_size=ranks
            ).scenario
        except ShardplanError:
            continue  # the model takes no such sequence
        plan = Plan(
            data_parallel=ranks,
            zero_stage=3 if ranks > 1 else 0,
            recompute=chosen.choice(("none", "full")),
        )
        if not legality_codes(scenario, PlanTable.from_plans([plan])).any():
            found.append((scenario, plan))
    return found


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
)
def test_no_step_beats_the_peak(seed: int) -> None:
    for scenario, plan in sampled(seed):
        ranges = split_layers(scenario.model.num_layers, 1)
        check(predict(scenario, plan, ranges).time)


@pytest.mark.parametrize("seq_len", [512, 4096, 32768])
def test_a_cpu_does_not_beat_its_measured_matmuls(seq_len: int) -> None:
    scenario = replace(
        make_scenario("llama", seq_len=seq_len, global_batch_size=1, precision="fp32"),
        cluster=machine(1),
    )
    check(predict(scenario, Plan(), split_layers(scenario.model.num_layers, 1)).time)


def test_the_low_end_is_clipped_at_the_peak() -> None:
    """fp32 without tensor cores reaches nearly all of its peak."""
    scenario = build_scenario(
        model_of("llama-2-70b"),
        cluster_of("8xA100-80GB"),
        seq_len=4096,
        precision="fp32",
        global_batch_size=8,
    ).scenario
    time = predict(scenario, Plan(data_parallel=8, zero_stage=3), split_layers(80, 1)).time
    assert utilisation_at_low_end(time) == pytest.approx(1.0)
    low, _ = time_interval(scenario, time.step_seconds, None, 0.0)
    assert low < time.low_seconds  # the spread of errors reaches beyond the peak


@pytest.mark.parametrize(
    ("seq_len", "precision", "convention"),
    [(8192, "bf16", FULL), (2**20, "bf16", KEPT), (8192, "fp32", KEPT)],
)
def test_scores_count_in_full_where_that_is_possible(
    seq_len: int, precision: str, convention: str
) -> None:
    scenario = make_scenario(
        "llama-3-8b", "8xA100-80GB", seq_len=seq_len, precision=precision, global_batch_size=8
    )
    assert counted_flops(scenario).convention == convention


def test_an_eager_core_computes_all_scores() -> None:
    scenario = make_scenario(
        "llama-3-8b",
        "8xA100-80GB",
        seq_len=2**17,
        global_batch_size=8,
        attention_kernel="eager",
    )
    assert counted_flops(scenario).convention == FULL


def test_kept_scores_of_a_causal_mask_are_half() -> None:
    long = make_scenario("llama-3-8b", "8xA100-80GB", seq_len=2**20, global_batch_size=8)
    model = long.model
    matrices = 6 * (model.num_parameters - 128256 * 4096 - 65 * 4096)
    per_token = matrices + 6 * 4096 * 2**20 * 32
    assert counted_flops(long).flops == pytest.approx(per_token * 2**20 * 8, rel=1e-9)


@pytest.mark.parametrize(
    ("cluster", "assumed"),
    [("8xA100-80GB", False), ("2x8xH100-SXM", False), ("1xL4", False), ("4xL4", True)],
)
def test_an_assumed_link_widens_the_interval_by_its_part_of_the_step(
    cluster: str, assumed: bool
) -> None:
    scenario = build_scenario(
        model_of("gpt2"), cluster_of(cluster), seq_len=512, precision="fp16"
    ).scenario
    (low, high), (lower, higher) = (time_interval(scenario, 1.0, None, c) for c in (0.0, 0.3))
    assert (low - lower, higher - high) == pytest.approx(
        (0.2, 0.6) if assumed else (0.0, 0.0)
    )  # 3 times, or a third, of 0.3
