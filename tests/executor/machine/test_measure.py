"""The measurement of this machine: plausible numbers, and fits that recover what was put in."""

import numpy as np
import pytest

from executor.machine import measure as machine
from executor.machine import probes
from hardware_profiles.cluster.measurement import cpu_model, measurement_of


def test_fit_recovers_bandwidth_and_latency_under_noise():
    random = np.random.default_rng(0)
    moved = np.array([1e3, 1e5, 1e6, 1e7])
    seconds = (moved / 2e9 + 4 * 3e-5) * random.normal(1, 0.02, size=4)
    bandwidth, latency = machine.fit_link(moved, seconds, [4] * 4)
    assert bandwidth == pytest.approx(2e9, rel=0.1)
    assert latency == pytest.approx(3e-5, rel=0.1)


def test_fit_never_gives_a_negative_or_infinite_rate():
    bandwidth, latency = machine.fit_link([1e3, 1e6], [2e-3, 1e-3], [2, 2])
    assert 0 < bandwidth < float("inf")
    assert latency >= 0
    bandwidth, latency = machine.fit_link([1e3, 1e6], [1e-9, 1e-3], [2, 2])
    assert bandwidth > 0
    assert latency >= 0


def test_processor_and_memory_are_read(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Test CPU @ 3.0 GHz: fast\n")
    assert cpu_model(info) == "Test CPU @ 3.0 GHz: fast"
    assert cpu_model(tmp_path / "missing")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\n")
    assert machine.free_memory_bytes(meminfo, tmp_path) == 4096
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.free_memory_bytes(meminfo, tmp_path) == 2000
    assert machine.free_memory_bytes(tmp_path / "missing", tmp_path / "missing") > 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 3])
def test_a_measurement_is_complete_and_can_be_read_back(processes, monkeypatch):
    monkeypatch.setattr(probes, "WINDOW", 0.05)
    monkeypatch.setattr(probes, "COLLECTIVE_SECONDS", 0.02)
    measured = machine.measure_machine(processes)
    assert measured == measurement_of(measured.to_dict(), "measurement")
    assert measured.processes == processes
    assert measured.gemm_flops["fp32"] > 1e8
    assert 1e-7 < measured.operator_seconds < 1e-2
    assert 1e-12 < measured.score_seconds < 1e-6
    assert (measured.collective_bandwidth is None) == (processes == 1)
    assert (measured.p2p_bandwidth is None) == (processes == 1)
