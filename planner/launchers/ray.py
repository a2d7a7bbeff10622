"""Ray Train: a Python script with one worker a node, which starts the executor there.

Ray starts all workers again when one fails or its node is lost (``FailureConfig``).
"""

from __future__ import annotations

from pathlib import Path

from hardware_profiles.errors import InputError
from planner.launchers.job import PORT, RESTARTS, LaunchJob

PROGRAM = "ray"
FILE = "job.py"
_SCRIPT = '''\
"""Trains a plan of shardplan with Ray Train: one worker a node starts the executor there."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

NODES = {nodes}
RANKS_PER_NODE = {ranks_per_node}
ELASTIC = {elastic}  # plan again for fewer nodes
OUTPUT = {output!r}  # on a file system that all nodes share
OPTIONS = {options}
PLAN = """\\
{contents}
"""


def end_with_worker():
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: Linux kills this process with its parent


def plan_for(nodes, rank):
    """Return the plan for the nodes that are here, and further options."""
    plan = Path(tempfile.mkdtemp(prefix="shardplan-")) / "plan.json"
    plan.write_text(PLAN)
    if nodes == NODES:
        return plan, []
    folder = Path(OUTPUT)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"plan-for-{{nodes * RANKS_PER_NODE}}-ranks.json"
    if rank == 0 and not new.exists():
        replan = [sys.executable, "-m", "planner", "replan", str(plan), "-o", str(new)]
        subprocess.run([*replan, "--gpus", str(nodes * RANKS_PER_NODE)], check=True)
    while not new.exists():
        time.sleep(0.5)
    batches = [json.loads(p.read_text())["workload"]["global_batch_size"] for p in (plan, new)]
    return new, [] if batches[0] == batches[1] else ["--allow-other-data"]


def train_on_node(config):
    nodes, rank = get_context().get_world_size(), get_context().get_world_rank()
    plan, more = plan_for(nodes, rank)
    if nodes > 1:
        place = os.environ["MASTER_ADDR"] + ":{port}"
        more += ["--nodes", str(nodes), "--node-rank", str(rank), "--rendezvous", place]
        more += ["--elastic"] * ELASTIC
    # the executor starts its ranks itself
    own = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "NODE_RANK")
    environment = {{k: v for k, v in os.environ.items() if not k.startswith(own)}}
    command = [sys.executable, "-m", "executor", "run", str(plan), *more, *OPTIONS]
    done = subprocess.run(command, env=environment, preexec_fn=end_with_worker)
    if done.returncode:
        raise RuntimeError(f"node {{rank}}: shardplan run ended with exit code {{done.returncode}}")


if __name__ == "__main__":
    TorchTrainer(
        train_on_node,
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own group: it needs no GPU
        scaling_config=ScalingConfig(
            num_workers={workers},
            use_gpu={uses_gpus},
            resources_per_worker={resources},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name={name!r},
            storage_path=str(Path(OUTPUT) / "ray"),
            failure_config=FailureConfig(max_failures={restarts}),
        ),
    ).fit()
'''


def job_file(job: LaunchJob) -> str:
    """Return the script; its options of ``run`` are those of every node."""
    fewest, most = job.node_range
    output = job.output(str(Path.cwd() / "runs" / job.name))
    if not Path(output).is_absolute():
        raise InputError(f"--output {output}: must be an absolute path, which all nodes see")
    options = job.executor_options(output)
    contents = job.contents.rstrip().replace("\\", "\\\\").replace('"""', '""\\"')
    return _SCRIPT.format(
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        elastic=job.options.elastic,
        output=output,
        options=options,
        contents=contents,
        port=PORT,
        workers=(fewest, most) if fewest < most else most,
        uses_gpus=job.uses_gpus,
        resources={"GPU": job.ranks_per_node} if job.uses_gpus else {"CPU": 1},
        name=job.name,
        restarts=RESTARTS,
    )


def command(path: Path, job: LaunchJob) -> list[str]:
    """Return the command that submits a script to the cluster of ``RAY_ADDRESS``."""
    folder = str(path.parent)
    return [PROGRAM, "job", "submit", "--working-dir", folder, "--", "python", path.name]
