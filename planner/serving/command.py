"""Serving layouts as commands: of shardplan, and of vLLM."""

from __future__ import annotations

import math
import shlex

from cost_models.plan.plan import Plan
from cost_models.serving.kv_cache import has_cache
from planner.request.stage_layers import layers_option
from planner.serving.scenario import ServingScenario, assess_serving, sequences_of


def describe_serving(plan: Plan) -> str:
    """Return the layout of a replica as options.

    >>> describe_serving(Plan(data_parallel=2, tensor_parallel=4))
    '--dp 2 --tp 4 --pp 1'
    """
    words = f"--dp {plan.data_parallel} --tp {plan.tensor_parallel} --pp {plan.pipeline_parallel}"
    return f"{words} --ep {plan.expert_parallel}" if plan.expert_parallel > 1 else words


def serve_command(scenario: ServingScenario, plan: Plan) -> str:
    """Return the command that checks one layout."""
    workload = scenario.workload
    words = ["shardplan fit", shlex.quote(scenario.model.name), shlex.quote(scenario.cluster.name)]
    words.append(f"--inference --concurrency {workload.concurrency}")
    words.append(f"--context-len {workload.context_len} --prefill-chunk {workload.prefill_chunk}")
    words.append(f"--precision {workload.precision}")
    words.append(f"--weight-precision {workload.weight_precision}")
    words.append(f"--kv-precision {workload.kv_precision}")
    if workload.prompt_len and workload.prompt_tokens < workload.context_len:
        words.append(f"--prompt-len {workload.prompt_tokens}")
    if not workload.cuda_graphs:
        words.append("--no-cuda-graphs")
    if workload.attention_kernel != "flash":
        words.append(f"--attention {workload.attention_kernel}")
    words.append(describe_serving(plan))
    if scenario.layer_ranges is not None:
        words.append(layers_option(scenario.layer_ranges))
    return " ".join(words)


def vllm_options(scenario: ServingScenario, plan: Plan) -> str | None:
    """Return the options of vLLM for a layout; None if vLLM does not support it.

    The share of the memory is the predicted one, rounded up.
    """
    model, workload = scenario.model, scenario.workload
    if not has_cache(model) or model.is_encoder_decoder:
        return None
    on_gpu = scenario.cluster.accelerator.device == "gpu"
    if not on_gpu or workload.kv_precision in ("int8", "int4"):
        return None
    words = []
    if plan.tensor_parallel > 1:
        words.append(f"--tensor-parallel-size {plan.tensor_parallel}")
    if plan.pipeline_parallel > 1:
        words.append(f"--pipeline-parallel-size {plan.pipeline_parallel}")
    if plan.data_parallel > 1:
        words.append(f"--data-parallel-size {plan.data_parallel}")
    if plan.expert_parallel > 1:
        words.append("--enable-expert-parallel")
    words.append(f"--max-model-len {workload.context_len}")
    words.append(f"--max-num-seqs {sequences_of(scenario, plan)}")
    words.append(
        f"--max-num-batched-tokens {max(workload.prefill_chunk, sequences_of(scenario, plan))}"
    )
    if not workload.cuda_graphs:
        words.append("--enforce-eager")
    if workload.kv_precision == "fp8":
        words.append("--kv-cache-dtype fp8")
    assessment = assess_serving(scenario, plan)
    share = math.ceil(100 * assessment.memory.peak_bytes / assessment.budget.capacity) / 100
    return " ".join([*words, f"--gpu-memory-utilization {share:.2f}"]) if share <= 1 else None
