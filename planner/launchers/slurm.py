"""Slurm: an sbatch script.

``--requeue`` starts the job again after a lost node or pre-emption. Before its time limit Slurm
sends USR1: the executor saves a checkpoint and exits with 6, and the script requeues the job.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from planner.launchers.job import NOTICE_SECONDS, LaunchJob, plan_for_nodes

PROGRAM = "sbatch"
FILE = "job.sbatch"
_STATUS_OF_NODE_0 = """
if [ "$code" -ge 128 ]; then  # srun's code is that of a lost node, after which others went on
    case $(grep -o '"status": "[a-z]*"' {folder}/run.json) in
        *finished*) code=0 ;;
        *stopped*) code=6 ;;
    esac
fi"""


def job_file(job: LaunchJob) -> str:
    """Return the sbatch script."""
    fewest, most = job.node_range
    elastic = fewest < most
    settings = [
        f"--job-name={job.name}",
        f"--nodes={f'{fewest}-{most}' if elastic else most}",
        *([f"--gpus-per-node={job.ranks_per_node}"] if job.uses_gpus else []),
        *(["--exclusive"] if job.ranks_per_node == job.gpus_per_node else []),
        *([f"--partition={job.options.partition}"] if job.options.partition else []),
        *([f"--time={job.options.time}"] if job.options.time else []),
        *(["--no-kill"] if elastic else []),
        f"--signal=USR1@{NOTICE_SECONDS}",
        "--requeue",
        "--open-mode=append",
    ]
    output = str(Path.cwd() / "runs" / job.name)
    python = shlex.quote(sys.executable)
    directives = "\n".join(f"#SBATCH {word}" for word in settings)
    # not in the directives: with a number of tasks Slurm 22.05 takes the fewest nodes of a range
    srun = 'srun --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0'
    lost = _STATUS_OF_NODE_0.format(folder=shlex.quote(job.output(output))) * elastic
    return f"""\
#!/bin/bash
{directives}

set -u
cd {shlex.quote(str(Path.cwd()))} || exit
plan={shlex.quote(str(job.plan))}
nodes=$SLURM_JOB_NUM_NODES
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{plan_for_nodes(job, output, python)}

cancelled=
trap 'cancelled=yes' TERM  # scancel, or pre-emption, after which Slurm itself requeues the job
{srun + " --no-kill" * elastic} \\
    {python} -m executor run "$plan" "${{where[@]}}" "${{options[@]}}"
code=$?{lost}
if [ "$code" -eq 6 ] && [ -z "$cancelled" ]; then  # stopped with a checkpoint: time is nearly over
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def command(path: Path, job: LaunchJob) -> list[str]:
    """Return the command that submits a script."""
    return [PROGRAM, str(path)]
