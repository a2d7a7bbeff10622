"""Recipes of NeMo 2 (Python), and configurations of NeMo 1 (YAML), which are read only.

Source: NVIDIA/NeMo@0189a3b38d, nemo/collections/llm/recipes/llama3_70b.py and its neighbours (the
modules of Llama, Mistral, Mixtral, DeepSeek, qwen25_1p5b and qwen3_235b_a22b were looked up; those
of other Qwen sizes were not);
NVIDIA/NeMo@00a115fefd, examples/nlp/language_modeling/conf/megatron_llama_config.yaml.
"""

from __future__ import annotations

import re
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from planner.exchange.job import Job
from planner.exchange.keys import Key, Settings, Source, without_effect
from planner.exchange.megatron_fields import ELSEWHERE
from planner.exchange.megatron_recipes import placed_fields, read_fields_of_recipe, recipe
from planner.exchange.syntax.python_document import CALL
from planner.exchange.syntax.python_recipe import FUNCTION

FILE: Final = "nemo_job.py"
RECIPES: Final = "nemo.collections.llm.recipes"
# modules of recipes by the model's name
MODULES: Final = {
    "llama-3-8b": "llama3_8b",
    "llama-3-70b": "llama3_70b",
    "llama-3.1-8b": "llama31_8b",
    "llama-3.1-70b": "llama31_70b",
    "llama-3.1-405b": "llama31_405b",
    "llama-3.2-1b": "llama32_1b",
    "llama-3.2-3b": "llama32_3b",
    "mistral-7b": "mistral_7b",
    "mixtral-8x7b": "mixtral_8x7b",
    "mixtral-8x22b": "mixtral_8x22b",
    "qwen2.5-0.5b": "qwen25_500m",
    "qwen2.5-1.5b": "qwen25_1p5b",
    "qwen2.5-7b": "qwen25_7b",
    "qwen2.5-14b": "qwen25_14b",
    "qwen2.5-32b": "qwen25_32b",
    "qwen2.5-72b": "qwen25_72b",
    "qwen3-8b": "qwen3_8b",
    "qwen3-14b": "qwen3_14b",
    "qwen3-32b": "qwen3_32b",
    "qwen3-30b-a3b": "qwen3_30b_a3b",
    "qwen3-235b-a22b": "qwen3_235b_a22b",
    "deepseek-v2-lite": "deepseek_v2_lite",
    "deepseek-v2": "deepseek_v2",
    "deepseek-v3": "deepseek_v3",
}
PLUGINS: Final = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "bf16_with_fp8_mixed"}
FP32_GRADIENTS: Final = ("gradient_precision", "fp32")
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "trainer.strategy": names_in("""
        tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size
    """),
    "trainer.strategy.ddp": names_in("""
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather
        num_distributed_optimizer_instances grad_reduce_in_fp32
    """),
    "model.config": names_in("""
        seq_length cp_comm_type pipeline_model_parallel_layout recompute_granularity
        recompute_method recompute_num_layers recompute_modules
    """),
    "data": ("micro_batch_size", "global_batch_size", "seq_length"),
    "optim.config": names_in("""
        optimizer sgd_momentum use_distributed_optimizer optimizer_cpu_offload
        optimizer_offload_fraction use_precision_aware_optimizer
    """),
}
FOOTER: Final = (
    'if __name__ == "__main__":',
    "    import nemo_run",
    "",
    f"    nemo_run.run({FUNCTION}(), direct=True)",
)


def values(job: Job) -> dict[str, Any]:
    """Return the values of a recipe by path."""
    if job.model.name not in MODULES:
        raise InputError(
            f"{job.model.name}: NeMo has recipes for {', '.join(MODULES)} (megatron-bridge builds "
            "any model of the Hugging Face hub)"
        )
    plugin = f"{RECIPES}.precision.mixed_precision.{PLUGINS[job.workload.precision]}"
    return {
        CALL: f"{RECIPES}.{MODULES[job.model.name]}.pretrain_recipe",
        "num_nodes": job.cluster.num_nodes,
        "num_gpus_per_node": job.cluster.gpus_per_node,
        **placed_fields(job, SECTIONS),
        f"trainer.plugins.{CALL}": plugin,
    }


def complete(settings: Settings, source: Source) -> Settings:
    """Return the options that a recipe states; the precision plugins reduce gradients in fp32."""
    found = read_fields_of_recipe(settings, source)
    return {name: value for name, value in found.items() if (name, value) != FP32_GRADIENTS}


def model_name(source: Source) -> str | None:
    """Return the model of a recipe, by the module or the class that it names."""
    texts = [str(source.get(CALL, "")), str(source.get("model.config.0", ""))]
    names = {module: name for name, module in MODULES.items()}
    modules = texts[0].split(".")
    if len(modules) > 1 and modules[-2] in names:
        return names[modules[-2]]
    known = {re.sub(r"\W|_", "", f"{module}").lower(): name for module, name in names.items()}
    squeezed = re.sub(r"config", "", texts[1].rsplit(".", 1)[-1].lower())
    return known.get(re.sub(r"\W|_", "", squeezed))


TARGET: Final = recipe(
    "nemo",
    FILE,
    FOOTER,
    SECTIONS,
    (
        Key(f"trainer.plugins.{CALL}", ("precision",)),
        *without_effect(f"""
            {CALL} 0 num_nodes num_gpus_per_node dir name fn trainer.* model.* data.* optim.*
            log.* resume.* peft.* log resume restore_from_path exp_manager.* run.* hydra.*
            inference.* defaults
        """),
    ),
    elsewhere={**ELSEWHERE, "attention_kernel": "config.model.config.attention_backend"},
    processes=("num_gpus_per_node", "num_nodes"),
    recognises=lambda document: (
        "trainer" in document and ("model" in document or "data" in document)
    ),
    complete=complete,
    values=values,
    model_name=model_name,
)
