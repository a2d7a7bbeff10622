"""Predicted against traced memory of families whose layers keep other tensors than llama's."""

import pytest

from benchmarks.memory_truth import small_models
from benchmarks.memory_truth.rows import rows_of
from cost_models.plan.plan import Plan

CASES = {
    "phi3": {"pad_token_id": 0, "sliding_window": 64},  # fused matrices, a mask
    "gpt_neox": {"num_key_value_heads": None},  # two norms of one input, partial positions
    "gemma2": {"sliding_window": 64, "head_dim": 32},  # caps, norms in fp32 on both sides
    "olmo2": {},
    "cohere": {},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {  # latents, values narrower than keys, a shared expert
        "num_key_value_heads": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 2,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_peak_is_predicted(family: str, monkeypatch: pytest.MonkeyPatch):
    config = {"model_type": family, **small_models.WIDE, "num_hidden_layers": 3, **CASES[family]}
    if config["num_key_value_heads"] is None:
        del config["num_key_value_heads"]
    monkeypatch.setitem(small_models.CONFIGS, family, config)
    (row,) = rows_of(small_models.small(family, "fp32", Plan(micro_batch_size=8)))
    assert abs(row["error_percent"]) < 1.5, row
