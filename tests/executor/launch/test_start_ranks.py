"""The command line: bad input is one line, runs end to end, failures and interruptions end all."""

import json
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch.distributed as dist

import executor.__main__
from cost_models.plan.plan import Plan
from cost_models.plan_file import write_plan_file
from executor.__main__ import main
from executor.launch import preflight, start_ranks
from executor.launch.start_ranks import run_by_fork
from executor.processes.fork import describe_failure
from executor.processes.reporter import Supervision
from executor.processes.signals import REPEAT_SECONDS, Relay
from executor.run import show
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import RunError
from tests.executor.process_tree import children, descendants, wait_until_ended
from tests.executor.tiny import tiny

TEXT = "The keeper lit the lamp at dusk and put it out at dawn.\n" * 30
FOUR = Plan(data_parallel=2, tensor_parallel=2, micro_batch_size=4)
TWO = Plan(pipeline_parallel=2, micro_batch_size=4, num_microbatches=2)
WARM_UP = ("--lr-schedule", "cosine", "--warmup-steps", 20)
CLUSTER = parse_cluster("8xA100-80GB")


@pytest.fixture
def write(tmp_path):
    """Write a plan (and a text beside it) and return its path."""

    def write(plan, name="plan.json", prediction=None, **options):
        (tmp_path / "text.txt").write_text(TEXT)
        file = tiny(plan, vocab_size=256, precision="fp32", optimizer="adamw", **options)
        file = replace(file, cluster=CLUSTER, prediction=prediction or {})
        write_plan_file(tmp_path / name, file)
        return tmp_path / name

    return write


@contextmanager
def _started(*arguments, cwd):
    """Yield a fork of this process that is ``python -m executor``, and the lines of its stderr.

    A fork has imported torch already. Signals stop it, even where the tests ignore them (a job
    behind &, nohup).
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # Python 3.12: of threads, see executor.processes.fork
        warnings.simplefilter("ignore", DeprecationWarning)
        started = multiprocessing.get_context("fork").Process(
            target=_execute, args=([*map(str, arguments)], cwd, writer)
        )
        started.start()
    os.close(writer)
    try:
        with open(reader) as lines:
            yield started, lines
    finally:
        started.kill()
        started.join()


def _execute(arguments, cwd, stderr):
    os.chdir(cwd)
    os.dup2(stderr, 2)
    os.close(stderr)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.argv = ["executor", *arguments]
    runpy.run_path(executor.__main__.__file__, run_name="__main__")


def _after_the_first_step(lines):
    assert any(line.startswith("step") for line in lines)


def _code(started):
    started.join(timeout=120)
    return started.exitcode


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Execute ``run`` in this process; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(["run", *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def _torchrun(*arguments, cwd):
    """Run two ranks as a user does who starts torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "executor", "run", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300
    )


# --- bad input ---------------------------------------------------------------------------------


def _fails(capsys, message, *arguments, code=2):
    assert main([str(argument) for argument in arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardplan: ")
    assert len(err.splitlines()) == 1
    assert re.search(message, err), err


def test_bad_arguments_and_files_are_one_line(write, tmp_path, capsys):
    plan = write(FOUR)
    (tmp_path / "empty.txt").touch()
    full = tmp_path / "full"
    full.mkdir()
    (full / "run.json").touch()
    _fails(capsys, "Missing command; see shardplan --help", *[])
    _fails(capsys, "No such option: --foo; see shardplan run --help", "run", plan, "--foo")
    _fails(capsys, r"'--steps': 0 \(must be a whole number from 1 to", "run", plan, "--steps", 0)
    _fails(capsys, "--eval-every 5: needs --eval-data", "run", plan, "--eval-every", 5)
    _fails(capsys, r"--warmup-steps 20: leaves none", "run", plan, *WARM_UP)
    _fails(
        capsys, r"'--beta2': 1.0 \(must be a number from 0 to below 1\)", "run", plan, "--beta2", 1
    )
    _fails(capsys, r"'--learning-rate': nan \(must be", "run", plan, "--learning-rate", "nan")
    _fails(capsys, r"'--epsilon': 0.0 \(must be a number above 0", "run", plan, "--epsilon", "0")
    _fails(capsys, r"10000001 \(must be .* to 10,000,000", "run", plan, "--steps", 10_000_001)
    _fails(capsys, r"nope\.json: no such file", "run", tmp_path / "nope.json")
    _fails(capsys, r"nope\.txt: no such file", "run", plan, "--data", tmp_path / "nope.txt")
    _fails(capsys, r"empty\.txt: is empty", "run", plan, "--data", tmp_path / "empty.txt")
    _fails(capsys, "full/config.json: no such file", "run", plan, "--init-from", full)
    _fails(capsys, "is not empty; choose another --output", "run", plan, "--output", full)
    _fails(
        capsys,
        r"'--processes': -1 \(must be a whole number from 1 to 128\)",
        "measure",
        "--processes=-1",
    )
    _fails(capsys, "/dev/zero: is not a regular file", "run", "/dev/zero")
    _fails(capsys, "plan.json: is a file; name a folder", "run", plan, "--output", plan)


def test_a_plan_that_was_edited_by_hand_is_refused(write, tmp_path, capsys):
    text = write(FOUR).read_text()
    changed = tmp_path / "changed.json"

    def edit(old, new):
        assert old in text
        changed.write_text(text.replace(old, new))
        return changed

    _fails(
        capsys,
        r"changed\.json: .*= 12, but workload.global_batch_size = 8",
        "run",
        edit('"data_parallel": 2', '"data_parallel": 3'),
    )
    _fails(
        capsys,
        r"changed\.json: tensor_parallel = 3 does not divide",
        "run",
        edit('"tensor_parallel": 2', '"tensor_parallel": 3'),
    )
    _fails(capsys, "not JSON", "run", edit('"plan": {', '"plan": {,'))
    _fails(capsys, "unknown key 'zero_stag'", "run", edit('"zero_stage"', '"zero_stag"'))
    _fails(
        capsys,
        r"changed\.json: .*precision fp8: .*fp8 only for whole matrices",
        "run",
        edit('"precision": "fp32"', '"precision": "fp8"'),
    )


def test_a_world_of_another_size_is_refused(write, monkeypatch, capsys):
    plan = write(Plan(data_parallel=8, micro_batch_size=1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _fails(capsys, "the plan needs 8 ranks, but 2 were started", "run", plan)
    monkeypatch.setenv("WORLD_SIZE", "two")
    _fails(capsys, "WORLD_SIZE = 'two'", "run", plan)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(preflight, "count_gpus", lambda: 1)
    _fails(capsys, "8 ranks were started on this machine, which has 1 GPUs", "run", plan)


def test_a_machine_that_is_too_small_is_refused(write, monkeypatch, capsys):
    plan = write(FOUR)
    monkeypatch.setattr(preflight, "count_gpus", lambda: 2)
    _fails(capsys, "the plan needs 4 GPUs, this machine has 2", "run", plan)
    monkeypatch.setattr(preflight, "count_gpus", lambda: 0)
    monkeypatch.setattr(preflight, "MAX_PROCESSES", 3)
    _fails(capsys, "the plan needs 4 ranks .at most 3 processes", "run", plan)
    monkeypatch.undo()
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 1000)
    _fails(capsys, "the plan's 4 ranks need about .* of memory together", "run", plan)


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom executor.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as error:\n    assert error.code == 0\n"
        "else:\n    raise AssertionError\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    commands = ("run", "measure", "tokenize", "export", "trace-module")
    for words in (["--help"], *([command, "--help"] for command in commands)):
        subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_went_away_is_no_bug(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        show(json.dumps({"steps": []}))
        broken.flush()


# --- runs --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_trains_measures_and_keeps(write, run, tmp_path):
    plan = write(replace(FOUR, zero_stage=1))
    text = tmp_path / "text.txt"
    arguments = ("--data", text, "--steps", 12, "--launcher", "fork", "--json", "--eval-data", text)
    arguments += ("--lr-schedule", "cosine", "--warmup-steps", 2, "--min-lr-ratio", 0.5)
    arguments += ("--eval-every", 5, "--eval-batches", 2, "--sample-every", 4)
    code, out, err = run(plan, *arguments)
    assert code == 0, err
    document = json.loads(out)
    (kept,) = tmp_path.glob("runs/*/run.json")
    assert json.loads(kept.read_text()) == document
    assert document["status"] == "finished"
    assert [found["step"] for found in document["evaluations"]] == [5, 10, 12]
    assert document["evaluations"][-1]["loss"] < document["evaluations"][0]["loss"]
    rates = [step["learning_rate"] for step in document["steps"]]
    assert rates[:3] == [5e-4, 1e-3, 1e-3]
    assert 5e-4 < rates[-1] < 6e-4
    text = kept.with_name("metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line for line in lines if line["kind"] == "step"] == document["steps"]
    assert [line["step"] for line in lines if "memory_bytes" in line] == [5, 9]
    timeline = json.loads(kept.with_name("timeline.json").read_text())
    assert timeline["step"] == 9
    assert [rank["rank"] for rank in timeline["ranks"]] == [0, 1, 2, 3]
    for rank in timeline["ranks"]:
        order = [(each["kind"], each["microbatch"]) for each in rank["passes"]]
        assert order[:2] == [("forward", 0), ("backward", 0)]
        times = [each[end] for each in rank["passes"] for end in ("begin", "end")]
        assert times == sorted(times)
        assert any(wait["operation"] == "all_reduce" for wait in rank["waits"])
    losses = [step["loss"] for step in document["steps"]]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert "step 12/12  loss" in err
    assert "the weights will not be kept (--checkpoint-every N keeps them)" in err
    assert "no GPU on this machine: the plan for 8xA100-80GB runs on 4 CPU processes" in err
    measured = document["measured"]
    assert measured["timed_steps"] == 10
    assert measured["step_seconds"] > 0
    assert 0 < measured["exposed_communication_seconds"]["all_reduce"] < measured["step_seconds"]
    assert measured["mfu"] is None  # of a GPU's peak, on a CPU
    assert [rank["rank"] for rank in measured["ranks"]] == [0, 1, 2, 3]
    for rank in measured["ranks"]:
        memory = rank["memory"]
        assert sum(memory["parts"].values()) == memory["peak_bytes"]
        assert memory["parts"]["optimizer"] > 1.9 * memory["parts"]["weights"]
        assert {record["axis"] for record in rank["communication"]} == {"data", "tensor", "world"}
    parts = {row["name"].strip(): row["difference"] for row in document["comparison"]}
    assert abs(parts["weights"]) < 0.001  # gathered ones are what ZeRO-1 predicts
    assert abs(parts["optimizer states"]) < 0.001
    assert document["plan"]["plan"]["tensor_parallel"] == 2
    assert len(document["plan"]["sha256"]) == 64
    assert document["options"]["seed"] == 0


def test_a_process_with_a_gpu_is_not_forked(write, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "count_gpus", lambda: 2)
    _fails(
        capsys, "--launcher fork: a process that uses a GPU", "run", write(TWO), "--launcher=fork"
    )


@pytest.mark.slow(seconds=30)
@pytest.mark.distributed
def test_the_same_plan_gives_the_same_losses_however_ranks_start(write, run, tmp_path):
    arguments = (write(TWO), "--steps", 3, "--json", "--output")
    documents = []
    for launcher in ("fork", "torchrun"):
        code, out, err = run(*arguments, launcher, "--launcher", launcher)
        assert code == 0, err
        documents.append(json.loads(out))
    *_, started, _, _, last = err.splitlines()
    assert started == "starting torchrun --nproc-per-node 2 ..."
    assert last.startswith("step 3/3  loss")
    environment = documents[1]["environment"]
    assert (environment["launcher"], environment["backend"]) == ("torchrun", "gloo")
    done = _torchrun(*arguments, "own", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    documents.append(json.loads(done.stdout))
    losses = [[step["loss"] for step in document["steps"]] for document in documents]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_wrong_number_of_ranks_is_one_line(write, tmp_path):
    done = _torchrun(write(FOUR), cwd=tmp_path)
    ours = done.stderr.split("ChildFailedError")[0]
    assert ours.count("shardplan: the plan needs 4 ranks") == 1
    assert "KeyboardInterrupt" not in done.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_verify_compares_with_a_single_process(write, run, tmp_path):
    code, out, err = run(write(FOUR), "--verify", "--launcher", "fork", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["loss_difference"] < 1e-9
    assert document["gradient_difference"] < 1e-9
    size = document["collective_bytes"]
    assert size["predicted"] == size["counted"] > 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_a_loss_that_is_not_finite_ends_the_run(launcher, write, run, tmp_path):
    arguments = ("--learning-rate", 1e30, "--steps", 50, "--launcher", launcher)
    code, _, err = run(write(TWO), *arguments)
    assert code == 5
    words = r"^shardplan: step \d+: the loss is (nan|inf); it arises on rank \d in the forward pass"
    assert re.search(words, err, re.MULTILINE), err
    assert "Traceback" not in err
    (kept,) = tmp_path.glob("runs/*/run.json")
    document = json.loads(kept.read_text())
    assert document["status"] == "failed"
    assert re.search(r"the loss is (nan|inf)", document["error"])


def _checkpoints(folder):
    """Return the complete checkpoints of the only run, as the run names them."""
    found = folder.glob("runs/*/checkpoints/step-*")
    return [p.relative_to(folder) for p in found if re.fullmatch(r"step-\d+", p.name)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("launcher", "how", "code"),
    [
        ("fork", signal.SIGINT, 130),
        ("fork", signal.SIGKILL, -signal.SIGKILL),
        ("torchrun", signal.SIGINT, 130),
    ],
)
def test_an_interruption_ends_all_processes(launcher, how, code, write, tmp_path):
    arguments = ("run", write(TWO), "--steps", 100000, "--launcher", launcher)
    arguments += ("--checkpoint-every", 5)
    with _started(*arguments, cwd=tmp_path) as (started, lines):
        _after_the_first_step(lines)
        deadline = time.monotonic() + 60
        while not _checkpoints(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks = descendants(started.pid)
        assert len(ranks) >= 2
        os.kill(started.pid, how)
        assert _code(started) == code
        said = lines.read()
        if code == 130:
            newest = max(_checkpoints(tmp_path))
            first, *others = said.splitlines()[-3:]
            assert re.fullmatch(r"shardplan: interrupted after step \d+", first)
            command = shlex.join(["shardplan", *map(str, arguments)])
            assert others == [
                f"  newest checkpoint: {newest}",
                f"  go on with: {command} --resume {newest.parents[1]}",
            ]
            assert said.count("interrupted") == 1  # not by every rank
        assert "Traceback" not in said
    wait_until_ended(ranks)
    (kept,) = tmp_path.glob("runs/*/run.json")
    document = json.loads(kept.read_text())
    lines = kept.with_name("metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    assert steps == list(range(1, len(steps) + 1))
    if code == 130:
        assert document["status"] == "interrupted"
        assert document["steps_done"] == steps[-1]
        assert document["options"]["steps"] == 100000
    else:  # nothing could be written any more
        assert document["status"] == "running"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("launcher", "number", "options"),
    [
        ("fork", signal.SIGHUP, ()),
        ("torchrun", signal.SIGUSR2, ("--preemption-signal", "usr2")),
    ],
)
def test_a_signal_stops_a_run_in_good_order(launcher, number, options, write, tmp_path):
    arguments = ("run", write(TWO), "--steps", 100000, "--launcher", launcher, *options, "--json")
    with _started(*arguments, cwd=tmp_path) as (started, lines):
        _after_the_first_step(lines)
        ranks = descendants(started.pid)
        os.kill(started.pid, number)
        assert _code(started) == 6
        said = lines.read()
    assert "Traceback" not in said
    first, newest, command = said.splitlines()[-3:]
    assert first.startswith("shardplan: stopped on request after step ")
    assert newest.startswith("  newest checkpoint: runs/")
    assert command.startswith("  go on with: shardplan run ")
    (path,) = tmp_path.glob("runs/*/run.json")
    assert json.loads(path.read_text())["status"] == "stopped"
    wait_until_ended(ranks)


@pytest.mark.slow(seconds=30)
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_rank_is_started_again_and_nothing_is_lost(write, run, tmp_path):
    plan = write(TWO)
    options = ("--steps", 60, "--checkpoint-every", 10, "--max-restarts", 1, "--output")
    with _started("run", plan, *options, "killed", cwd=tmp_path) as (started, lines):
        assert any(line.startswith("step 15/") for line in lines)
        ranks = [pid for pid in descendants(started.pid) if not children(pid)]
        os.kill(max(ranks), signal.SIGKILL)
        said = lines.read()
        assert _code(started) == 0, said
    assert re.search(r"restart 1: rank \d: ended by signal 9", said)
    assert re.search(r"resumed from .*killed/checkpoints/step-0*[1-5]0", said)
    code, _, err = run(plan, *options, "whole", "--launcher", "fork")
    assert code == 0, err
    documents = [
        json.loads((tmp_path / name / "run.json").read_text()) for name in ("killed", "whole")
    ]
    assert [d["status"] for d in documents] == ["finished", "finished"]
    losses = [{step["step"]: step["loss"] for step in d["steps"]} for d in documents]
    assert losses[0][60] == losses[1][60]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_second_signal_ends_a_run_at_once(write, tmp_path):
    arguments = ("run", write(TWO), "--steps", 100000, "--launcher", "fork")
    with _started(*arguments, cwd=tmp_path) as (started, lines):
        _after_the_first_step(lines)
        ranks = descendants(started.pid)
        os.kill(max(ranks), signal.SIGSTOP)  # it will not stop in good order
        os.kill(started.pid, signal.SIGTERM)
        time.sleep(REPEAT_SECONDS + 0.5)
        assert started.is_alive()
        os.kill(started.pid, signal.SIGTERM)
        assert _code(started) == 130
    wait_until_ended(ranks)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "rank 1: ended by signal 9"),
        (signal.SIGSTOP, "hang: no answer from rank 1 (process "),
    ],
)
def test_a_rank_that_is_killed_or_stopped_under_torchrun_is_named(number, message, write, tmp_path):
    arguments = ("run", write(TWO), "--steps", 10**6, "--hang-timeout", 2)
    with _started(*arguments, cwd=tmp_path) as (started, lines):
        _after_the_first_step(lines)
        ranks = [pid for pid in descendants(started.pid) if not children(pid)]
        os.kill(max(ranks), number)
        assert _code(started) == 5
        assert lines.read().splitlines()[-1].startswith(f"shardplan: {message}")


@pytest.mark.slow
@pytest.mark.distributed
def test_forked_ranks_are_started_again_until_no_restart_is_left():
    notes = []

    def run(restarts):
        supervision = Supervision(max_restarts=restarts)
        return run_by_fork(tiny(Plan(2)), _killed_until, notes.append, supervision)

    assert run(2) == "third"
    assert [note["text"].partition(":")[0] for note in notes] == ["restart 1", "restart 2"]
    with pytest.raises(RunError, match="rank 1: ended without a message"):
        run(1)


def _killed_until(attempt):
    def task(tell):
        if attempt < 2:
            _killed_on_rank_one(dist.get_rank())
        return "third"

    return task


def test_signals_that_are_ignored_at_the_start_do_not_stop_a_run():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in Supervision().stop_numbers()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert Supervision().stop_numbers() >= {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1}
    finally:
        signal.signal(signal.SIGHUP, before)


def _killed_on_rank_one(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_a_rank_that_hung_is_named_though_it_was_then_killed():
    relay = Relay([signal.SIGTERM], 2)
    relay.kill = lambda: killed.append(True)
    killed, following = [], start_ranks._TorchrunOutput(lambda event: None, relay, True)
    following.others.append("  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n")
    assert str(following._failure()).startswith("rank 1: ended by signal 9")
    hang = describe_failure(RunError("hang: no answer from rank 1"))
    following._take({"rank": 0, "failure": hang})
    assert str(following._failure()) == "hang: no answer from rank 1"
    assert killed
