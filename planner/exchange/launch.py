"""Commands that start a job on every node of a cluster, once for each node."""

from __future__ import annotations

from planner.exchange.job import Job

PORT = 29500


def torchrun(job: Job, script: str) -> str:
    """Return the torchrun command for a script with its arguments.

    Several nodes: the command runs on each, with $HEAD the first node's address and $RANK the
    node's number.
    """
    nodes, local = job.cluster.num_nodes, job.cluster.gpus_per_node
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {local} {script}"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {local} --node-rank $RANK "
        f"--rdzv-backend c10d --rdzv-endpoint $HEAD:{PORT} {script}"
    )


def deepspeed_launch(job: Job, script: str) -> str:
    """Return the command of DeepSpeed's launcher; several nodes stand in a hostfile."""
    nodes, local = job.cluster.num_nodes, job.cluster.gpus_per_node
    if nodes == 1:
        return f"deepspeed --num_gpus {local} {script}"
    return f"deepspeed --hostfile hostfile --num_nodes {nodes} --num_gpus {local} {script}"


def accelerate_launch(job: Job, config: str, script: str) -> str:
    """Return the command of accelerate's launcher."""
    if job.cluster.num_nodes == 1:
        return f"accelerate launch --config_file {config} {script}"
    return (
        f"accelerate launch --config_file {config} --machine_rank $RANK "
        f"--main_process_ip $HEAD --main_process_port {PORT} {script}"
    )
