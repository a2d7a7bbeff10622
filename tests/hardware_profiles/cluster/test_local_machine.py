"""This machine: nvidia-smi played by a script, and the cached measurement."""

import datetime
import json
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from hardware_profiles.cluster import local_machine as here
from hardware_profiles.cluster import measurement
from hardware_profiles.cluster.build import describe
from hardware_profiles.cluster.cluster_json import cluster_from_dict, cluster_to_dict
from hardware_profiles.cluster.links.groups import group_link
from hardware_profiles.cluster.local_machine import cpu_cluster, describe_here
from hardware_profiles.cluster.measurement import (
    MachineMeasurement,
    available_cores,
    cache_path,
    cgroup_memory_limit,
    load_cached,
    machine_memory_bytes,
    measurement_of,
    save,
    this_host,
)
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError, NeedsMeasurement

H200 = "NVIDIA H200, 143771 MiB, 570.86.15"


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No nvidia-smi, no chosen devices, an empty cache."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SHARDPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "bin").mkdir()


@pytest.fixture
def nvidia_smi(tmp_path):
    def install(*lines, status=0, before=""):
        script = tmp_path / "bin" / "nvidia-smi"
        said = "".join(f"echo '{line}'\n" for line in lines)
        script.write_text(f"#!/bin/sh\n{before}\n{said}exit {status}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    return install


def measured(processes=2, **changes):
    both = {
        "collective_bandwidth": 1.5e9,
        "collective_latency": 4e-5,
        "p2p_bandwidth": 2.5e9,
        "p2p_latency": 3e-5,
    }
    link = both if processes > 1 else dict.fromkeys(both)
    whole = MachineMeasurement(
        host=this_host(),
        cpu_model="Some CPU",
        num_cores=available_cores(),
        total_memory_bytes=machine_memory_bytes(),
        available_memory_bytes=10**9,
        processes=processes,
        torch_version="2.13.0",
        date="2026-05-04",
        gemm_flops={"fp64": 2e10, "fp32": 4e10},
        memory_bandwidth=8e9,
        operator_seconds=2e-6,
        score_seconds=9e-10,
        **link,
    )
    return replace(whole, **changes)


# --- GPUs ---


def test_gpus_are_matched_with_the_catalogue(nvidia_smi):
    nvidia_smi(*[H200] * 8)
    cluster = parse_cluster("here")
    assert cluster.num_gpus == 8
    assert cluster.accelerator.name == "H200-SXM-141GB"
    assert cluster.accelerator.memory_capacity.value == 143771 * 2**20
    assert cluster.accelerator.memory_capacity.kind == "measured"
    assert "570.86.15" in cluster.accelerator.memory_capacity.source
    assert cluster.notes


def test_fewer_gpus_than_there_are(nvidia_smi):
    nvidia_smi(*[H200] * 8)
    assert parse_cluster("here:2").num_gpus == 2
    with pytest.raises(InputError, match="8 visible GPUs"):
        parse_cluster("here:9")


def test_cuda_visible_devices(nvidia_smi, monkeypatch):
    nvidia_smi("NVIDIA A40, 46068, 550", H200, H200)
    with pytest.raises(InputError, match="different GPUs"):
        describe_here(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert describe_here(None).num_gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert describe_here(None).accelerator.name == "A40"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(NeedsMeasurement):
        describe_here(1)


def test_an_unknown_gpu_says_how_to_describe_it(nvidia_smi):
    nvidia_smi("NVIDIA Z9000, 9999, 1.0")
    with pytest.raises(InputError, match=r"Z9000 is not in the catalogue.*TOML"):
        describe_here(None)


@pytest.mark.parametrize("line", ["NVIDIA H200, [N/A], 570", "NVIDIA H200"])
def test_memory_that_the_driver_does_not_say(nvidia_smi, line):
    nvidia_smi(line)
    assert describe_here(None).accelerator.memory_capacity.kind == "published"


def test_a_machine_with_the_command_but_no_gpu(nvidia_smi):
    nvidia_smi("No devices were found", status=6)
    with pytest.raises(NeedsMeasurement):
        describe_here(2)


def test_a_command_that_hangs(nvidia_smi, monkeypatch):
    nvidia_smi(before="exec /bin/sleep 5")
    monkeypatch.setattr(here, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(InputError, match="does not answer"):
        describe_here(None)


# --- CPU processes ---


def test_without_a_measurement_the_caller_is_told():
    with pytest.raises(NeedsMeasurement) as error:
        describe_here(3)
    assert error.value.processes == 3
    assert isinstance(error.value, InputError)
    with pytest.raises(NeedsMeasurement) as error:
        describe_here(None)
    assert error.value.processes == available_cores()


def test_a_measured_machine():
    save(measured())
    cluster = parse_cluster("here:2")
    accelerator = cluster.accelerator
    assert (cluster.num_gpus, accelerator.device, len(cluster.tiers)) == (2, "cpu", 1)
    assert accelerator.memory_capacity.value == machine_memory_bytes() / 2
    assert set(accelerator.peak_flops) == {"fp64", "fp32"}
    assert accelerator.peak_flops == accelerator.achievable_flops
    assert accelerator.kernel_launch is not None
    assert accelerator.kernel_launch.value == 2e-6
    assert accelerator.score_seconds.value == 9e-10
    assert accelerator.core_share.value == min(1.0, available_cores() / 2)
    assert cluster.tiers[0].name == "gloo"
    assert cluster.tiers[0].bandwidth.kind == "measured"
    assert cluster.tiers[0].bandwidth.source.startswith("measured on this machine, 2026-05-04")
    assert describe(cluster) == "2 CPU processes on Some CPU, gloo 1.5 GB/s inside"
    plain = json.loads(json.dumps(cluster_to_dict(cluster)))
    assert cluster_from_dict(plain, "plan.json") == cluster


def test_one_process_sends_nothing():
    cluster = cpu_cluster(measured(1))
    assert cluster.tiers[0].domain_size == 1
    assert float(group_link(cluster, 1, 1)[1]) == 0.0
    assert describe(cluster) == "1 CPU process on Some CPU"


def test_memory_is_never_more_than_the_machine_has():
    cluster = cpu_cluster(measured(total_memory_bytes=10**17))
    assert cluster.accelerator.memory_capacity.value == machine_memory_bytes() / 2


@pytest.mark.parametrize("changes", [{"host": "another"}, {"num_cores": 10**5}, {"processes": 4}])
def test_a_measurement_of_another_machine_does_not_count(changes):
    path = save(measured())
    path.write_text(json.dumps(measured(**changes).to_dict()))
    assert load_cached(2) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', "\0"])
def test_a_broken_measurement_does_not_count(text):
    path = cache_path(2)
    path.parent.mkdir()
    path.write_text(text)
    assert load_cached(2) is None
    save(measured())
    assert load_cached(2) == measured()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gemm_flops", {}),
        ("gemm_flops", {"fp32": 0}),
        ("gemm_flops", {"fp31": 1e9, "fp32": 1e9}),
        ("memory_bandwidth", 0),
        ("operator_seconds", -1),
        ("collective_bandwidth", None),
        ("processes", 0),
        ("schema_version", 1),
        ("colour", "green"),
    ],
)
def test_measurements_are_checked(key, value):
    plain = measured().to_dict() | {key: value}
    with pytest.raises(InputError):
        measurement_of(plain, "measurement")


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_path(2) == tmp_path / "cache" / "machine-2.json"
    monkeypatch.delenv("SHARDPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_path(2) == Path("/x/shardplan/machine-2.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_path(2) == Path("/home/somebody/.cache/shardplan/machine-2.json")


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDPLAN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="SHARDPLAN_CACHE"):
        save(measured())


def test_limits_of_a_container(tmp_path):
    limit = tmp_path / "memory.max"
    assert cgroup_memory_limit(limit) is None
    limit.write_text("max\n")
    assert cgroup_memory_limit(limit) is None
    limit.write_text("1073741824\n")
    assert cgroup_memory_limit(limit) == 2**30
    quota = tmp_path / "cpu.max"
    quota.write_text("250000 100000\n")
    assert measurement._cgroup_cores(quota) == 2
    quota.write_text("max 100000\n")
    assert measurement._cgroup_cores(quota) is None
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


# --- a measurement that is old or off ---


@pytest.fixture
def quiet(monkeypatch):
    """Set the load of the machine and what the probe finds; return a measurement of it."""
    state = {"load": 0.1, "probe": 1e-3}
    monkeypatch.setattr(measurement, "load_average", lambda: state["load"])
    monkeypatch.setattr(measurement, "probe_seconds", lambda: state["probe"])
    monkeypatch.setattr(measurement, "cpu_model", lambda: "Some CPU")
    monkeypatch.setattr(measurement, "_torch_version", lambda: "2.13.0")
    monkeypatch.setattr(measurement, "available_cores", lambda: 8)

    def found(days=0, **changes):
        date = datetime.date.today() - datetime.timedelta(days=days)
        usual = {"num_cores": 8, "load": 0.1, "probe_seconds": 1e-3, "date": date.isoformat()}
        return measured(**(usual | changes))

    return state, found


@pytest.mark.parametrize(
    ("changes", "now", "why"),
    [
        ({}, {}, None),
        ({"days": 30}, {}, None),
        ({"days": 31}, {}, "31 days old"),
        ({"torch_version": "2.13.0+cpu"}, {}, None),
        ({"torch_version": "2.12.1"}, {}, "with torch 2.12.1, now 2.13.0"),
        ({"cpu_model": "Another CPU"}, {}, "another processor (Another CPU, now Some CPU)"),
        ({"load": 6.0}, {}, "measured on a busy machine (load 6.0)"),
        ({}, {"probe": 1.4e-3}, None),
        ({}, {"probe": 2e-3}, "2.0 times as slow"),
        ({}, {"probe": 0.5e-3}, "2.0 times as fast"),
        # of an older version, without load and probe
        ({"load": None, "probe_seconds": None}, {"probe": 1.0}, None),
        # what a busy machine shows says nothing
        ({}, {"probe": 2e-3, "load": 7.0}, None),
    ],
)
def test_a_measurement_that_is_off_is_taken_again(quiet, changes, now, why):
    state, found = quiet
    state.update(now)
    reason = measurement.why_measure_again(found(**changes))
    assert reason is None if why is None else why in reason


def test_age_and_load_are_noted(quiet):
    state, found = quiet
    assert measurement.measurement_notes(found()) == []
    assert "measured 12 days ago" in measurement.measurement_notes(found(days=12))[0]
    assert "while other programs ran" in measurement.measurement_notes(found(load=5.0))[0]
    state["load"] = 7.5
    (note,) = measurement.measurement_notes(found())
    assert note.startswith("this machine is busy (load 7.5 on 8 cores)")


def test_the_probe_is_quick_and_repeatable():
    seconds = [measurement.probe_seconds() for _ in range(3)]
    assert 1e-7 < min(seconds) < 0.1
    assert 30 * min(seconds) < 0.5
