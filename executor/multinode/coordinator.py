"""A run on several machines: each starts its ranks with torchrun; together they begin again.

When a rank or a node fails, every node ends its ranks, meets the others again and goes on from the
last checkpoint: with the same plan if all are there, with a plan for those that are left under
--elastic.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cost_models.plan_file import PlanFile, read_plan_file
from executor.launch.launch import ATTEMPT, Emit, LocalRanks, by_torchrun
from executor.multinode.announcement import About, Announced, wait_for
from executor.multinode.nodes import (
    REACH_SECONDS,
    Nodes,
    differences,
    disk_problem,
    interface_of,
    own_address,
    unreachable,
)
from executor.multinode.rendezvous import CAUSE_SECONDS, SILENCE_SECONDS, Meeting, Pulse
from executor.processes.supervision import Supervision
from hardware_profiles.errors import InputError, RunError

CHECKPOINT_BYTES: Final = 12.0  # fp32 weights and both moments of AdamW, for each parameter
OPTIMISTIC: Final = 3  # attempts that a run may lose nodes in, for each node


def _keep(plan: Path) -> None:
    """Do nothing with a plan."""


@dataclass(slots=True)
class Job:
    """What is to be run; the same on every node but for ``nodes.rank`` and ``folder``."""

    nodes: Nodes
    supervision: Supervision
    plan: Path
    file: PlanFile
    about: About
    folder: Path | None = None  # of node 0: where the run is kept
    renew: Callable[[Path], None] = _keep  # takes the plan of an attempt
    attempt: int = 0
    members: list[int] = field(default_factory=list)
    restarts: int = 0
    last_reason: str = ""


def by_nodes(job: Job, emit: Emit) -> Any:
    """Run until it ends; return the answer of rank 0 (on other nodes: how the run ended)."""
    meeting = Meeting(job.nodes)
    if meeting.leads:
        return _lead(job, meeting, emit)
    return _follow(job, meeting, emit)


def _lead(job: Job, meeting: Meeting, emit: Emit) -> Any:
    try:
        while True:
            meeting.say("attempt", job.attempt)
            start = _decide(job, meeting, emit)
            meeting.say(f"{job.attempt}/start", start)
            answer, reason = _attempt(job, meeting, emit, start)
            if reason is None:
                meeting.say("end", {"answer": answer})
                meeting.gather("bye", [r for r in job.members if r], SILENCE_SECONDS)
                return answer
            job.last_reason = _cause(job, meeting, reason)
            emit({"kind": "note", "text": f"attempt {job.attempt + 1} ended: {job.last_reason}"})
            job.attempt += 1
    except BaseException as error:
        code = error.exit_code if isinstance(error, (InputError, RunError)) else 1
        words = str(error) or "interrupted"
        meeting.say("end", {"error": words, "input": code == InputError.exit_code})
        meeting.gather("bye", [r for r in job.members if r], 3 * CAUSE_SECONDS)
        raise


def _follow(job: Job, meeting: Meeting, emit: Emit) -> Any:
    job.attempt = meeting.hear("attempt") or 0  # not 0 where this node was lost and is back
    if meeting.hear(f"{job.attempt}/start") is not None:
        meeting.say(f"back/{job.nodes.rank}", job.attempt)  # it takes part from the next one on
        job.attempt += 1
    while True:
        with Announced(meeting, job.attempt, job.about):
            start = wait_for(meeting, f"{job.attempt}/start")
        if "end" in start:
            break
        _, reason = _attempt(job, meeting, emit, start)
        if reason is None:
            break
        job.attempt += 1
    end = meeting.wait("end")
    meeting.say(f"bye/{job.nodes.rank}", True)
    if "error" in end:
        raise (InputError if end["input"] else RunError)(end["error"])
    return end["answer"]


def _decide(job: Job, meeting: Meeting, emit: Emit) -> dict[str, Any]:
    """Return what all nodes start next, once they are there and fit together."""
    nodes, first = job.nodes, job.attempt == 0
    expected = range(nodes.count)
    with Announced(meeting, job.attempt, job.about):
        found = meeting.gather(f"{job.attempt}/node", expected, nodes.timeout)
        job.members = sorted(found)
        missing = [rank for rank in expected if rank not in found]
        if missing and (first or not nodes.elastic):
            names = ", ".join(str(rank) for rank in missing)
            error = InputError if first else RunError
            after = "" if first else f" after: {job.last_reason}"
            raise error(
                f"node {names} did not come to {nodes.place} within {nodes.timeout:g} s{after}"
            )
        wrong = differences(found) + _apart(job, meeting, found)
    if wrong:
        raise InputError("the nodes do not fit together: " + "; ".join(wrong))
    if not missing and not first:
        job.restarts += not job.last_reason.endswith("is back")
        if job.restarts > job.supervision.max_restarts:
            raise RunError(job.last_reason)
    elif job.attempt > OPTIMISTIC * nodes.count + job.supervision.max_restarts:
        raise RunError(f"too many attempts: {job.last_reason}")
    plan, notes = _plan_for(job, len(found))
    for note in notes:
        emit({"kind": "note", "text": note})
    return {
        "members": job.members,
        "plan": str(plan),
        "folder": None if job.folder is None else str(job.folder),
        "ranks": job.file.plan.world_size // nodes.count,
        "other_data": any("global_batch_size" in note for note in notes),
        "port": nodes.port + 1 + job.attempt % 2,
    }


def _apart(job: Job, meeting: Meeting, found: dict[int, Any]) -> list[str]:
    """Return which nodes cannot reach each other or do not see the folder of the run."""
    witness = None if job.folder is None else (job.folder / f".seen-{job.attempt}").resolve()
    if witness is not None:
        witness.touch()
    asked = {"nodes": found, "witness": None if witness is None else str(witness)}
    meeting.say(f"{job.attempt}/reach", asked)
    others = [rank for rank in found if rank != 0]
    wait = job.nodes.timeout + REACH_SECONDS * len(found)
    reached = meeting.gather(f"{job.attempt}/reached", others, wait)
    if witness is not None:
        witness.unlink()
    wrong = [f"node 0 cannot reach {w}" for w in unreachable({r: found[r] for r in others})]
    for rank in others:
        for words in reached.get(rank, ["does not answer"]):
            wrong.append(f"node {rank} ({found[rank]['host']}) {words}")
    if job.folder is not None:
        needed = CHECKPOINT_BYTES * job.file.model.num_parameters
        if (problem := disk_problem(job.folder, needed)) is not None:
            wrong.append(problem)
    return wrong


def _plan_for(job: Job, present: int) -> tuple[Path, list[str]]:
    """Return the plan for so many nodes, made with the planner where it is another one."""
    if job.folder is None:
        return job.plan, []
    kept = job.folder / "plan.json"
    if not kept.exists():
        shutil.copyfile(job.plan, kept)
    if present == job.nodes.count:
        job.renew(job.plan)
        return job.plan, []
    ranks = job.file.plan.world_size // job.nodes.count * present
    path = job.folder / f"plan-for-{ranks}-ranks.json"
    if not path.exists():
        command = [sys.executable, "-m", "planner", "replan", str(kept), "--gpus", str(ranks)]
        done = subprocess.run(
            [*command, "-o", str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RunError(f"no plan for the {present} nodes that are left: {last[0]}")
    job.renew(path)
    new, old = read_plan_file(path), job.file
    notes = [f"{present} of {job.nodes.count} nodes are left: goes on with {path}"]
    batches = old.workload.global_batch_size, new.workload.global_batch_size
    if batches[0] != batches[1]:
        notes.append(
            f"global_batch_size {batches[0]} -> {batches[1]}: no plan for {ranks} ranks keeps it; "
            "a step now reads another number of samples at the same learning rate"
        )
    return path, notes


def _attempt(
    job: Job, meeting: Meeting, emit: Emit, start: dict[str, Any]
) -> tuple[Any, str | None]:
    """Run the ranks of this node once; return the answer, or why the attempt ended."""
    nodes, members = job.nodes, start["members"]
    place = members.index(nodes.rank)
    address = own_address(nodes.host, nodes.port)
    environment = {ATTEMPT: str(job.attempt)}
    if (name := interface_of(address)) is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = name
    local = LocalRanks(
        count=start["ranks"],
        torchrun=(
            *("--nnodes", str(len(members)), "--node-rank", str(place)),
            *("--master-addr", nodes.host, "--master-port", str(start["port"])),
        ),
        environment=environment,
        has_rank_0=place == 0,
        alone=False,
    )
    arguments = [start["plan"] if Path(a) == job.plan else a for a in job.about.arguments]
    if start["other_data"]:
        arguments.append("--allow-other-data")
    if start["folder"] is not None:
        arguments += ["--output", start["folder"]]
    with Pulse(meeting, job.attempt, members, local.end) as pulse:
        try:
            answer = by_torchrun(arguments, emit, job.supervision, local, gpus=bool(job.about.gpus))
        except RunError as error:
            reason = pulse.over or str(error)
            if pulse.over is None:
                meeting.say(f"{job.attempt}/failed/{nodes.rank}", reason)
            meeting.say(f"{job.attempt}/over", reason)
            return None, reason
        except BaseException as error:  # bad input, or an interruption: no other attempt
            words = str(error) or "interrupted"
            meeting.say(f"{job.attempt}/over", f"node {nodes.rank}: {words}")
            raise
    return answer, None


def _cause(job: Job, meeting: Meeting, reason: str) -> str:
    """Return what a node said that looks most like the cause: effects are heard of first."""
    said = meeting.gather(f"{job.attempt}/failed", job.members, CAUSE_SECONDS)
    causes = {rank: words for rank, words in said.items() if "ended by signal" in words}
    causes = causes or {rank: words for rank, words in said.items() if "hang:" in words}
    for rank, words in causes.items():
        return f"node {rank}: {words}"
    return reason
