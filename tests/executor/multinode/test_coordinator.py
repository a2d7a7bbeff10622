"""Several machines: what they say about each other, and real runs over two network namespaces."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.plan.plan import Plan
from cost_models.plan_file import read_plan_file, write_plan_file
from executor.__main__ import main
from executor.launch.start_ranks import LocalRanks
from executor.multinode.nodes import (
    SAME,
    OpenPort,
    differences,
    disk_problem,
    interface_of,
    own_address,
    unreachable,
)
from executor.processes.reporter import Supervision
from hardware_profiles.cluster.parse import parse_cluster
from tests.executor.tiny import tiny

TWO_HOSTS = Path(__file__).with_name("two_hosts.sh")
STEPS = 12  # enough that none is killed too late
PLAN = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2, num_microbatches=2)


def _namespaces_work() -> bool:
    if sys.platform != "linux":
        return False
    command = ["unshare", "-Urn", "sh", "-c", "ip link add cable0 type veth peer name cable1"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(
    not _namespaces_work(), reason="network namespaces cannot be made here"
)


@pytest.fixture
def plan(tmp_path):
    file = tiny(PLAN, vocab_size=256, precision="fp32", optimizer="adamw")
    path = tmp_path / "plan.json"
    write_plan_file(path, replace(file, cluster=parse_cluster("2x1xA100-80GB")))
    return path


def node(**changes):
    return dict.fromkeys(SAME, "1") | {"host": "a", "problem": None} | changes


# --- what nodes say ------------------------------------------------------------------------------


def test_equal_nodes_differ_in_nothing():
    assert differences({0: node(), 1: node(host="b")}) == []


def test_who_differs_from_the_most_is_named():
    nodes = {0: node(torch="2.12.0"), 1: node(host="b"), 2: node(host="c", gpu="7 x H100")}
    assert differences(nodes) == [
        "torch: node 0 (a) has 2.12.0, the others 1",
        "the GPUs: node 2 (c) has 7 x H100, the others 1",
    ]


def test_of_two_the_first_counts_and_problems_are_passed_on():
    nodes = {0: node(plan="aaa"), 1: node(plan="bbb", host="b", problem="2 GPUs are needed")}
    assert differences(nodes) == [
        "the plan (SHA-256): node 1 (b) has bbb, the others aaa",
        "node 1 (b): 2 GPUs are needed",
    ]


def test_a_full_disk_is_said_before_the_start(tmp_path):
    assert disk_problem(tmp_path, 1.0) is None
    assert "a checkpoint needs about" in disk_problem(tmp_path, 1e18)


def test_ports_that_cannot_be_reached_are_named():
    with OpenPort("127.0.0.1") as port:
        number = port.number
        assert unreachable({1: {"address": "127.0.0.1", "port": number}}) == []
    found = unreachable({1: {"address": "127.0.0.1", "port": number}})
    assert found == [f"node 1 at 127.0.0.1:{number} (Connection refused)"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_interface_of_an_address_is_found():
    assert own_address("127.0.0.1", 29500) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--node-rank", "1"], "--node-rank needs --nodes"),
        (["--elastic"], "--elastic needs --nodes"),
        (["--nodes", "2"], "--nodes 2 needs --rendezvous HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "a:1"], "--node-rank is missing"),
        (["--nodes", "2", "--rendezvous", "a"], "'a' (must be HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "a:1", "--node-rank", "2"], "--node-rank = 2 (must be 0"),
        (["--nodes", "2", "--rendezvous", "a:1", "--launcher", "fork"], "--launcher torchrun"),
        (["--nodes", "2", "--rendezvous", "a:1", "--verify"], "run on one machine"),
        (["--hang-timeout", "0.5"], "'0.5' (must be a number from 1, or 0 for never)"),
        (["--preemption-signal", "KILL"], "'KILL' (must be one of SIGTERM, SIGUSR1"),
    ],
)
def test_bad_options_are_one_line(words, said, plan, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert main(["run", str(plan), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shardplan: ")
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with OpenPort("127.0.0.1") as port:
        where = f"127.0.0.1:{port.number}"
    place = ["--nodes", "2", "--rendezvous", where, "--node-timeout", "1"]
    assert main(["run", str(plan), *place, "--node-rank", "0"]) == 2
    assert f"node 1 did not join at {where} within 1 s" in capsys.readouterr().err
    assert main(["run", str(plan), *place, "--node-rank", "1"]) == 2
    assert f"--rendezvous {where}: node 0 does not answer there" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "were_ended"), [("0.2", False), ("60", True)])
def test_ranks_that_fail_by_themselves_are_not_ended(seconds, were_ended, monkeypatch):
    monkeypatch.setattr("executor.launch.start_ranks.OWN_END_SECONDS", 2.0)
    local = LocalRanks(1, (), {}, relay=Supervision().relay(1))
    with subprocess.Popen(["sleep", seconds], text=True) as local.started:
        local.end()
    assert local.were_ended is were_ended


# --- two hosts -----------------------------------------------------------------------------------


def _two_hosts(first, second, cwd):
    return subprocess.run(
        ["unshare", "-Urn", "bash", TWO_HOSTS, first, second],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )


def _command(plan, rank, *options):
    words = [sys.executable, "-m", "executor", "run", plan, "--nodes", 2, "--node-rank", rank]
    words += ["--rendezvous", "10.77.0.1:29500", "--output", "out", *options]
    return " ".join(map(str, words))


def _losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


@pytest.mark.slow
@pytest.mark.distributed
@needs_namespaces
def test_a_node_with_another_plan_is_named(plan, tmp_path):
    (tmp_path / "other.json").write_text(plan.read_text() + "\n")
    done = _two_hosts(_command(plan, 0), _command("other.json", 1), tmp_path)
    assert done.returncode == 2
    assert re.search(r"the plan \(SHA-256\): node 1 \(.*\) has \w+, the others", done.stderr)
    assert "second host: exit code 2" in done.stderr


@pytest.mark.slow(seconds=60)
@pytest.mark.distributed
@needs_namespaces
def test_a_node_that_does_not_come_back_is_planned_around(plan, tmp_path):
    options = ("--steps", STEPS, "--checkpoint-every", 2, "--elastic", "--node-timeout", 15)
    killed = (
        f"{_command(plan, 1, *options)} & node=$!; "
        "until test -d out/checkpoints/step-00000002; do sleep 0.1; done; kill -9 $node; wait $node"
    )
    done = _two_hosts(_command(plan, 0, *options), killed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 nodes remain: continuing with out/plan-for-1-ranks.json" in done.stderr
    assert re.search(r"resumed from out/checkpoints/step-\d+ ", done.stderr)
    out = tmp_path / "out"
    new, old = read_plan_file(out / "plan-for-1-ranks.json"), read_plan_file(out / "plan.json")
    assert new.plan.world_size == 1
    assert new.workload == old.workload  # the batch is kept
    assert (out / "plan.json").read_bytes() == plan.read_bytes()
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    alone = ["run", str(plan), "--steps", str(STEPS), "--launcher", "fork"]
    assert main([*alone, "--output", str(tmp_path / "whole")]) == 0
    losses, expected = _losses(out), _losses(tmp_path / "whole")
    assert list(losses) == list(expected) == list(range(1, STEPS + 1))
    for step, loss in expected.items():  # another order of the sums, in fp32
        assert losses[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow(seconds=60)
@pytest.mark.distributed
@needs_namespaces
def test_all_nodes_begin_again_when_a_rank_is_killed(plan, tmp_path):
    options = ("--steps", STEPS, "--checkpoint-every", 2, "--max-restarts", 1)
    killer = (
        f"{_command(plan, 1, *options)} & node=$!; "
        "until test -d out/checkpoints/step-00000002; do sleep 0.1; done; "
        "torchrun=$(pgrep -P $node | head -1); kill -9 $(pgrep -P $torchrun | head -1); wait $node"
    )
    done = _two_hosts(_command(plan, 0, *options), killer, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "attempt 1 ended: node 1: rank 1: ended by signal 9" in done.stderr
    assert re.search(r"resumed from out/checkpoints/step-\d+ ", done.stderr)
    assert list(_losses(tmp_path / "out")) == list(range(1, STEPS + 1))
