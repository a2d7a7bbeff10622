"""Models and plans that the executor can run; imports neither torch nor models.

The rules that hold for every trainer are ``cost_models.legality.rules``; these are the executor's
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cost_models.legality.executor_limits import unsupported_field, untrained, untrained_recompute
from cost_models.legality.rules import require_legal
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import names_in
from hardware_profiles.software.trainer import software_profile

OWN_PROFILE: Final = "shardplan"  # the software profile of this executor

FAMILIES: Final = names_in("""
    bert cohere deepseek_v3 gemma gemma2 gemma3_text glm4 gpt2 gpt_neox gpt_oss granite llama
    mistral mixtral olmo2 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next smollm3
    starcoder2 t5
""")

MASKED_FAMILIES: Final = ("bert",)  # predict masked tokens
SPAN_FAMILIES: Final = ("t5",)  # predict removed spans of tokens
# families whose compiled layers were not compared with eager ones
UNCOMPILED_FAMILIES: Final = (*SPAN_FAMILIES, "qwen3_next")


def own_scenario(file: PlanFile) -> Scenario:
    """Return the scenario of a plan.json under this executor, with the ranks of its plan."""
    return Scenario(
        file.model,
        file.cluster,
        file.workload,
        software_profile(OWN_PROFILE),
        layer_ranges=file.layer_ranges,
        stage_recompute_layers=file.stage_recompute_layers,
        num_ranks=file.plan.world_size,
    )


def check_supported(file: PlanFile) -> None:
    """Raise an InputError that names an option which the executor does not support."""
    require_legal(own_scenario(file), file.plan)
    for problem in _problems(file):
        raise InputError(f"the executor cannot run this plan: {problem}")


def _problems(file: PlanFile) -> Iterator[str]:
    model, plan = file.model, file.plan
    yield from untrained(model, file.workload)
    if model.family not in FAMILIES:
        yield (
            f"model_type {model.family} (it trains {', '.join(FAMILIES)}). "
            f"{did_you_mean(model.family, FAMILIES)}"
        ).rstrip()
    if (field := unsupported_field(plan)) is not None:
        yield field
    if (setting := untrained_recompute(file.workload, plan)) is not None:
        yield setting
    if plan.offloads_weights:
        yield f"offload {plan.offload} (only none, optimizer, activations, optimizer+activations)"
    # every tensor-parallel rank holds ceil(vocabulary / ranks) rows; the last must not be empty
    rows = -(-model.vocab_size // plan.tensor_parallel)
    if rows * (plan.tensor_parallel - 1) >= model.vocab_size:
        yield (
            f"tensor_parallel {plan.tensor_parallel} leaves a rank without any of the "
            f"{model.vocab_size} words of the vocabulary (vocab_size)"
        )
