"""SkyPilot: a task in YAML; with --spot a managed job, which SkyPilot starts again elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError
from planner.launchers.job import RESTARTS, SHARED, LaunchJob, indented, node_script

PROGRAM = "sky"
FILE = "job.yaml"
PLAN = "/tmp/shardplan/plan.json"
VARIABLES = (
    "nodes=$SKYPILOT_NUM_NODES rank=$SKYPILOT_NODE_RANK\n"
    'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
)
# SkyPilot's names (0.14.1) that do not follow from ours
NAMES: Final = {
    "A100-SXM-80GB": "A100-80GB",
    "A100-PCIe-80GB": "A100-80GB",
    "RTX-PRO-6000-Server": "RTXPRO6000",
    "V100-SXM2-32GB": "V100-32GB",
    "V100-SXM3-32GB": "V100-32GB",
    "V100-PCIe-32GB": "V100-32GB",
}


def accelerator_name(name: str) -> str:
    """Return SkyPilot's name of an accelerator of the catalogue.

    >>> accelerator_name("H200-SXM-141GB"), accelerator_name("A100-SXM-80GB")
    ('H200', 'A100-80GB')
    >>> accelerator_name("RTX-4090"), accelerator_name("MI300X")
    ('RTX4090', 'MI300X')
    """
    if name in NAMES:
        return NAMES[name]
    bare = re.sub(r"-(SXM\d?|PCIe|NVL|\d+GB|H)\b", "", name)
    return re.sub(r"^RTX-(?=A?\d)", "RTX", bare)


def job_file(job: LaunchJob) -> str:
    """Return the task."""
    storage, spot = job.options.storage, job.options.spot
    bucket = storage is not None and "://" in storage
    if storage is None and (job.nodes > 1 or spot):
        why = f"{job.nodes} nodes write" if job.nodes > 1 else "a spot instance cannot keep"
        raise InputError(
            f"--on skypilot needs --storage, where {why} the run's folder: a volume, or for one "
            "node the URL of a bucket"
        )
    if bucket and job.nodes > 1:
        raise InputError(
            f"--storage {storage}: a bucket shows a file to other nodes only some time after it "
            f"was written, and the plan needs {job.nodes} nodes (name a volume)"
        )
    resources = []
    if job.uses_gpus:
        name = accelerator_name(job.accelerator.name)
        resources.append(f'accelerators: "{name}:{job.ranks_per_node}"')
    if job.options.image:
        resources.append(f"image_id: {json.dumps(f'docker:{job.options.image}')}")
    if spot:
        resources += [
            "use_spot: true",
            f"job_recovery:\n  strategy: EAGER_NEXT_REGION\n  max_restarts_on_errors: {RESTARTS}",
        ]
    mounts = f"file_mounts:\n  {PLAN}: {json.dumps(str(job.plan))}\n"
    if bucket:
        mounts += f"  {SHARED}:\n    source: {json.dumps(storage)}\n    mode: MOUNT_CACHED\n"
    elif storage is not None:
        mounts += f"volumes:\n  {SHARED}: {json.dumps(storage)}\n"
    folder = f"runs/{job.name}" if storage is None else f"{SHARED}/{job.name}"
    head = f"resources:\n{indented(chr(10).join(resources), 2)}\n" if resources else ""
    setup = "" if job.options.image else "setup: |\n  pip install 'shardplan[run]'\n"
    return (
        f"name: {json.dumps(job.name)}\nnum_nodes: {job.nodes}\n{head}{mounts}{setup}run: |\n"
        f"{indented(node_script(job, folder, PLAN, VARIABLES), 2)}\n"
    )


def command(path: Path, job: LaunchJob) -> list[str]:
    """Return the command that starts a task."""
    if job.options.spot:
        return [PROGRAM, "jobs", "launch", "--yes", "--detach-run", str(path)]
    return [PROGRAM, "launch", "--yes", "--detach-run", "--cluster", job.name, str(path)]
