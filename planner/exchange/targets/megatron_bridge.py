"""Recipes of Megatron Bridge: a Python function that returns a ConfigContainer.

Source: megatron-bridge 0.3.1, megatron/bridge/training/config.py, mixed_precision.py,
recipes/common.py, recipes/llama/llama3.py.
"""

from __future__ import annotations

from typing import Any, Final

from hardware_profiles.fields import names_in
from planner.exchange.job import Job
from planner.exchange.keys import Key, Source, without_effect
from planner.exchange.megatron_fields import ELSEWHERE
from planner.exchange.megatron_recipes import placed_fields, recipe
from planner.exchange.syntax.python_document import CALL
from planner.exchange.syntax.python_recipe import FUNCTION

FILE: Final = "megatron_bridge_job.py"
MIXED: Final = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
}
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "model": names_in("""
        tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size pipeline_model_parallel_layout context_parallel_size
        cp_comm_type expert_model_parallel_size expert_tensor_parallel_size seq_length
        recompute_granularity recompute_method recompute_num_layers recompute_modules
    """),
    "train": ("micro_batch_size", "global_batch_size"),
    "ddp": names_in("""
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather use_megatron_fsdp
        data_parallel_sharding_strategy num_distributed_optimizer_instances
    """),
    "optimizer": names_in("""
        optimizer sgd_momentum use_distributed_optimizer optimizer_cpu_offload
        optimizer_offload_fraction use_precision_aware_optimizer
    """),
}
FOOTER: Final = (
    'if __name__ == "__main__":',
    "    from megatron.bridge.training.gpt_step import forward_step",
    "    from megatron.bridge.training.pretrain import pretrain",
    "",
    f"    pretrain({FUNCTION}(), forward_step)",
)


def values(job: Job) -> dict[str, Any]:
    """Return the values of a configuration by path."""
    return {
        CALL: "megatron.bridge.recipes.common._pretrain_common",
        f"model.{CALL}": "megatron.bridge.AutoBridge.from_hf_pretrained.to_megatron_provider",
        "model.0": job.hub_name,
        "model.load_weights": False,
        **placed_fields(job, SECTIONS),
        "dataset.seq_length": job.workload.seq_len,
        "mixed_precision": MIXED.get(job.workload.precision),
        "tokenizer.tokenizer_model": job.hub_name,
        **({"checkpoint.ckpt_format": "fsdp_dtensor"} if job.plan.zero_stage >= 2 else {}),
    }


def model_name(source: Source) -> str | None:
    """Return the model in the Hugging Face hub that a recipe converts."""
    named = source.get("model.0")
    return named if isinstance(named, str) else None


TARGET: Final = recipe(
    "megatron-bridge",
    FILE,
    FOOTER,
    SECTIONS,
    (
        Key("mixed_precision", ("precision",)),
        *without_effect(f"""
            {CALL} model model.* train.* ddp.* optimizer.* dataset.* tokenizer.* checkpoint.*
            logger.* scheduler.* rng.* dist.* comm_overlap.* peft.* profiling.* ft.*
            rerun_state_machine.* straggler.* nvrx_straggler.* comm_overlap tensor_inspect.*
            inprocess_restart.* validation.* peft env.*
        """),
    ),
    elsewhere={**ELSEWHERE, "attention_kernel": "config.model.attention_backend"},
    recognises=lambda document: "train" in document and "model" in document,
    values=values,
    model_name=model_name,
)
