"""Coordinator of a multi-node run: each node starts its ranks with torchrun; all restart together.

When a rank or a node fails, every node ends its ranks, joins the others again and continues from
the last checkpoint: with the same plan if all are present, with a plan for the remaining ones under
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
from executor.launch.start_ranks import ATTEMPT, Emit, LocalRanks, run_by_torchrun
from executor.multinode.announcement import NodeAnnouncement, NodeDescription, wait_for
from executor.multinode.nodes import (
    REACH_SECONDS,
    NodeSettings,
    differences,
    disk_problem,
    interface_of,
    own_address,
    unreachable,
)
from executor.multinode.rendezvous import CAUSE_SECONDS, SILENCE_SECONDS, Heartbeat, NodeRendezvous
from executor.processes.reporter import Supervision
from hardware_profiles.errors import InputError, RunError

CHECKPOINT_BYTES: Final = 12.0  # fp32 weights and both moments of AdamW, for each parameter
MAX_LOSSES_PER_NODE: Final = 3  # attempts that may lose nodes, per node


def _keep(plan: Path) -> None:
    """Do nothing with a plan."""


@dataclass(slots=True)
class MultiNodeRun:
    """Description of the run; the same on every node except ``nodes.rank`` and ``folder``."""

    nodes: NodeSettings
    supervision: Supervision
    plan: Path
    file: PlanFile
    about: NodeDescription
    folder: Path | None = None  # of node 0: folder of the run
    renew: Callable[[Path], None] = _keep  # called with the plan of an attempt
    attempt: int = 0
    members: list[int] = field(default_factory=list)
    restarts: int = 0
    last_reason: str = ""


def run_on_nodes(job: MultiNodeRun, emit: Emit) -> Any:
    """Run until the end; return the answer of rank 0 (on other nodes: the final status)."""
    rendezvous = NodeRendezvous(job.nodes)
    if rendezvous.is_leader:
        return _lead(job, rendezvous, emit)
    return _follow(job, rendezvous, emit)


def _lead(job: MultiNodeRun, rendezvous: NodeRendezvous, emit: Emit) -> Any:
    try:
        while True:
            rendezvous.publish("attempt", job.attempt)
            start = _decide(job, rendezvous, emit)
            rendezvous.publish(f"{job.attempt}/start", start)
            answer, reason = _attempt(job, rendezvous, emit, start)
            if reason is None:
                rendezvous.publish("end", {"answer": answer})
                rendezvous.gather("bye", [r for r in job.members if r], SILENCE_SECONDS)
                return answer
            job.last_reason = _cause(job, rendezvous, reason)
            emit({"kind": "note", "text": f"attempt {job.attempt + 1} ended: {job.last_reason}"})
            job.attempt += 1
    except BaseException as error:
        code = error.exit_code if isinstance(error, (InputError, RunError)) else 1
        words = str(error) or "interrupted"
        rendezvous.publish("end", {"error": words, "input": code == InputError.exit_code})
        rendezvous.gather("bye", [r for r in job.members if r], CAUSE_SECONDS)
        raise


def _follow(job: MultiNodeRun, rendezvous: NodeRendezvous, emit: Emit) -> Any:
    job.attempt = rendezvous.read("attempt") or 0  # not 0 where this node was lost and returned
    if rendezvous.read(f"{job.attempt}/start") is not None:
        rendezvous.publish(
            f"back/{job.nodes.rank}", job.attempt
        )  # takes part from the next attempt on
        job.attempt += 1
    while True:
        with NodeAnnouncement(rendezvous, job.attempt, job.about):
            start = wait_for(rendezvous, f"{job.attempt}/start")
        if "end" in start:
            break
        _, reason = _attempt(job, rendezvous, emit, start)
        if reason is None:
            break
        job.attempt += 1
    end = rendezvous.wait("end")
    rendezvous.publish(f"bye/{job.nodes.rank}", True)
    if "error" in end:
        raise (InputError if end["input"] else RunError)(end["error"])
    return end["answer"]


def _decide(job: MultiNodeRun, rendezvous: NodeRendezvous, emit: Emit) -> dict[str, Any]:
    """Return the start message of the next attempt, once all nodes are present and compatible."""
    nodes, first = job.nodes, job.attempt == 0
    expected = range(nodes.count)
    with NodeAnnouncement(rendezvous, job.attempt, job.about):
        found = rendezvous.gather(f"{job.attempt}/node", expected, nodes.timeout)
        job.members = sorted(found)
        missing = [rank for rank in expected if rank not in found]
        if missing and (first or not nodes.elastic):
            names = ", ".join(str(rank) for rank in missing)
            error = InputError if first else RunError
            after = "" if first else f" after: {job.last_reason}"
            raise error(
                f"node {names} did not join at {nodes.place} within {nodes.timeout:g} s{after}"
            )
        wrong = differences(found) + _unreachable_nodes(job, rendezvous, found)
    if wrong:
        raise InputError("the nodes are incompatible: " + "; ".join(wrong))
    if not missing and not first:
        job.restarts += not job.last_reason.endswith("is back")
        if job.restarts > job.supervision.max_restarts:
            raise RunError(job.last_reason)
    elif job.attempt > MAX_LOSSES_PER_NODE * nodes.count + job.supervision.max_restarts:
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


def _unreachable_nodes(
    job: MultiNodeRun, rendezvous: NodeRendezvous, found: dict[int, Any]
) -> list[str]:
    """Return which nodes cannot reach each other or do not see the folder of the run."""
    witness = None if job.folder is None else (job.folder / f".seen-{job.attempt}").resolve()
    if witness is not None:
        witness.touch()
    request = {"nodes": found, "witness": None if witness is None else str(witness)}
    rendezvous.publish(f"{job.attempt}/reach", request)
    others = [rank for rank in found if rank != 0]
    wait = job.nodes.timeout + REACH_SECONDS * len(found)
    reached = rendezvous.gather(f"{job.attempt}/reached", others, wait)
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


def _plan_for(job: MultiNodeRun, present: int) -> tuple[Path, list[str]]:
    """Return the plan for the nodes present, made by the planner where some are missing."""
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
            raise RunError(f"no plan for the {present} remaining nodes: {last[0]}")
    job.renew(path)
    new, old = read_plan_file(path), job.file
    notes = [f"{present} of {job.nodes.count} nodes remain: continuing with {path}"]
    batches = old.workload.global_batch_size, new.workload.global_batch_size
    if batches[0] != batches[1]:
        notes.append(
            f"global_batch_size {batches[0]} -> {batches[1]}: no plan for {ranks} ranks keeps it; "
            "a step now reads another number of samples at the same learning rate"
        )
    return path, notes


def _attempt(
    job: MultiNodeRun, rendezvous: NodeRendezvous, emit: Emit, start: dict[str, Any]
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
    with Heartbeat(rendezvous, job.attempt, members, local.end) as pulse:
        try:
            answer = run_by_torchrun(
                arguments, emit, job.supervision, local, gpus=bool(job.about.gpus)
            )
        except RunError as error:
            reason = pulse.over or str(error)
            cause = "" if local.were_ended else str(error)
            rendezvous.publish(f"{job.attempt}/failed/{nodes.rank}", cause)
            rendezvous.publish(f"{job.attempt}/over", reason)
            return None, reason
        except BaseException as error:  # bad input or an interruption: no further attempt
            words = str(error) or "interrupted"
            rendezvous.publish(f"{job.attempt}/over", f"node {nodes.rank}: {words}")
            raise
    return answer, None


def _cause(job: MultiNodeRun, rendezvous: NodeRendezvous, reason: str) -> str:
    """Return the most likely cause among the nodes' messages: effects often arrive first."""
    failures = rendezvous.gather(f"{job.attempt}/failed", job.members, CAUSE_SECONDS)
    causes = {rank: words for rank, words in failures.items() if "ended by signal" in words}
    causes = causes or {rank: words for rank, words in failures.items() if "hang:" in words}
    for rank, words in causes.items():
        return f"node {rank}: {words}"
    return reason
