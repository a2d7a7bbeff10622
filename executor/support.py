"""What the executor can run; asked before anything starts, so it imports neither torch nor models.

The rules that hold for every trainer are ``cost_models.legality``; these are the executor's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cost_models.legality import Question, require_legal
from cost_models.plan_file import PlanFile
from hardware_profiles.errors import InputError, did_you_mean

FAMILIES: Final = (
    "cohere",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)


def check_supported(file: PlanFile) -> None:
    """Raise an InputError that names the option which stands against running a plan."""
    require_legal(Question(file.model, file.workload, file.plan.world_size), file.plan)
    for problem in _problems(file):
        raise InputError(f"the executor cannot run this plan: {problem}")


def _problems(file: PlanFile) -> Iterator[str]:
    model, plan = file.model, file.plan
    if model.family not in FAMILIES:
        yield (
            f"model_type {model.family} (it trains {', '.join(FAMILIES)}). "
            f"{did_you_mean(model.family, FAMILIES)}"
        ).rstrip()
    # every tensor-parallel rank holds ceil(vocabulary / ranks) rows; the last must not be empty
    rows = -(-model.vocab_size // plan.tensor_parallel)
    if rows * (plan.tensor_parallel - 1) >= model.vocab_size:
        yield (
            f"tensor_parallel {plan.tensor_parallel} leaves a rank without any of the "
            f"{model.vocab_size} words of the vocabulary (vocab_size)"
        )
    if file.workload.adapter != "none":
        yield f"adapter {file.workload.adapter} (only none)"
    if model.config.get("reorder_and_upcast_attn"):
        yield "reorder_and_upcast_attn = true (only false)"
