"""``here``: a measurement that is missing, old or off is taken before the answer."""

import datetime

import pytest
from msgspec.structs import replace

from hardware_profiles.cluster import measurement
from hardware_profiles.cluster.measurement import (
    MachineMeasurement,
    available_cores,
    load_cached,
    save,
    this_host,
)
from planner.request import executor_process
from planner.request.executor_process import cluster_or_measure

TODAY = datetime.date.today()
GOOD = MachineMeasurement(
    host=this_host(),
    cpu_model="Some CPU",
    num_cores=available_cores(),
    total_memory_bytes=2**34,
    available_memory_bytes=2**33,
    processes=1,
    torch_version="2.13.0",
    date=TODAY.isoformat(),
    gemm_flops={"fp32": 5e10},
    memory_bandwidth=1e10,
    operator_seconds=5e-6,
    score_seconds=1e-9,
    load=0.0,
)
OLD = replace(GOOD, date=(TODAY - datetime.timedelta(days=40)).isoformat())


@pytest.fixture
def measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> list[int]:
    """An empty cache, a quiet machine without GPUs, and an executor that measures at once."""
    monkeypatch.setenv("SHARDPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(measurement, "load_average", lambda: 0.0)
    monkeypatch.setattr(measurement, "cpu_model", lambda: "Some CPU")
    monkeypatch.setattr(measurement, "_torch_version", lambda: "2.13.0")
    monkeypatch.setattr(executor_process, "missing_run_package", lambda: None)
    calls: list[int] = []

    def measure(processes: int, say: executor_process.Say) -> None:
        calls.append(processes)
        save(GOOD)

    monkeypatch.setattr(executor_process, "measure", measure)
    return calls


def test_a_machine_is_measured_once(measured: list[int]) -> None:
    said: list[str] = []
    for _ in range(2):
        assert cluster_or_measure("here:1", said.append).num_gpus == 1
    assert (measured, said) == ([1], [])


def test_an_old_measurement_is_taken_again(measured: list[int]) -> None:
    save(OLD)
    said: list[str] = []
    cluster = cluster_or_measure("here:1", said.append)
    assert measured == [1]
    assert said == ["note: here:1: the measurement is 40 days old"]
    assert load_cached(1) == GOOD
    assert TODAY.isoformat() in cluster.accelerator.memory_bandwidth.source


def test_without_the_executor_an_old_measurement_is_noted(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_process, "missing_run_package", lambda: "torch")
    save(OLD)
    said: list[str] = []
    cluster_or_measure("here:1", said.append)
    assert measured == []
    assert said[0].startswith("note: this machine was measured 40 days ago")


def test_other_clusters_have_no_notes(measured: list[int]) -> None:
    said: list[str] = []
    cluster_or_measure("8xA100-80GB", said.append)
    assert (measured, said) == ([], [])
