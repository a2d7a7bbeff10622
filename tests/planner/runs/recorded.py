"""A plan.json and the folder of a run of it, without running anything."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from cost_models.plan.plan import Plan, split_layers
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile, write_plan_file
from cost_models.pricing.prediction import predict, scenario_of
from cost_models.scenario import Scenario
from hardware_profiles.cluster.local_machine import cpu_cluster
from hardware_profiles.cluster.measurement import MachineMeasurement
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import software_profile
from tests.samples import llama

PLAN = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2)


def machine(processes: int = 2) -> Cluster:
    return cpu_cluster(
        MachineMeasurement(
            host="h",
            cpu_model="A CPU",
            num_cores=2,
            total_memory_bytes=2**34,
            available_memory_bytes=2**33,
            processes=processes,
            torch_version="2.13.0",
            date="2026-01-01",
            gemm_flops={"fp32": 5e10, "bf16": 4e10},
            memory_bandwidth=1e10,
            operator_seconds=5e-6,
            score_seconds=1e-9,
            collective_bandwidth=1e9,
            collective_latency=5e-5,
            p2p_bandwidth=1e9,
            p2p_latency=5e-5,
        )
    )


def plan_file(cluster: Cluster | None = None, plan: Plan = PLAN) -> PlanFile:
    scenario = Scenario(
        llama(),
        cluster or machine(),
        Workload(256, plan.global_batch_size, precision="fp32"),
        software_profile("shardplan"),
    )
    ranges = split_layers(scenario.model.num_layers, plan.num_stages)
    file = PlanFile(scenario.model, scenario.cluster, scenario.workload, plan, ranges)
    return replace(file, prediction=predict(scenario, plan, ranges).to_dict())


def write_run(
    folder: Path,
    file: PlanFile,
    ran_on: Cluster,
    *,
    waits: bool = True,
    timed_steps: int = 8,
    device: str = "cpu",
) -> Path:
    """Write a run.json as if the predictions for ``ran_on`` had been what was measured."""
    folder.mkdir()
    real = replace(file, cluster=ran_on)
    truth = predict(scenario_of(real), file.plan, file.layer_ranges).to_dict()
    parts = truth["time"]["parts"]
    update = parts["optimizer"]
    waited = sum(s for name, s in parts.items() if "communication" in name or name == "bubble")
    stages = {entry["stage"]: entry for entry in truth["memory"]["stages"]}
    ranks: list[dict[str, Any]] = []
    for number in range(file.plan.world_size):
        stage = number // (file.plan.world_size // file.plan.pipeline_parallel)
        memory = stages[stage]["parts"]
        kept = {name: memory[name] for name in ("weights", "optimizer")}
        passing = sum(memory[n] for n in ("gradients", "activations", "logits", "buffers"))
        ranks.append(
            {
                "rank": number,
                "stage": stage,
                "memory": {
                    "peak_bytes": stages[stage]["allocated_bytes"],
                    "parts": {**kept, "activations": passing},
                },
                "communication": [
                    {key: record[key] for key in ("axis", "kind", "count", "bytes")}
                    for record in truth["communication"]
                    if record["stage"] == stage
                ],
                "world_axis": "world",
            }
        )
    step = truth["time"]["step_seconds"]
    document = {
        "schema_version": 1,
        "status": "done",
        "plan": {"contents": file.to_dict()},
        "environment": {"device": device},
        "measured": {
            "step_seconds": step if timed_steps else None,
            "phase_seconds": {
                "forward_backward": step - update,
                "gradients": update / 4,
                "optimizer": update * 3 / 4,
            },
            "exposed_communication_seconds": (
                {"all_reduce": waited / 4, "recv": waited * 3 / 4} if waits else None
            ),
            "timed_steps": timed_steps,
            "ranks": ranks,
        },
    }
    (folder / "run.json").write_text(json.dumps(document))
    return folder


def write_plan(path: Path, file: PlanFile) -> Path:
    write_plan_file(path, file)
    return path
