"""What a user would type: settings and plans as words of the command line that can be pasted."""

from __future__ import annotations

import shlex

from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import ShardplanError
from planner.request.recompute import typed_by_stage, typed_recompute
from planner.request.scenario import DEFAULT_SOFTWARE, default_precision
from planner.request.stage_layers import typed_layers


def describe_plan(plan: Plan) -> str:
    """Return a plan as the options that give it."""
    words = [f"--dp {plan.data_parallel}"]
    if plan.tensor_parallel > 1:
        words.append(f"--tp {plan.tensor_parallel}")
        words.append("--sp" if plan.sequence_parallel else "--no-sp")
    if plan.pipeline_parallel > 1:
        words.append(f"--pp {plan.pipeline_parallel} --schedule {plan.pipeline_schedule}")
        if plan.virtual_stages > 1:
            words.append(f"--virtual-stages {plan.virtual_stages}")
    if plan.dp_replicate > 1:
        words.append(f"--dp-replicate {plan.dp_replicate}")
    if plan.context_parallel > 1:
        words.append(f"--cp {plan.context_parallel} --cp-method {plan.context_parallel_method}")
    if plan.expert_parallel > 1:
        words.append(f"--ep {plan.expert_parallel}")
    if not plan.expert_tensor_parallel:
        words.append("--no-etp")
    words += [f"--zero {plan.zero_stage}", typed_recompute(plan)]
    if plan.secondary_ranks > 1:
        words.append(f"--secondary-ranks {plan.secondary_ranks}")
    if plan.quantised_weights:
        words.append("--quantised-weights")
    if plan.quantised_gradients:
        words.append("--quantised-gradients")
    if plan.offload != "none":
        words.append(f"--offload {plan.offload}")
        if plan.offload_device != "cpu":
            words.append(f"--offload-device {plan.offload_device}")
    words.append(f"--micro-batch-size {plan.micro_batch_size}")
    return " ".join(words)


def typed_batch(workload: Workload) -> str:
    """Return the option for the global batch."""
    return f"--global-batch-size {workload.global_batch_size}"


def typed_cluster(cluster: Cluster) -> str | None:
    """Return the cluster as one types it; None where only a file says what it is."""
    try:
        same = parse_cluster(cluster.name).tiers == cluster.tiers
    except ShardplanError:
        return None
    return shlex.quote(cluster.name) if same else None


def plan_command(scenario: Scenario, plan: Plan) -> str:
    """Return the command that searches for the best plan, offloading what a plan offloads."""
    pinned = []
    if plan.offload != "none":
        device = f",offload_device={plan.offload_device}" if plan.offload_device != "cpu" else ""
        pinned = [f"--fix offload={plan.offload}{device}"]
    return " ".join(["shardplan plan", *_asked(scenario), *pinned, "-o plan.json"])


def fit_command(scenario: Scenario, plan: Plan) -> str:
    """Return the command that asks whether a plan of a scenario fits."""
    return " ".join(["shardplan fit", *_asked(scenario), describe_plan(plan)])


def _asked(scenario: Scenario) -> list[str]:
    """Return a scenario as words: model, cluster and every option that is not the default."""
    workload = scenario.workload
    words = [shlex.quote(scenario.model.name), shlex.quote(scenario.cluster.name)]
    words += [f"--seq-len {workload.seq_len}", typed_batch(workload)]
    usual = Workload(1, 1)
    if workload.precision != default_precision(scenario.cluster.accelerator):
        words.append(f"--precision {workload.precision}")
    if workload.optimizer != usual.optimizer:
        words.append(f"--optimizer {workload.optimizer}")
    if workload.optimizer_state_precision != usual.optimizer_state_precision:
        words.append(f"--optimizer-precision {workload.optimizer_state_precision}")
    if workload.gradient_precision != usual.gradient_precision:
        words.append(f"--gradient-precision {workload.gradient_precision}")
    if not workload.master_weights:
        words.append("--no-master-weights")
    if workload.attention_kernel != usual.attention_kernel:
        words.append(f"--attention {workload.attention_kernel}")
    if scenario.software.name != DEFAULT_SOFTWARE:
        words.append(f"--software {scenario.software.name}")
    if workload.freeze:
        words.append(f"--freeze {workload.freeze}")
    if workload.adapter != "none":
        words.append(f"--{workload.adapter} {workload.adapter_rank}")
        words.append(f"--lora-alpha {workload.adapter_alpha:g}")
        words.append(f"--lora-targets {workload.adapter_targets}")
        if workload.quantisation != usual.quantisation:
            words.append(f"--quantisation {workload.quantisation}")
    if scenario.layer_ranges is not None:
        words.append(typed_layers(scenario.layer_ranges))
    words += typed_by_stage(scenario.stage_recompute_layers)
    return words
