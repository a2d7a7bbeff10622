"""Random faults in runs of a tiny model: ``python -m benchmarks.faults -n 100 --seed 1``.

Every trial trains on two CPU processes, breaks something at a random moment, and goes on with
``--resume``. It passes if the broken run ends in good order, or with one error that names the rank
or the file; if no process is left; and if the resumed run starts from the last complete checkpoint
and has the losses of a run that never stopped, bit for bit.

    kill        a rank is killed            all-killed   all processes are, at once
    stop        a rank is stopped           slow         a rank is stopped for half a second, often
    full        the disk fills up           read-only    the folder of the checkpoints becomes so
    truncated   a file of the newest checkpoint is shortened
    flipped     a bit of it is another      lost         it is deleted
    two-runs    another run wants the same folder
    clock       the clock of all processes jumps by up to a day, forth and back
    restart     a rank is killed under torchrun, which starts it again
    network     two hosts (network namespaces) lose the cable between them

Linux only; ``full`` and ``network`` need user namespaces. ``--kinds kill,stop`` draws from some.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from cost_models.plan.plan import Plan
from cost_models.plan_file import write_plan_file
from executor.checkpoint.format.folder import CheckpointFolder
from executor.verify.tiny_models import tiny
from hardware_profiles.cluster.parse import parse_cluster

RANKS = 2
KNOWN = 150  # steps of the run that never stops
ENDLESS = 100_000
LONGEST = 240.0  # seconds of a run
DAY = 86_400.0
# before the forks, so that no run has to
IMPORTED = ("executor.run", "executor.training.loop", "transformers.models.gpt2.modeling_gpt2")
TWO_HOSTS = Path(__file__).parents[2] / "tests" / "executor" / "multinode" / "two_hosts.sh"
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
libc = ctypes.CDLL(None, use_errno=True)


# --- processes -----------------------------------------------------------------------------------


def forked(task: Callable[[], int], said: Path) -> int:
    """Run a task in a new session, with what it says in a file; return its process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        with said.open("ab", buffering=0) as stream:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        code = task()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def ended(process: int, seconds: float = LONGEST) -> int:
    """Wait for a process and return its exit code, negative for a signal."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError(f"did not end within {seconds:g} s")


def ranks_of(process: int) -> list[int]:
    """Return the processes of the ranks, in their order; as many as have started."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text()
        return [int(number) for number in children.split()]
    except OSError:
        return []


def _is_alive(session: int) -> bool:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            return True
    return False


# --- a trial -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How a broken run ended, and how it should have."""

    code: int
    codes: tuple[int, ...]  # the exit codes that are right
    words: str = ""  # a regular expression that the error matches
    notes: str = ""  # one that the resumed run's notes match
    usable: bool = True  # whether a checkpoint is left


class Trial:
    """A folder in which runs are started, broken and resumed."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.output, self.said = folder / "run", folder / "said.txt"
        self.did = ""
        self.started: list[int] = []

    def start(
        self, *options: str, steps: int = ENDLESS, prepare: Callable[[], Any] | None = None
    ) -> int:
        """Start a run with a checkpoint after every second step."""
        words = ["run", str(self.folder / "plan.json"), "--launcher", "fork", "--steps", str(steps)]
        words += ["--checkpoint-every", "2", "--output", str(self.output), *options]

        def run() -> int:
            from executor.__main__ import main

            if prepare is not None:
                prepare()
            return main(words)

        self.said.write_text("")
        self.started.append(forked(run, self.said))
        return self.started[-1]

    def wait_for_a_moment(self, process: int, *, checkpoints: bool = False) -> None:
        """Wait for a random step, and a little more; ``checkpoints``: at least for one of them."""
        steps = self.chance.randrange(2 if checkpoints else 0, 9)
        more = self.chance.uniform(0.0, 0.15 if steps else 1.5)
        until = time.monotonic() + LONGEST
        while len(losses(self.output)) < steps or (checkpoints and not self.complete()):
            assert time.monotonic() < until, "made no progress"
            found, status = os.waitpid(process, os.WNOHANG)
            assert not found, f"ended by itself: {status}\n{self.said.read_text()}"
            time.sleep(0.002)
        time.sleep(more)
        self.did += f" {1e3 * more:.0f} ms after step {steps}"

    def complete(self) -> list[str]:
        """Return the names of the complete checkpoints, the newest one first."""
        folder = self.output / "checkpoints"
        return [path.name for path in CheckpointFolder(folder).complete()]

    def draw_rank(self, process: int) -> tuple[int, int]:
        """Return a rank and its process."""
        until = time.monotonic() + LONGEST
        while len(found := ranks_of(process)) < RANKS:
            assert time.monotonic() < until
            time.sleep(0.002)
        rank = self.chance.randrange(RANKS)
        self.did += f" rank {rank}"
        return rank, found[rank]


def losses(output: Path) -> dict[int, float]:
    """Return the losses in a run's metrics by step, the last one of each."""
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # being written
            continue
        if "loss" in record:
            found[int(record["step"])] = float(record["loss"])
    return found


# --- faults --------------------------------------------------------------------------------------


def kill(trial: Trial) -> Outcome:
    process = trial.start()
    trial.wait_for_a_moment(process)
    rank, victim = trial.draw_rank(process)
    os.kill(victim, signal.SIGKILL)
    return Outcome(ended(process), (5,), rf"rank {rank}: ended")


def all_killed(trial: Trial) -> Outcome:
    process = trial.start()
    trial.wait_for_a_moment(process)
    os.killpg(process, signal.SIGKILL)
    return Outcome(ended(process), (-signal.SIGKILL,))


def stop(trial: Trial) -> Outcome:
    process = trial.start("--hang-timeout", "8")
    trial.wait_for_a_moment(process, checkpoints=True)
    rank, victim = trial.draw_rank(process)
    os.kill(victim, signal.SIGSTOP)
    return Outcome(ended(process), (5,), rf"hang: .*rank {rank}\b")


def slow(trial: Trial) -> Outcome:
    process = trial.start(steps=10)
    _, victim = trial.draw_rank(process)
    for _ in range(4):
        time.sleep(trial.chance.uniform(0.0, 0.3))
        try:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            break
    return Outcome(ended(process), (0,))


def full(trial: Trial) -> Outcome:
    process = trial.start()
    trial.wait_for_a_moment(process, checkpoints=True)
    filler = trial.output / "filler"
    with filler.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(65_536))
        except OSError:
            pass
    code = ended(process)
    filler.unlink()
    return Outcome(code, (5,), "No space left on device|are free")


def read_only(trial: Trial) -> Outcome:
    process = trial.start(prepare=drop_capabilities)
    trial.wait_for_a_moment(process, checkpoints=True)
    folder = trial.output / "checkpoints"
    folder.chmod(0o555)
    code = ended(process)
    folder.chmod(0o755)
    return Outcome(code, (5,), "Permission denied")


def damaged(trial: Trial, damage: Callable[[Path], Any]) -> Outcome:
    """Damage a file of the newest checkpoint, or (one time in four) of all."""
    ended(trial.start(steps=trial.chance.choice((4, 5, 8))))
    every = trial.chance.random() < 0.25
    found = trial.complete() if every else trial.complete()[:1]
    for name in found:
        files = sorted((trial.output / "checkpoints" / name).iterdir())
        chosen = trial.chance.choice(files)
        trial.did += f" {name}/{chosen.name}"
        damage(chosen)
    return Outcome(0, (0,), notes=rf"skipped {found[0]}: ", usable=not every)


def truncated(trial: Trial) -> Outcome:
    def cut(path: Path) -> None:
        os.truncate(path, trial.chance.randrange(path.stat().st_size))

    return damaged(trial, cut)


def flipped(trial: Trial) -> Outcome:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[trial.chance.randrange(len(content))] ^= 1 << trial.chance.randrange(8)
        path.write_bytes(content)

    return damaged(trial, flip)


def lost(trial: Trial) -> Outcome:
    return damaged(trial, Path.unlink)


def two_runs(trial: Trial) -> Outcome:
    first = trial.start(steps=30)
    trial.wait_for_a_moment(first, checkpoints=True)
    os.killpg(first, signal.SIGSTOP)  # on a busy machine it would end before the other one asks
    own, trial.said = trial.said, trial.folder / "second.txt"
    second = ended(trial.start(*(["--resume"] if trial.chance.random() < 0.5 else [])))
    os.killpg(first, signal.SIGCONT)
    refused = trial.said.read_text()
    trial.said = own
    code = ended(first)
    assert second == 2, (second, refused)
    assert "is using it" in refused, refused
    return Outcome(code, (0,))


def clock(trial: Trial) -> Outcome:
    now, chance, offset = time.time, trial.chance, 0.0

    def jumping() -> float:
        nonlocal offset
        if chance.random() < 0.05:
            offset = chance.uniform(-DAY, DAY)
        return now() + offset

    def prepare() -> None:
        time.time = jumping

    return Outcome(ended(trial.start("--hang-timeout", "20", steps=10, prepare=prepare)), (0,))


def restart(trial: Trial) -> Outcome:
    words = [sys.executable, "-m", "executor", "run", str(trial.folder / "plan.json")]
    words += ["--steps", "30", "--checkpoint-every", "2", "--output", str(trial.output)]
    words += ["--max-restarts", "1"]
    process = forked(lambda: os.execv(words[0], words), trial.said)
    trial.wait_for_a_moment(process, checkpoints=True)
    (torchrun,) = ranks_of(process)[:1]
    rank = trial.chance.randrange(RANKS)
    trial.did += f" rank {rank}"
    os.kill(ranks_of(torchrun)[rank], signal.SIGKILL)
    return Outcome(ended(process), (0,), r"attempt 1 ended: .*signal 9|resumed")


def network(trial: Trial) -> Outcome:
    words = [sys.executable, "-m", "executor", "run", str(trial.folder / "two-hosts.json")]
    words += ["--steps", str(ENDLESS), "--checkpoint-every", "2", "--output", str(trial.output)]
    words += ["--nodes", "2", "--rendezvous", "10.77.0.1:29500", "--node-timeout", "60"]
    first, second = (" ".join([*words, "--node-rank", str(rank)]) for rank in (0, 1))
    other = trial.folder / "second.txt"
    cut = (
        f"until test -d {trial.output}/checkpoints/step-00000002; do sleep 0.1; done; "
        f"sleep {trial.chance.uniform(0.0, 1.0):.2f}; ip link set cable1 down"
    )
    script = f"({second} > {other} 2>&1; echo exit code $? >> {other}) & {cut}; wait"
    command = ["unshare", "-Urn", "bash", str(TWO_HOSTS), first, script]

    def two_hosts() -> NoReturn:  # of one core each: losses depend on the number of threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.execvp(command[0], command)

    trial.started.append(forked(two_hosts, trial.said))
    code = ended(trial.started[-1])
    assert "node 0 is lost" in (isolated := other.read_text()), isolated
    assert "exit code 5" in isolated, isolated
    return Outcome(code, (5,), r"node 1\b.* does not answer")


_KINDS = (kill, all_killed, stop, slow, full, read_only, truncated, flipped, lost, two_runs, clock)
FAULTS: dict[str, Callable[[Trial], Outcome]] = {
    fault.__name__.replace("_", "-"): fault for fault in (*_KINDS, restart, network)
}
EXPENSIVE = ("restart", "network")  # start interpreters, and need more than a second
WEIGHTS = {kind: 1 if kind in EXPENSIVE else 3 for kind in FAULTS}


# --- where a trial happens -----------------------------------------------------------------------


def drop_capabilities() -> None:
    """Have permissions apply to root as well."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0, "capset"


def small_disk(folder: Path, size: str) -> None:
    """Mount a file system of its own for this process and its children."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "namespaces cannot be made here")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    folder.mkdir()
    made = libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())
    assert made == 0, os.strerror(ctypes.get_errno())


def attempt(kind: str, chance: random.Random, folder: Path, known: dict[int, float]) -> str:
    """Break a run, resume it, and return what happened; an AssertionError if it was not right."""
    trial = Trial(folder, chance)
    if kind == "full":
        small_disk(trial.output, "8m")
    try:
        outcome = FAULTS[kind](trial)
    except AssertionError as error:
        raise AssertionError(f"{kind}{trial.did}: {error}\n{trial.said.read_text()}") from None
    said = trial.said.read_text()
    errors = [line for line in said.splitlines() if line.startswith("shardplan: ")]
    context = f"{kind}{trial.did}: exit code {outcome.code}\n{said}"
    assert outcome.code in outcome.codes, context
    assert "Traceback" not in said, context
    assert "internal error" not in said, context
    assert len(errors) == (outcome.code > 0), context
    assert re.search(outcome.words, said.replace("\n", " ")), context
    time.sleep(0.2)  # processes end with their parent, not before it
    assert not any(map(_is_alive, trial.started)), context
    done = losses(trial.output)
    newest = int(trial.complete()[0].partition("-")[2]) if trial.complete() else 0
    assert newest in (0, *done), context
    steps = max(newest, *done, 0) + 2 if done else 2
    assert steps <= KNOWN, f"{context}: too fast for the run that never stops"
    code = ended(trial.start("--resume", steps=steps))
    again = trial.said.read_text()
    context += f"\n--- resumed: exit code {code}\n{again}"
    if not outcome.usable:
        assert code == 2, context
        assert "no usable checkpoint" in again, context
    else:
        assert code == 0, context
        assert re.search(outcome.notes, again.replace("\n", " ")), context
        if outcome.notes == "" and newest:
            assert f"step-{newest:08d}" in again, context
        found = losses(trial.output)
        assert found == {step: known[step] for step in range(1, steps + 1)}, context
    last = errors[-1] if errors else "ended" if outcome.code >= 0 else "killed"
    return f"{kind}{trial.did}: {last}; resumed from step {newest}, exit code {code}"


def prepare(folder: Path) -> dict[int, float]:
    """Write the plans, and train without faults; return the losses."""
    plan = Plan(data_parallel=RANKS, zero_stage=1, micro_batch_size=2)
    file = tiny(plan, "gpt2", num_layers=1, vocab_size=256, precision="fp32", optimizer="adamw")
    write_plan_file(folder / "plan.json", file)
    cluster = parse_cluster("2x1xA100-80GB")
    write_plan_file(folder / "two-hosts.json", replace(file, cluster=cluster))
    trial = Trial(folder, random.Random(0))
    code = ended(trial.start("--checkpoint-every", str(ENDLESS), steps=KNOWN))
    assert code == 0, trial.said.read_text()
    return losses(trial.output)


def run_trials(
    kinds: Sequence[str], seed: int, folder: Path, say: Callable[[str], Any] = print
) -> list[str]:
    """Run one trial of each kind in the list, one after another; return what was not right."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in IMPORTED:
        importlib.import_module(module)
    known, wrong = prepare(folder), []
    for number, kind in enumerate(kinds, 1):
        here = folder / f"trial-{number}"
        here.mkdir()
        for plan in folder.glob("*.json"):
            shutil.copy(plan, here)
        answer = here / "answer.txt"

        def trial(kind: str = kind, number: int = number, here: Path = here) -> int:
            chance = random.Random(f"{seed} {number}")
            try:
                print(attempt(kind, chance, here, known))
            except (AssertionError, OSError) as error:
                print(error)
                return 1
            return 0

        process = forked(trial, answer)
        failed = ended(process, 4 * LONGEST)
        text = answer.read_text().strip()
        if failed:
            wrong.append(f"trial {number}, {kind}: {text}")
        say(f"[{number}/{len(kinds)}] {'WRONG: ' if failed else ''}{text}")
        shutil.rmtree(here, ignore_errors=True)
    return wrong


def main() -> NoReturn:
    """Print a line for each trial, and the trials that were not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=100, help="trials")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(FAULTS))
    parser.add_argument("--each", action="store_true", help="one trial of each kind")
    options = parser.parse_args()
    names = options.kinds.split(",")
    chance = random.Random(options.seed)
    weights = [WEIGHTS[name] for name in names]
    kinds = names if options.each else chance.choices(names, weights, k=options.n)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        wrong = run_trials(kinds, options.seed, Path(folder), lambda s: print(s, flush=True))
    print(", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds).items())))
    print(f"{len(kinds)} trials, {len(wrong)} wrong")
    for text in wrong:
        print(f"\n{text}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
