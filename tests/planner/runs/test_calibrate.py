from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost_models.plan.plan import Plan
from cost_models.pricing.prediction import predict, scenario_of
from hardware_profiles.cluster import local_machine as here
from hardware_profiles.cluster.calibration import load_calibration, scaled_rates, scaled_tier
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner.runs import calibrate as module
from planner.runs.calibrate import calibrate, calibrate_with_run
from tests.planner.runs.recorded import PLAN, machine, plan_file, write_run

# fewer layers' worth of work in each plan: another split between computing and communicating
OTHER = Plan(tensor_parallel=2, sequence_parallel=True, micro_batch_size=4)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "uncalibrated_here", machine)
    monkeypatch.setattr(here, "uncalibrated_here", machine)


def really(rates: float, links: float) -> Cluster:
    base = machine()
    return replace(
        base,
        accelerator=scaled_rates(base.accelerator, rates, "outside_fake_mode"),
        tiers=tuple(scaled_tier(tier, links, "outside_fake_mode") for tier in base.tiers),
    )


def step(cluster: Cluster, plan: Plan) -> float:
    file = plan_file(cluster, plan)
    return predict(scenario_of(file), plan, file.layer_ranges).time.step_seconds


def calibrated_by(*runs: Path, **options: Any) -> Any:
    return calibrate(runs, say=lambda text: None, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rates", "links"), [(0.5, 0.5), (0.7, 0.2), (1.4, 1.0), (0.5, 2.0)])
def test_the_factors_of_a_machine_are_found(tmp_path: Path, rates: float, links: float) -> None:
    """Learnt from one plan, right for another one too."""
    truth = really(rates, links)
    run = write_run(tmp_path / "run", plan_file(plan=OTHER), truth)
    learnt = calibrated_by(run)
    assert learnt.calibration.rates == pytest.approx(rates, rel=1e-3)
    assert learnt.calibration.links == pytest.approx(links, rel=1e-3)
    assert learnt.after_seconds == pytest.approx(learnt.measured_seconds, rel=1e-6)
    assert "now (+0.0 %)" in str(learnt)
    found = here.describe_here(2)
    assert step(found, PLAN) == pytest.approx(step(truth, PLAN), rel=1e-3)
    assert "calibrated by 1 run" in found.notes[-1]
    before = machine().accelerator.peak_flops["fp32"]
    now = found.accelerator.achievable_flops["fp32"]
    assert f"{before.value:.6g}" in now.source  # both values are kept
    assert now.value == pytest.approx(rates * before.value, rel=1e-3)


def test_a_peak_below_the_rate_that_runs_reach_is_that_rate() -> None:
    base = machine().accelerator
    faster, slower = (scaled_rates(base, factor, "a run") for factor in (2.0, 0.5))
    for name, figure in base.peak_flops.items():
        assert faster.peak_flops[name].value == faster.achievable_flops[name].value
        assert slower.peak_flops[name] == figure
    a100 = parse_cluster("2xA100-80GB").accelerator
    assert scaled_rates(a100, 1.1, "a run").peak_flops["bf16"] == a100.peak_flops["bf16"]


@pytest.mark.slow
def test_without_measured_waits_the_links_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plan_file(), really(0.5, 1.0), waits=False)
    learnt = calibrated_by(run)
    assert learnt.calibration.links == 1.0
    assert "links as before" in str(learnt)
    assert learnt.after_seconds == pytest.approx(learnt.measured_seconds, rel=1e-6)


@pytest.mark.slow
def test_ranks_that_waited_for_one_another_say_nothing_about_links(tmp_path: Path) -> None:
    """With their waits taken for links, each process would compute eight times its peak."""
    run = write_run(tmp_path / "run", plan_file(plan=OTHER), really(8.0, 0.1))
    learnt = calibrated_by(run)
    assert learnt.calibration.links == 1.0
    assert learnt.calibration.rates < 2.0
    assert "ranks waited for one another" in str(learnt)
    assert learnt.after_seconds == pytest.approx(learnt.measured_seconds, rel=1e-6)


@pytest.mark.slow
def test_several_runs_give_the_median_and_one_run_counts_once(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"run-{rates}", plan_file(), really(rates, 1.0), waits=False)
        for rates in (0.4, 0.5, 0.9)
    ]
    assert calibrated_by(*runs).calibration.rates == pytest.approx(0.5, rel=1e-3)
    again = calibrated_by(runs[0])
    assert len(again.calibration.runs) == 3
    kept = load_calibration("A CPU", 2)
    assert kept == again.calibration


@pytest.mark.slow
def test_a_cluster_that_is_not_here_goes_to_a_file(tmp_path: Path) -> None:
    cluster = parse_cluster("2xA100-80GB")
    file = plan_file(cluster)
    slow = replace(cluster, accelerator=scaled_rates(cluster.accelerator, 0.8, "slow"))
    run = write_run(tmp_path / "run", file, slow, device="NVIDIA A100")
    with pytest.raises(InputError, match="name a file for the calibrated cluster with -o FILE"):
        calibrated_by(run)
    output = tmp_path / "ours.toml"
    learnt = calibrated_by(run, output=output)
    assert load_calibration(cluster.accelerator.name, 2) is None
    read = parse_cluster(str(output))
    assert replace(read, name=learnt.cluster.name) == learnt.cluster
    assert step(read, PLAN) == pytest.approx(learnt.measured_seconds, rel=1e-3)
    with pytest.raises(InputError, match="exists already"):
        calibrated_by(run, output=output)


def test_runs_that_say_nothing_are_refused(tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", plan_file(), machine(), timed_steps=1)
    with pytest.raises(InputError, match="timed 1 steps"):
        calibrate_with_run(short)
    gpu = write_run(tmp_path / "gpu", plan_file(parse_cluster("2xA100-80GB")), machine())
    with pytest.raises(InputError, match="cannot calibrate that cluster"):
        calibrate_with_run(gpu)
    with pytest.raises(InputError, match="either --from RUN_DIR or --processes"):
        calibrated_by()


def test_a_spoilt_file_in_the_cache_does_not_count(tmp_path: Path) -> None:
    calibrated_by(write_run(tmp_path / "run", plan_file(), really(0.5, 1.0)))
    (path,) = (tmp_path / "cache").glob("calibration-*.json")
    path.write_text(path.read_text().replace('"rates": ', '"rates": -'))
    assert load_calibration("A CPU", 2) is None
    assert here.describe_here(2) == machine()
