"""Whole jobs of the book of formulas: what each part of their memory, time and traffic comes to.

Between them they use every technique, kind of model and trainer that the formulas tell apart. No
number of the page is typed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, Final

import numpy as np

import planner
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.legality.rules import legality_codes, require_legal
from cost_models.memory.peak import timelines
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.prediction import predict
from cost_models.pricing.simulated_steps import simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.record import to_json
from planner.request.scenario import adapting, build_scenario

HEAD: Final = """# Whole jobs

What the formulas come to together, for jobs that between them use the techniques, kinds of models
and trainers that the formulas tell apart: bytes of the fullest accelerator of every stage, seconds
and FLOP of a step, the collectives of every stage (number, bytes), and live bytes and seconds with
other recomputation.
`python docs/make_formulas.py --write` computes them, so the change of a formula shows here, part by
part, which prices it changed.
"""

SIZES: Final = {"vocab_size": 208, "hidden_size": 48, "num_hidden_layers": 4} | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RECOMPUTED: Final = (
    *("none", "selective", "full", "selective_ops", "ops:every-2nd-mm"),
    *("modules:core_attn+mla_up_proj+layernorm+mlp+shared_experts+moe_act", "modules:mlp+moe"),
)
# small enough that a single byte shows among seven digits
TINY_MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny-llama": SIZES | {"model_type": "llama", "intermediate_size": 112},
    "tiny-olmo2": SIZES | {"model_type": "olmo2", "intermediate_size": 112},
    "tiny-gemma2": SIZES
    | {"model_type": "gemma2", "intermediate_size": 112, "head_dim": 12, "sliding_window": 24}
    | {"attention_dropout": 0.1},
    "tiny-deepseek": SIZES
    | {"model_type": "deepseek_v2", "intermediate_size": 112, "moe_intermediate_size": 24}
    | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3}
    | {"first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 16, "num_key_value_heads": 8}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
    "tiny-gpt2": {"model_type": "gpt2", "vocab_size": 208, "n_embd": 48, "n_head": 8, "n_layer": 4},
    "tiny-qwen3-next": SIZES
    | {"model_type": "qwen3_next", "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8}
    | {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 6},
    "tiny-t5": {"model_type": "t5", "vocab_size": 208, "d_model": 48, "d_kv": 6, "d_ff": 112}
    | {"num_layers": 4, "num_heads": 8},
}
TINY: Final[tuple[tuple[str, str, Mapping[str, Any]], ...]] = (
    (
        "tiny-llama",
        "8xA100-80GB",
        {"tensor_parallel": 2, "sequence_parallel": True, "zero_stage": 1, "num_microbatches": 3}
        | {"freeze": "embedding,layers:0-1", "seq_len": 40, "recompute": "full"},
    ),
    (
        "tiny-llama",
        "8xA100-80GB",
        {"tensor_parallel": 2, "lora": 4, "zero_stage": 3, "num_microbatches": 2, "seq_len": 40},
    ),
    (
        "tiny-olmo2",
        "8xA100-80GB",
        {"tensor_parallel": 4, "pipeline_parallel": 2, "num_microbatches": 4, "seq_len": 40}
        | {"attention_kernel": "eager", "software": "megatron"},
    ),
    (
        "tiny-olmo2",
        "6xA100-80GB",
        {"software": "fsdp1", "zero_stage": 2, "num_microbatches": 2, "precision": "fp16"}
        | {"seq_len": 40, "recompute": "full", "recompute_layers": 3},
    ),
    (
        "tiny-gemma2",
        "8xA100-80GB",
        {"zero_stage": 3, "dp_replicate": 2, "num_microbatches": 2, "attention_kernel": "eager"}
        | {"seq_len": 40, "software": "hf-trainer", "micro_batch_size": 3},
    ),
    (
        "tiny-gemma2",
        "8xA100-80GB",
        {"pipeline_parallel": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2}
        | {"num_microbatches": 4, "seq_len": 40, "precision": "fp32", "optimizer": "adafactor"},
    ),
    (
        "tiny-deepseek",
        "8xA100-80GB",
        {"expert_parallel": 4, "tensor_parallel": 2, "sequence_parallel": True, "zero_stage": 2}
        | {"num_microbatches": 2, "seq_len": 40, "recompute": "selective_ops"},
    ),
    (
        "tiny-deepseek",
        "8xA100-80GB",
        {"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": False}
        | {"zero_stage": 3, "seq_len": 40, "recompute": "modules:mla_up_proj+moe_act"}
        | {"num_microbatches": 2, "micro_batch_size": 2},
    ),
    (
        "tiny-deepseek",
        "8xA100-80GB",
        {"software": "deepspeed-zero3", "zero_stage": 3, "offload": "weights+activations"}
        | {"expert_parallel": 4, "seq_len": 40, "num_microbatches": 2, "recompute": "full"},
    ),
    (
        "tiny-t5",
        "8xA100-80GB",
        {"tensor_parallel": 2, "pipeline_parallel": 2, "num_microbatches": 4, "seq_len": 40}
        | {"sequence_parallel": True, "zero_stage": 1},
    ),
    (
        "tiny-t5",
        "8xA100-80GB",
        {"zero_stage": 2, "software": "torch-compile", "seq_len": 40, "micro_batch_size": 3},
    ),
)
# options of planner.fit, after the model and the cluster
TRAINING: Final[tuple[tuple[str, str, Mapping[str, Any]], ...]] = (
    (
        "deepseek-v2-lite",
        "2x8xH800-SXM",
        {
            "pipeline_schedule": "dualpipev",
            "pipeline_parallel": 4,
            "virtual_stages": 2,
            "num_microbatches": 12,
        }
        | {"expert_parallel": 4, "zero_stage": 1, "recompute": "selective_ops"},
    ),
    (
        "llama-3-8b",
        "8xH100-SXM",
        {"software": "torchtitan+dtensor-loss", "tensor_parallel": 4, "precision": "fp8"}
        | {"sequence_parallel": True, "zero_stage": 3, "recompute": "ops:every-2nd-mm"},
    ),
    (
        "qwen2.5-7b",
        "4xL40S",
        {"software": "hf-trainer+ragged-batches", "lora": 16, "zero_stage": 2}
        | {"micro_batch_size": 2, "recompute": "full", "seq_len": 2048},
    ),
    (
        "t5-large",
        "8xV100-SXM2-32GB",
        {"precision": "fp16", "attention_kernel": "eager", "optimizer": "adafactor"}
        | {"software": "hf-trainer-early", "seq_len": 512, "micro_batch_size": 4},
    ),
    (
        "mixtral-8x7b",
        "4x8xH100-SXM",
        {"software": "megatron", "precision": "fp8", "tensor_parallel": 2, "zero_stage": 1}
        | {"sequence_parallel": True, "context_parallel": 2, "expert_parallel": 4}
        | {
            "pipeline_parallel": 2,
            "recompute": "modules:core_attn+mlp",
            "seq_len": 8192,
            "num_microbatches": 8,
        },
    ),
    (
        "bert-base",
        "4xA100-80GB",
        {"software": "ddp+adamw-for-loop", "precision": "fp32", "optimizer": "lamb"}
        | {"seq_len": 512, "micro_batch_size": 16},
    ),
    (
        "llama-2-13b",
        "8xA100-40GB",
        {
            "software": "fsdp1",
            "zero_stage": 3,
            "num_microbatches": 4,
            "recompute": "full",
            "recompute_layers": 20,
        }
        | {"precision": "fp16", "dp_replicate": 2},
    ),
    (
        "gemma-2-9b",
        "2xA100-80GB",
        {"zero_stage": 3, "offload": "weights", "offload_device": "nvme", "optimizer": "adam"}
        | {"attention_kernel": "eager", "recompute": "selective"},
    ),
    (
        "llama-3-8b",
        "1xRTX-4090",
        {"software": "lit-gpt-nf4", "qlora": 8, "quantisation": "nf4_double", "seq_len": 1024},
    ),
    (
        "llama-3-70b",
        "8x8xH100-SXM",
        {"pipeline_schedule": "interleaved_zero_bubble", "pipeline_parallel": 4}
        | {"virtual_stages": 2, "tensor_parallel": 4, "sequence_parallel": True}
        | {"context_parallel": 2, "context_parallel_method": "ulysses", "seq_len": 16384}
        | {"num_microbatches": 8, "recompute_layers": 4, "recompute": "full"},
    ),
    (
        "qwen2.5-32b",
        "4x8xMI300X",
        {"context_parallel": 4, "context_parallel_method": "allgather", "seq_len": 32768}
        | {"zero_stage": 3, "secondary_ranks": 2, "quantised_weights": True}
        | {"quantised_gradients": True, "offload": "activations", "optimizer": "muon"},
    ),
    (
        "gpt2-xl",
        "4xA100-40GB",
        {
            "pipeline_schedule": "zbv",
            "pipeline_parallel": 4,
            "virtual_stages": 2,
            "num_microbatches": 8,
        }
        | {"optimizer": "sgd_momentum", "seq_len": 1024, "recompute": "none"},
    ),
    (
        "falcon-7b",
        "4x8xV100-SXM2-32GB",
        {
            "software": "megatron-deepspeed",
            "precision": "fp16",
            "pipeline_parallel": 2,
            "num_microbatches": 4,
        }
        | {"zero_stage": 1, "optimizer": "adamw_8bit", "seq_len": 2048},
    ),
    (
        "llama-3-8b",
        "4xA100-80GB",
        {"software": "deepspeed-zero3", "zero_stage": 3, "offload": "optimizer"}
        | {"freeze": "embedding,layers:0-3", "gradient_precision": "bf16"},
    ),
    (
        "qwen3-30b-a3b",
        "8xH200-SXM",
        {"expert_parallel": 8, "zero_stage": 3, "tensor_parallel": 2}
        | {"sequence_parallel": True, "expert_tensor_parallel": False, "recompute": "full"},
    ),
    (
        "gpt-oss-20b",
        "8xB200",
        {"software": "torch-compile+nvfp4", "precision": "fp4", "zero_stage": 2}
        | {"master_weights": False, "recompute": "selective_ops"},
    ),
    (
        "opt-1.3b",
        "1xT4",
        {"software": "peft", "qlora": 16, "precision": "fp16", "seq_len": 512}
        | {"lora_targets": "attention", "quantisation": "int8"},
    ),
    (
        "starcoder2-7b",
        "8xA100-80GB",
        {"software": "hf-trainer-liger", "zero_stage": 3, "optimizer": "paged_adamw"}
        | {"recompute": "full", "micro_batch_size": 2},
    ),
    (
        "command-r",
        "4x8xH100-SXM",
        {"software": "nemo", "tensor_parallel": 8, "sequence_parallel": True}
        | {
            "pipeline_parallel": 2,
            "pipeline_schedule": "interleaved_1f1b",
            "virtual_stages": 2,
            "num_microbatches": 4,
        },
    ),
    (
        "llama-3-8b",
        "8xTPU-v5e",
        {"software": "xla", "zero_stage": 3, "recompute": "full", "optimizer": "lion"},
    ),
    (
        "phi-2",
        "4xA100-80GB",
        {"pipeline_schedule": "zero_bubble", "pipeline_parallel": 4, "num_microbatches": 8}
        | {"recompute": "selective_ops", "optimizer": "sgd", "precision": "tf32"},
    ),
    (
        "llama-3-8b",
        "2x8xA100-80GB",
        {"software": "torchtune-chunked", "zero_stage": 3, "offload": "weights+activations"}
        | {"recompute": "full", "seq_len": 8192},
    ),
)
SERVING: Final[tuple[tuple[str, str, Mapping[str, Any]], ...]] = (
    (
        "llama-3-70b",
        "2x8xH100-SXM",
        {"tensor_parallel": 8, "pipeline_parallel": 2, "weight_precision": "fp8"}
        | {"concurrency": 64, "context_len": 8192},
    ),
    (
        "mixtral-8x7b",
        "8xH100-SXM",
        {"data_parallel": 4, "tensor_parallel": 2, "expert_parallel": 8, "kv_precision": "fp8"}
        | {"concurrency": 64, "context_len": 4096, "prompt_len": 1000},
    ),
    (
        "deepseek-v3",
        "2x8xH200-SXM",
        {"data_parallel": 16, "expert_parallel": 16, "weight_precision": "fp8"}
        | {"concurrency": 256, "context_len": 16384},
    ),
    ("t5-large", "1xA100-80GB", {"concurrency": 8, "context_len": 512}),
    ("gemma-2-9b", "1xL4", {"concurrency": 4, "context_len": 4096, "cuda_graphs": False}),
    (
        "qwen3-next-80b-a3b",
        "4xH100-SXM",
        {"tensor_parallel": 4, "concurrency": 32, "context_len": 32768, "prefill_chunk": 2048},
    ),
    ("bert-base", "1xA100-80GB", {"concurrency": 32, "context_len": 512}),
    (
        "llama-3-8b",
        "2xA100-80GB",
        {"weight_precision": "int4", "kv_precision": "int8", "concurrency": 16},
    ),
)


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for model, cluster, options in (*TINY, *TRAINING):
        lines += section(model, cluster, options, training(*job(model, cluster, options)))
    for model, cluster, options in SERVING:
        answer = planner.fit(model, cluster, inference=True, **options)
        lines += section(model, cluster, {"inference": True, **options}, serving(answer))
    return "\n".join(lines).rstrip() + "\n"


def section(
    model: str, cluster: str, options: Mapping[str, Any], priced: Iterable[tuple[str, str]]
) -> Iterator[str]:
    """Yield the section of a job."""
    words = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    name = "config.json" if model in TINY_MODELS else model
    call = f'planner.fit(\n    "{name}", "{cluster}",\n{words})'.replace("'", '"')
    software = f", {options['software']}" if "software" in options else ""
    yield from (f"## {model} on {cluster}{software}", "")
    if model in TINY_MODELS:
        yield from ("```json", json.dumps(TINY_MODELS[model]), "```", "")
    yield from ("```python", call, "```", "", "```text")
    for name, numbers in priced:
        yield f"{name:30} {numbers}"
    yield from ("```", "")


def job(model: str, name: str, options: Mapping[str, Any]) -> tuple[Scenario, Plan]:
    """Return the plan of a job on all accelerators; what is not given is off, or one."""
    cluster, rest = parse_cluster(name), dict(options)
    given = {each.name: rest.pop(each.name) for each in fields(Plan) if each.name in rest}
    plan = Plan(**given)
    plan = replace(plan, data_parallel=cluster.num_gpus // plan.world_size)
    lora = [rest.pop(each, None) for each in ("lora", "qlora")]
    more = [rest.pop(each, None) for each in ("lora_targets", "quantisation")]
    config = TINY_MODELS.get(model) or load_preset(model).config
    scenario = build_scenario(
        model_spec(config, name=model),
        cluster,
        global_batch_size=plan.global_batch_size,
        adapter=adapting(*lora, None, *more),
        **rest,
    ).scenario
    require_legal(scenario, plan)
    return scenario, plan


def training(scenario: Scenario, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the parts of the price of a training job."""
    ranges = default_layer_ranges(scenario, plan)
    found = predict(scenario, plan, ranges)
    table = PlanTable.from_plans([plan])
    priced = price(scenario, table)
    memory, time = found.memory, found.time
    yield "peak", numbers((memory.peak_bytes,))
    yield (
        "live, reserved, device",
        numbers(
            (memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.device_used_bytes)
        ),
    )
    for stage in memory.stages:
        yield f"stage {stage.stage}: {stage.moment}", parts(stage.parts)
    for stage, line in enumerate(timelines(scenario, plan, ranges)):
        yield f"stage {stage}: live by moment", numbers(float(at.allocated) for at in line)
    yield "host", parts(priced.host)
    yield "step", numbers((time.step_seconds,))
    yield "simulated", numbers(simulated_steps(scenario, table))
    yield "seconds", parts(time.parts)
    yield "MFU, HFU", numbers((time.mfu or 0.0, time.hfu or 0.0))
    yield "FLOP", numbers(hardware_flops_per_step(scenario.model, scenario.workload, table))
    for one in found.communication:
        yield f"stage {one.stage}: {one.axis} {one.kind}", f"{one.count} x {one.bytes:,}"
    others = [replace(plan, recompute=each, recompute_layers=0) for each in RECOMPUTED]
    codes = legality_codes(scenario, PlanTable.from_plans(others))
    legal = [each for each, code in zip(others, codes, strict=True) if not code]
    if not legal:
        return
    priced = price(scenario, PlanTable.from_plans(legal))
    for row, each in enumerate(legal):
        both = (float(priced.memory.allocated[row]), float(priced.step[row]))  # type: ignore[index]
        yield each.recompute, numbers(both)


def serving(answer: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of the price of a served model."""
    memory, time = answer.assessment.memory, answer.time
    yield (
        "memory: low, peak, high",
        numbers((memory.low_bytes, memory.peak_bytes, memory.high_bytes)),
    )
    yield "memory", parts(memory.parts)
    times = asdict(time)
    for name, record in (("prompts", times), ("a token", times.pop("token", None) or {})):
        numbers_alone = {k: v for k, v in record.items() if isinstance(v, int | float)}
        yield name, parts_of(numbers_alone)
        yield from ((name, parts_of(each)) for each in record.values() if isinstance(each, dict))


def parts(record: Any) -> str:
    """Return the parts of a record that are not zero."""
    return parts_of(to_json(record))


def parts_of(values: Mapping[str, Any]) -> str:
    """Return values that are not zero with their names."""
    flat = ((name, float(np.ravel(value)[0])) for name, value in values.items())
    return ", ".join(f"{name} {value:.7g}" for name, value in flat if value) or "0"


def numbers(values: Any) -> str:
    """Return numbers with seven digits."""
    return "  ".join(f"{float(value):.7g}" for value in values)


if __name__ == "__main__":
    print(page())
