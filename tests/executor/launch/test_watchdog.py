"""A hang ends with the rank that is missing and the collective where it is missed."""

import hashlib
import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from cost_models.plan.plan import Plan
from executor.activity import ACTIVITY, ActivityLog
from executor.checkpoint.format.index import FileEntry, check_file
from executor.compat import default_store
from executor.config.training_options import TrainingOptions
from executor.data import DataOptions, open_corpus
from executor.launch import rank_tasks
from executor.launch.hang_report import HangReport, explain_hang
from executor.launch.watchdog import StallTimer, Watchdog, supervised
from executor.processes import fork as forked
from executor.processes.fork import run_forked
from executor.processes.reporter import Reporter
from executor.training import trainer as train
from executor.training.evaluation import evaluate
from hardware_profiles.errors import RunError
from tests.executor.tiny import tiny

DATA = Plan(data_parallel=2, zero_stage=2, micro_batch_size=1, num_microbatches=2)
PIPELINE = Plan(pipeline_parallel=2, micro_batch_size=1, num_microbatches=2)
SECONDS = 2.0  # after which a hang is one
PROCESSES = ("process 10, a", "process 11, a", "process 20, b")


def report(rank, waits, *, entered, last="data", step=4, **more):
    values = {
        "doing": "backward of micro-batch 1",
        "where": "executor/training/trainer.py:1 (step)",
        "last_kind": "all_reduce",
        "members": {axis: [0, 1, 2] for axis in entered},
        "sent": {},
        "awaited": {},
        "left_out": {},
        "left_out_of": step,
        **more,
    }
    return HangReport(rank=rank, step=step, waits=waits, entered=entered, last=last, **values)


def test_a_rank_that_does_not_come_is_named():
    reports = [report(0, True, entered={"data": 3}), report(2, True, entered={"data": 3})]
    late = report(1, False, entered={"data": 2}, where="executor/data.py:8 (batch)")
    said = explain_hang([*reports, late], PROCESSES, 30.0)
    assert said == (
        "hang: rank 1 is missing in all_reduce (data) of step 4, backward of micro-batch 1, where "
        "rank 0, 2 waited for 30 s; it is in executor/data.py:8 (batch), after all_reduce (data) "
        "of step 4, backward of micro-batch 1"
    )


def test_a_rank_that_does_not_answer_is_named():
    reports = [report(rank, True, entered={"data": 3}) for rank in (0, 1)]
    said = explain_hang(reports, PROCESSES, 30.0)
    assert said.startswith("hang: no answer from rank 2 (process 20, b): stopped, or its machine")
    assert "waited in all_reduce (data) of step 4" in said


def test_who_waits_for_whom_leads_to_the_one_that_does_not_wait():
    first = report(0, True, entered={"tensor": 1}, members={"tensor": [0, 1]}, last="tensor")
    second = report(1, True, entered={}, awaited={"2": 3}, last="pipeline", last_kind="recv")
    third = report(2, False, entered={}, sent={"1": 2}, last="pipeline", last_kind="send")
    said = explain_hang([first, second, third], PROCESSES, 30.0)
    assert said.startswith("hang: rank 2 is missing in recv (pipeline)")


def test_all_ranks_in_the_same_collective_blame_the_network():
    said = explain_hang([report(r, True, entered={"data": 3}) for r in range(3)], PROCESSES, 30.0)
    assert said.startswith("hang: every rank entered all_reduce (data)")


def test_ranks_in_a_circle_disagree():
    both = {"data": [0, 1], "world": [0, 1]}
    one = report(0, True, entered={"data": 3}, members={"data": [0, 1]})
    two = report(
        1, True, entered={"data": 2, "world": 1}, members={"data": [0, 1], "world": [0, 1]}
    )
    said = explain_hang([one, two], PROCESSES[:2], 30.0)
    assert said.startswith("hang: the ranks do not enter the same collectives (for 30 s): rank 0")
    guilty = report(
        *(1, True),
        entered={"data": 2, "world": 1},
        members=both,
        last="world",
        left_out={"data": 1},
    )
    said = explain_hang([one, guilty], PROCESSES[:2], 30.0)
    assert said.startswith("hang: rank 1 left out all_reduce (data) of step 4")
    assert "it went on to all_reduce (world)" in said


def test_every_collective_leaves_a_crumb_and_the_originals_come_back():
    def calls(rank):
        import torch

        activity, before = ActivityLog(), dist.ProcessGroup.allreduce
        with activity.recording():
            dist.all_reduce(torch.ones(2))
            if rank == 0:
                dist.send(torch.ones(2), 1)
            else:
                dist.recv(torch.ones(2), 0)
            dist.barrier()
        assert dist.ProcessGroup.allreduce is before
        dist.all_reduce(torch.ones(2))
        assert activity.waits == 0
        return [[call.kind, call.peer] for call in activity.calls]

    first, second = run_forked(calls, 2)
    assert first == [["all_reduce", None], ["send", 1], ["barrier", None]]
    assert second == [["all_reduce", None], ["recv", 0], ["barrier", None]]


def test_time_in_which_this_process_was_stopped_is_no_waiting():
    stillness = StallTimer(1.0, "a", 0.0)
    assert [stillness.update(now, "a") for now in (1.0, 2.0, 600.0, 601.0)] == [1, 2, 4, 5]
    assert stillness.update(602.0, "b") == 0


def test_a_rank_that_has_work_of_its_own_lets_the_others_wait():
    stillness = StallTimer(1.0, "a", 0.0)
    found = [
        stillness.update(now, "a", beats) for now, beats in enumerate((0, 0, 3, 3, None, 3, 4))
    ]
    assert found == [0, 1, 0, 1, 2, 3, 0]


def _sleep(*_):
    time.sleep(60)


def _stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave_out(*_):
    pass


def _train(rank, plan, how):
    """Train; in the fourth step rank 1 does something else than to add up loss and norm."""
    file = tiny(plan, precision="fp32", optimizer="adamw")
    settings = {"vocab_size": file.model.vocab_size, "seq_len": file.workload.seq_len}
    corpus = open_corpus(DataOptions(), seed=0, **settings)
    steps, dogs, original, start = [0], [], train.dist.all_reduce, Watchdog.start

    def patient(dog):  # a busy machine may take its time until then
        dogs.append(dog)
        dog.seconds = 60.0
        start(dog)

    def fourth(tensor, *args, **kwargs):
        steps[0] += 1
        if steps[0] == 4:
            dogs[0].seconds = SECONDS
        (how if steps[0] == 4 and rank == 1 else original)(tensor, *args, **kwargs)

    Watchdog.start = patient
    train.dist = type("dist", (), {"all_reduce": staticmethod(fourth)})
    training = TrainingOptions(steps=6, learning_rate=1e-3, seed=0)
    tell = Reporter(lambda event: None, forked.fail)
    with supervised(tell, SECONDS) as ready:
        return rank_tasks.train(file, corpus, training, tell, ready=ready)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("plan", "how", "message"),
    [
        (
            DATA,
            _sleep,
            r"hang: rank 1 is missing in all_reduce \(\w+\) of step 4.*waited for ([2-9]|\d\d) s",
        ),
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


def _beat(tensor, *args, **kwargs):
    for _ in range(12):
        ACTIVITY.beat()
        time.sleep(0.25)
    dist.all_reduce(tensor, *args, **kwargs)


def _stop_all(tensor, *args, **kwargs):
    """Stop both ranks for longer than a hang takes, as a scheduler does that suspends a job."""
    other = default_store().get("watchdog/process/0").decode().split()[1].rstrip(",")
    both = f"{other} {os.getpid()}"
    with subprocess.Popen(["sh", "-c", f"kill -STOP {both}; sleep 4; kill -CONT {both}"]):
        dist.all_reduce(tensor, *args, **kwargs)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", [_beat, _stop_all])
def test_what_is_no_hang_goes_on(how):
    assert run_forked(_train, 2, DATA, how, timeout=50) == ["finished"] * 2


def _setup(rank, plan):
    """Return the days that torch waits in a collective of each group, and signs of life."""
    file = tiny(plan, precision="fp32")
    settings = {"vocab_size": file.model.vocab_size, "seq_len": file.workload.seq_len}
    tell = Reporter(lambda event: None, forked.fail)
    with supervised(tell, 60.0):
        beats = [ACTIVITY.beats]
        trainer = train.Trainer(file)
        beats.append(ACTIVITY.beats)
        evaluate(trainer, open_corpus(DataOptions(), seed=0, **settings), 1)
        beats.append(ACTIVITY.beats)
        groups = dist.distributed_c10d._world.pg_map
        limits = [g._get_backend(torch.device("cpu")).options._timeout.days for g in groups]
        trainer.close()
        return limits, beats


@pytest.mark.distributed
def test_nobody_gives_up_before_the_watchdog_and_reading_is_a_sign_of_life():
    plan = Plan(pipeline_parallel=2, tensor_parallel=2, num_microbatches=2)
    for limits, (before, made, evaluated) in run_forked(_setup, 4, plan):
        assert len(limits) > 3
        assert set(limits) == {365}
        assert before < made < evaluated


def test_checking_a_file_is_a_sign_of_life(tmp_path):
    (tmp_path / "part").write_bytes(b"abc")
    beats = []
    entry = FileEntry(3, hashlib.sha256(b"abc").hexdigest())
    check_file(tmp_path / "part", entry, lambda: beats.append(1))
    assert beats == [1]
