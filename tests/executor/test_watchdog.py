"""A hang ends with the rank that is missing and the collective where it is missed."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from cost_models.plan import Plan
from executor import forked, session, train
from executor.breadcrumbs import Trail
from executor.data import DataOptions, open_corpus
from executor.forked import run_forked
from executor.hang import Report, explain
from executor.learning_rate import LearningRate
from executor.reporter import Reporter
from executor.training import Training
from executor.watchdog import supervised
from hardware_profiles.errors import RunError
from tests.executor.tiny import tiny

DATA = Plan(data_parallel=2, zero_stage=2, micro_batch_size=1, num_microbatches=2)
PIPELINE = Plan(pipeline_parallel=2, micro_batch_size=1, num_microbatches=2)
PROCESSES = ("process 10, a", "process 11, a", "process 20, b")


def report(rank, waits, *, entered, last="data", step=4, **more):
    values = {
        "doing": "backward of micro-batch 1",
        "where": "executor/train.py:1 (step)",
        "last_kind": "all_reduce",
        "members": {axis: [0, 1, 2] for axis in entered},
        "sent": {},
        "awaited": {},
        "left_out": {},
        "left_out_of": step,
        **more,
    }
    return Report(rank=rank, step=step, waits=waits, entered=entered, last=last, **values)


def test_a_rank_that_does_not_come_is_named():
    reports = [report(0, True, entered={"data": 3}), report(2, True, entered={"data": 3})]
    late = report(1, False, entered={"data": 2}, where="executor/data.py:8 (batch)")
    said = explain([*reports, late], PROCESSES, 30.0)
    assert said == (
        "hang: rank 1 is missing in all_reduce (data) of step 4, backward of micro-batch 1, where "
        "rank 0, 2 waited for 30 s; it is in executor/data.py:8 (batch), after all_reduce (data) "
        "of step 4, backward of micro-batch 1"
    )


def test_a_rank_that_does_not_answer_is_named():
    reports = [report(rank, True, entered={"data": 3}) for rank in (0, 1)]
    said = explain(reports, PROCESSES, 30.0)
    assert said.startswith("hang: no answer from rank 2 (process 20, b): stopped, or its machine")
    assert "waited in all_reduce (data) of step 4" in said


def test_who_waits_for_whom_leads_to_the_one_that_does_not_wait():
    first = report(0, True, entered={"tensor": 1}, members={"tensor": [0, 1]}, last="tensor")
    second = report(1, True, entered={}, awaited={"2": 3}, last="pipeline", last_kind="recv")
    third = report(2, False, entered={}, sent={"1": 2}, last="pipeline", last_kind="send")
    said = explain([first, second, third], PROCESSES, 30.0)
    assert said.startswith("hang: rank 2 is missing in recv (pipeline)")


def test_all_ranks_in_the_same_collective_blame_the_network():
    said = explain([report(r, True, entered={"data": 3}) for r in range(3)], PROCESSES, 30.0)
    assert said.startswith("hang: every rank entered all_reduce (data)")


def test_ranks_in_a_circle_disagree():
    both = {"data": [0, 1], "world": [0, 1]}
    one = report(0, True, entered={"data": 3}, members={"data": [0, 1]})
    two = report(
        1, True, entered={"data": 2, "world": 1}, members={"data": [0, 1], "world": [0, 1]}
    )
    said = explain([one, two], PROCESSES[:2], 30.0)
    assert said.startswith("hang: the ranks do not enter the same collectives (for 30 s): rank 0")
    guilty = report(
        *(1, True),
        entered={"data": 2, "world": 1},
        members=both,
        last="world",
        left_out={"data": 1},
    )
    said = explain([one, guilty], PROCESSES[:2], 30.0)
    assert said.startswith("hang: rank 1 left out all_reduce (data) of step 4")
    assert "it went on to all_reduce (world)" in said


def test_every_collective_leaves_a_crumb_and_the_originals_come_back():
    def crumbs(rank):
        import torch

        trail, before = Trail(), dist.ProcessGroup.allreduce
        with trail.recorded():
            dist.all_reduce(torch.ones(2))
            if rank == 0:
                dist.send(torch.ones(2), 1)
            else:
                dist.recv(torch.ones(2), 0)
            dist.barrier()
        assert dist.ProcessGroup.allreduce is before
        dist.all_reduce(torch.ones(2))
        assert trail.waits == 0
        return [[crumb.kind, crumb.peer] for crumb in trail.crumbs]

    first, second = run_forked(crumbs, 2)
    assert first == [["all_reduce", None], ["send", 1], ["barrier", None]]
    assert second == [["all_reduce", None], ["recv", 0], ["barrier", None]]


def _sleep(*_):
    time.sleep(60)


def _stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave_out(*_):
    pass


def _train(rank, plan, how):
    file = tiny(plan, precision="fp32", optimizer="adamw")
    settings = {"vocab_size": file.model.vocab_size, "seq_len": file.workload.seq_len}
    corpus = open_corpus(DataOptions(), seed=0, **settings)
    steps = [0]
    if rank == 1:  # what it does in the fourth step, instead of adding up loss and norm
        original = train.dist.all_reduce

        def faulty(tensor, *args, **kwargs):
            steps[0] += 1
            (how if steps[0] == 4 else original)(tensor, *args, **kwargs)

        train.dist = type("dist", (), {"all_reduce": staticmethod(faulty)})
    training = Training(steps=6, learning_rate=LearningRate(1e-3), seed=0)
    tell = Reporter(lambda event: None, forked.fail)
    with supervised(tell, 2.0) as ready:
        return session.train(file, corpus, training, tell, ready=ready)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "how", "message"),
    [
        (DATA, _sleep, r"hang: rank 1 is missing in all_reduce \(\w+\) of step 4.*waited for 2 s"),
        pytest.param(
            *(PIPELINE, _sleep, r"hang: rank 1 is missing in all_reduce \(\w+\) of step 4"),
            marks=pytest.mark.slow,
        ),
        (DATA, _leave_out, r"hang: rank 1 left out all_reduce \(\w+\) of step 4"),
        (DATA, _stop, r"hang: no answer from rank 1 \(process \d+, .*\): stopped"),
    ],
)
def test_a_hang_names_the_rank_and_the_collective(plan, how, message):
    with pytest.raises(RunError, match=message):
        run_forked(_train, 2, plan, how, timeout=50)
