"""Predicted against traced memory of families whose layers keep other tensors than llama's."""

from __future__ import annotations

import pytest

from benchmarks import traced_memory
from cost_models.plan import Plan

CASES = {
    "phi3": {"pad_token_id": 0, "sliding_window": 64},  # fused matrices, a mask
    "gpt_neox": {"num_key_value_heads": None},  # two norms of one input, partial positions
    "gemma2": {"sliding_window": 64, "head_dim": 32},  # caps, norms in fp32 on both sides
    "olmo2": {},
    "cohere": {},
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_peak_is_predicted(family: str, monkeypatch: pytest.MonkeyPatch):
    config = {"model_type": family, **traced_memory.WIDE, "num_hidden_layers": 3, **CASES[family]}
    if config["num_key_value_heads"] is None:
        del config["num_key_value_heads"]
    monkeypatch.setitem(traced_memory.CONFIGS, family, config)
    (row,) = traced_memory.compare(traced_memory.case(family, "fp32", Plan(micro_batch_size=8)))
    assert abs(row["error_percent"]) < 1.5, row
