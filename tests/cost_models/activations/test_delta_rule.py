"""Saved bytes of Qwen3-Next's and Qwen3.5's attentions against what autograd saves of modules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cost_models.activations.delta_rule import (
    around_rule_bytes,
    gated_output_bytes,
    rule_backward_bytes,
    rule_bytes,
)
from cost_models.activations.operators import attention_bytes, score_bytes
from cost_models.activations.saved import layer_regions
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import Attention, DeltaRule, ModelSpec
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.allocations import LiveBytes

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 28,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 44,
    "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": None,
}
FAMILIES = ("qwen3_next", "qwen3_5_text")
SPEC = model_spec({"model_type": "qwen3_next", **TINY}, name="tiny")
BYTES = {torch.bfloat16: 2.0, torch.float32: 4.0}


def saved_bytes(
    layer: int, sequences: int, seq_len: int, dtype: torch.dtype, family: str = "qwen3_next"
) -> float:
    """Bytes a token of the storages that the attention of a layer saves, without parameters."""
    config = CONFIG_MAPPING[family](**TINY)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    hidden = torch.randn(sequences, seq_len, TINY["hidden_size"], dtype=dtype, requires_grad=True)
    tables = model.model.rotary_emb(hidden, torch.arange(seq_len)[None])
    apart = [*model.parameters(), *tables]
    known = {tensor.untyped_storage().data_ptr() for tensor in apart}
    found: dict[int, torch.Tensor] = {}  # keeps the tensors: an address is never given twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            found.setdefault(address, tensor)
        return tensor

    block = model.model.layers[layer]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if layer == 0:
            block.linear_attn(hidden)
        else:
            block.self_attn(hidden, position_embeddings=tables, attention_mask=None)
    return sum(t.untyped_storage().nbytes() for t in found.values()) / (sequences * seq_len)


def attention_of(layer: int) -> Attention:
    return SPEC.kinds[SPEC.pattern[layer]].attention


def rule_of(attention: Attention) -> DeltaRule:
    assert attention.delta_rule is not None
    return attention.delta_rule


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("shape", [(1, 128), (2, 64), (2, 192), (2, 100), (3, 16)])
def test_linear_attention_saves_what_is_traced(
    dtype: torch.dtype, shape: tuple[int, int], family: str
) -> None:
    attention, compute = attention_of(0), BYTES[dtype]
    ours = around_rule_bytes(attention, compute) + compute * SPEC.hidden_size  # its input
    ours += float(rule_bytes(attention, rule_of(attention), shape[1], "eager", compute))
    # of a single chunk autograd saves views of some tensors, and no state
    bound = 0.01 if shape[1] > rule_of(attention).chunk else 0.035
    assert ours == pytest.approx(saved_bytes(0, *shape, dtype, family), rel=bound)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(1, 128), (3, 32)])
def test_a_gate_adds_its_sigmoid_and_the_gated_output(shape: tuple[int, int], family: str) -> None:
    """Beside them, transformers copies the output of attention once for all heads."""
    attention = attention_of(1)
    norms = 2.0 * 4.0 * (4 + 2) * 24 + 4.0 * (4 + 2)  # of queries and keys: two fp32 copies each
    flash = float(score_bytes(attention, shape[1], "flash", False, software_profile("shardplan")))
    ours = attention_bytes(attention, 2.0) + flash + norms + 2.0 * SPEC.hidden_size
    copied = 2.0 * attention.num_heads * attention.value_head_dim
    traced = saved_bytes(1, *shape, torch.bfloat16, family)
    assert ours + copied == pytest.approx(traced, rel=0.02)
    plain = attention_bytes(replace(attention, gated=False), 2.0)
    assert attention_bytes(attention, 2.0) - plain == 2 * copied


def real() -> ModelSpec:
    return model_spec(load_preset("qwen3-next-80b-a3b").config, name="qwen3-next")


def test_fused_kernels_save_far_less_than_the_written_out_rule() -> None:
    """q, k, v of 8192 features, 64 of each chunk's inverse, decays and norms (fla)."""
    attention = real().kinds[0].attention
    rule = rule_of(attention)
    fused = float(rule_bytes(attention, rule, 4096, "flash", 2.0))
    assert fused == 2 * 8192 + 4 * 32 + 8 * 16 + 2 * 64 * 32
    assert float(rule_bytes(attention, rule, 4096, "eager", 2.0)) > 10 * fused
    assert float(rule_bytes(attention, rule, 4096, "flash", 2.0)) == float(
        rule_bytes(attention, rule, 131_072, "flash", 2.0)
    )


def test_bytes_of_a_layer_do_not_grow_with_the_length() -> None:
    model, software = real(), software_profile("shardplan")
    for kernel in ("flash", "eager"):
        linear = [
            float(
                layer_regions(
                    model,
                    Workload(s, 1, attention_kernel=kernel),  # type: ignore[arg-type]
                    software,
                    model.kinds[0],
                ).split
            )
            for s in (4096, 65_536)
        ]
        assert linear[0] == linear[1]


WIDE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "hidden_size": 256,
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, WIDE])
@pytest.mark.parametrize("shape", [(1, 640), (2, 512)])
def test_peak_of_the_backward_pass_is_the_traced_one(
    sizes: dict[str, int], shape: tuple[int, int]
) -> None:
    config = TINY | sizes
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_next"](**config))
    block = module.to(torch.bfloat16).model.layers[0].linear_attn
    hidden = torch.randn(*shape, config["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes((*block.parameters(), hidden)) as bytes_now:
        output = block(hidden)
        gradient = torch.ones_like(output)
        bytes_now.peak = 0
        output.backward(gradient)
    attention = model_spec({"model_type": "qwen3_next", **config}, name="x").kinds[0].attention
    rule = rule_of(attention)
    ours = around_rule_bytes(attention, 2.0) - gated_output_bytes(attention, 2.0)
    ours += float(rule_bytes(attention, rule, shape[1], "eager", 2.0))
    ours += float(rule_backward_bytes(attention, rule, shape[1], "eager", 2.0))
    ours += 2 * 2.0 * config["hidden_size"]  # the output and its gradient
    assert ours == pytest.approx(bytes_now.peak / (shape[0] * shape[1]), rel=0.02)
