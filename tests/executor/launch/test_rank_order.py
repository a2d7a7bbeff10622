"""Ranks on accelerators in another order than their own: the same training, on other links."""

import json
import os
import socket
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, write_plan_file
from executor.__main__ import main
from executor.parallel import mesh
from executor.processes.fork import run_forked
from executor.verify.parity import Verification, verify
from hardware_profiles.errors import InputError
from tests.executor.tiny import tiny

pytestmark = pytest.mark.distributed

PLAN = Plan(data_parallel=2, tensor_parallel=2, zero_stage=2, num_microbatches=2)
PIPED = Plan(1, 2, 2, sequence_parallel=True, num_microbatches=2)
ORDER = (0, 3, 1, 2)
BEGIN = dist.init_process_group


def ordered(plan: Plan, order: tuple[int, ...] | None, **options: Any) -> PlanFile:
    """Return a plan file whose ranks work on accelerators in an order."""
    file = tiny(plan, **options)
    return replace(file, cluster=replace(file.cluster, rank_order=order))


def as_torchrun(file: PlanFile, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Verify a plan in processes that have torchrun's environment and no process group yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # of the fork
    return run_forked(_as_process, file.plan.world_size, file, port, timeout=120)


def _as_process(process: int, file: PlanFile, port: int) -> dict[str, Any]:
    dist.init_process_group = BEGIN
    count = str(file.plan.world_size)
    os.environ |= {"RANK": str(process), "WORLD_SIZE": count, "LOCAL_RANK": str(process)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = verify(file, seed=1)
    grid = mesh.ProcessGrid.of(file.plan, mesh.local_device())
    neighbours = mesh.gather_json(process, grid.device, grid.group("tensor"))
    answer = None if found is None else asdict(found)
    return {"rank": dist.get_rank(), "tensor": neighbours, "verification": answer}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLAN, pytest.param(PIPED, marks=pytest.mark.slow)])
def test_processes_join_in_the_order_and_train_as_one_process(plan, monkeypatch):
    found = as_torchrun(ordered(plan, ORDER, num_layers=2), monkeypatch)
    assert [answer["rank"] for answer in found] == [ORDER.index(process) for process in range(4)]
    # tensor-parallel neighbours: ranks 0 and 1, 2 and 3
    assert [answer["tensor"] for answer in found] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    verification = Verification(**found[0]["verification"])
    assert verification.passed, verification


@pytest.mark.slow
def test_without_an_order_processes_keep_their_numbers(monkeypatch):
    found = as_torchrun(ordered(PLAN, None, num_layers=2), monkeypatch)
    assert [answer["rank"] for answer in found] == [0, 1, 2, 3]
    assert [answer["tensor"] for answer in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_an_order_of_other_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="rank_order has 4 ranks, but 2 were started"):
        mesh.grid_rank(ORDER)


@pytest.mark.slow
def test_torchrun_starts_ranks_in_the_order(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    plan = Plan(data_parallel=3, zero_stage=2, num_microbatches=2)
    write_plan_file(tmp_path / "plan.json", ordered(plan, (0, 2, 1), num_layers=2))
    assert main(["run", "plan.json", "--verify", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["passed"]
