"""Small models that are trained here for real, and plans in a few words."""

from __future__ import annotations

from typing import Any

from benchmarks.memory_truth.cases import file_of
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **WIDE},
    "qwen3": {"model_type": "qwen3", **WIDE, "head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 8,
        "n_head": 8,
        "n_positions": 1024,
        "vocab_size": 4096,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def small(
    family: str,
    precision: str,
    plan: Plan,
    *,
    seq_len: int = 256,
    layers: int | None = None,
    **workload: Any,
) -> PlanFile:
    """Return a plan file for one of the small models; ``layers``: other than its own number."""
    config = dict(CONFIGS[family])
    if layers is not None:
        config["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
    return file_of(
        config,
        plan,
        Workload(
            seq_len,
            plan.global_batch_size,
            precision=precision,  # type: ignore[arg-type]
            **workload,
        ),
    )


def words(plan: Plan) -> str:
    """A plan in short."""
    return (
        f"dp{plan.data_parallel} tp{plan.tensor_parallel}{'+sp' if plan.sequence_parallel else ''} "
        f"pp{plan.pipeline_parallel}x{plan.virtual_stages} {plan.pipeline_schedule} "
        f"z{plan.zero_stage} {plan.recompute} b{plan.micro_batch_size} m{plan.num_microbatches}"
    )
