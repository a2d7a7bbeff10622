"""Legal plans with their scenarios, drawn at random: what laws are tested on."""

from dataclasses import replace
from typing import Any, get_args

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from cost_models.legality.rules import legality_codes
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import (
    CONTEXT_METHODS,
    OFFLOADS,
    SCHEDULES,
    SEARCHED_RECOMPUTE,
    Plan,
    PlanTable,
)
from cost_models.plan.recompute import RECOMPUTE
from cost_models.plan.workload import Optimizer, Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.build import build_cluster
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import profile_names, software_profile
from tests.samples import CONFIGS, LLAMA, examples

# many drawn plans are illegal
SETTINGS = settings(
    max_examples=examples(30),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
A100 = find_accelerator("A100-SXM-80GB")

GEMMA2 = LLAMA | {"model_type": "gemma2", "sliding_window": 64, "head_dim": 16}
DEEPSEEK = {
    "model_type": "deepseek_v2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: config for name, config in CONFIGS.items() if name != "t5"},
    "gemma2": GEMMA2,
    "deepseek_v2": DEEPSEEK,
}
# every trainer, and engines that none of them has by itself
SOFTWARE = (
    *profile_names(),
    *("torchtitan+dtensor-loss", "hf-trainer+ragged-batches", "torchtune+ragged-batches"),
)


def cluster_of(plan: Plan) -> Cluster:
    nodes, gpus = (1, plan.world_size) if plan.world_size <= 8 else (plan.world_size // 8, 8)
    return build_cluster(A100, num_nodes=nodes, gpus_per_node=gpus)


def scenario_of(model: ModelSpec, workload: Workload, plan: Plan, software: str) -> Scenario:
    batch = replace(workload, global_batch_size=plan.global_batch_size)
    return Scenario(adapted(model, batch), cluster_of(plan), batch, software_profile(software))


def is_legal(scenario: Scenario, *plans: Plan) -> bool:
    return not legality_codes(scenario, PlanTable.from_plans(list(plans))).any()


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan on up to 64 ranks; one in three is of data parallelism alone, as many trainers are."""
    data, zero = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 3))
    plain = Plan(
        data_parallel=data,
        zero_stage=zero,
        micro_batch_size=draw(st.integers(1, 4)),
        num_microbatches=draw(st.sampled_from([1, 2, 8, 16])),
    )
    if draw(st.integers(0, 2)) == 0:
        return replace(plain, recompute=draw(st.sampled_from(SEARCHED_RECOMPUTE)))
    pipeline = draw(st.sampled_from([1, 1, 2, 4]))
    tensor = draw(st.sampled_from([1, 2, 4]))
    schedule = draw(st.sampled_from(SCHEDULES)) if pipeline > 1 else "1f1b"
    offload = draw(st.sampled_from(["none", "none", *OFFLOADS]))
    plus_plus = zero == 3 and draw(st.booleans())  # ZeRO++
    return replace(
        plain,
        dp_replicate=draw(st.sampled_from([1, 1, 1, data])),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context_parallel=draw(st.sampled_from([1, 1, 1, 2])),
        context_parallel_method=draw(st.sampled_from(CONTEXT_METHODS)),
        expert_parallel=draw(st.sampled_from([1, 1, 2])),
        expert_tensor_parallel=draw(st.booleans()),
        pipeline_schedule=schedule,
        virtual_stages=1 if schedule in ("1f1b", "gpipe", "zero_bubble") else 2,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(RECOMPUTE)),
        offload=offload,
        offload_device="nvme" if offload == "weights" and draw(st.booleans()) else "cpu",
        secondary_ranks=draw(st.sampled_from([1, data])) if plus_plus else 1,
        quantised_weights=plus_plus and draw(st.booleans()),
        quantised_gradients=plus_plus and draw(st.booleans()),
    )


@st.composite
def asked(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """A legal plan with its scenario: one of the trainers that run it."""
    plan = draw(plans())
    adapter = draw(st.sampled_from(["none", "none", "lora", "qlora"]))
    workload = Workload(
        seq_len=64 * draw(st.integers(1, 40)),
        global_batch_size=1,
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        optimizer="adamw" if adapter != "none" else draw(st.sampled_from(get_args(Optimizer))),
        attention_kernel=draw(st.sampled_from(["flash", "eager"])),
        document_mask=draw(st.integers(0, 3)) == 0,
        adapter=adapter,  # type: ignore[arg-type]
        adapter_rank=8 if adapter != "none" else 0,
        adapter_alpha=16.0 if adapter != "none" else 0.0,
    )
    name = draw(st.sampled_from(sorted(MODELS)))
    model = model_spec(MODELS[name] | _longer(name), name=name)
    usual = draw(st.sampled_from(["shardplan", "megatron"]))
    drawn = draw(st.lists(st.sampled_from(SOFTWARE), min_size=2, max_size=2))
    scenario = scenario_of(model, workload, plan, usual)
    tried = [replace(scenario, software=software_profile(each)) for each in (*drawn, usual)]
    run = [each for each in tried if is_legal(each, plan)]
    assume(run)
    return run[0], plan


def _longer(name: str) -> dict[str, Any]:
    return {"n_positions": 10**6} if name == "gpt2" else {"max_position_embeddings": 10**6}
