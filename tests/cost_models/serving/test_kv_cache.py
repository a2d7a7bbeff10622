"""Caches against the cache objects of transformers, and against published figures."""

from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, StaticCache

from cost_models.model.families import FAMILIES, model_spec
from cost_models.model.presets import load_preset, preset_names
from cost_models.model.spec import Attention, ModelSpec
from cost_models.serving.kv_cache import (
    bytes_per_token,
    cached_tokens,
    has_cache,
    kv_heads_on_rank,
    layer_cache_bytes,
    token_bytes,
)
from cost_models.serving.number_formats import CACHE_FORMATS
from executor.verify.tiny_models import CONFIGS

GIB = 2.0**30
SEQUENCES, TOKENS = 2, 12
SHAPE = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 8}
QWEN3_5 = {
    **SHAPE,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "full_attention_interval": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MORE: dict[str, dict[str, Any]] = {  # what the executor does not train
    "bloom": {"vocab_size": 128, "hidden_size": 64, "n_head": 8},
    "falcon": {**SHAPE, "multi_query": True, "alibi": False},
    "glm4_moe": {**SHAPE, "num_key_value_heads": 4, "head_dim": 8},
    "nemotron": {**SHAPE, "num_key_value_heads": 4},
    "llama4_text": {**SHAPE, "num_key_value_heads": 4, "head_dim": 8, "attention_chunk_size": 8},
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5 | EXPERTS,
    "qwen3_next": QWEN3_5 | EXPERTS,
    "deepseek_v2": {**CONFIGS["deepseek_v3"], "n_group": 1, "topk_group": 1},
}
ENCODERS = ("bert", "roberta")
VISION = (
    "gemma3",
    "llama4",
    "qwen3_5",
    "qwen3_5_moe",
)  # their text models are families of their own
LAYERS = {"gpt2": "n_layer", "bloom": "n_layer", "t5": "num_layers"}
FAMILY_CASES = sorted(set(FAMILIES) - {*ENCODERS, *VISION})


def config_of(family: str) -> dict[str, Any]:
    values = CONFIGS[family] if family in CONFIGS else MORE[family]
    return {"model_type": family, **values, LAYERS.get(family, "num_hidden_layers"): 4}


def spec_of(family: str) -> ModelSpec:
    return model_spec(config_of(family), name=family, where="test")


@cache
def preset(name: str) -> ModelSpec:
    return model_spec(load_preset(name).config, name=name)


def predicted(spec: ModelSpec) -> list[float]:
    stored = CACHE_FORMATS["fp32"]
    layers = [spec.kinds[index] for index in spec.pattern]
    return [
        float(layer_cache_bytes(kind, SEQUENCES, TOKENS, 1, stored))
        for kind in layers
        if kind.attention.causal
    ]


def sizes(layers: Any) -> list[float]:
    return [4.0 * sum(tensor.numel() for tensor in _tensors(layer)) for layer in layers]


def _tensors(layer: Any) -> list[Any]:
    """Keys and values, or the states of linear attention."""
    if hasattr(layer, "recurrent_states"):
        return [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [layer.keys, layer.values]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", [f for f in FAMILY_CASES if f != "t5"])
def test_a_layer_keeps_what_the_cache_of_transformers_has_place_for(family: str) -> None:
    values = config_of(family)
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    module = AutoModelForCausalLM.from_config(config).eval()
    held = StaticCache(config=config, max_cache_len=TOKENS)
    tokens = torch.randint(0, 100, (SEQUENCES, TOKENS))
    # transformers 5.24 renames the argument and warns of the old name
    named = signature(module.forward).parameters
    argument = "cache" if "cache" in named else "past_key_values"
    with torch.no_grad():
        module(input_ids=tokens, use_cache=True, **{argument: held})
    if family.startswith("deepseek") and held.layers[0].keys.shape[1] > 1:
        pytest.skip("this version of transformers keeps keys and values of every head")
    assert predicted(spec_of(family)) == sizes(held.layers)


def test_t5_keeps_its_own_and_the_encoders_keys() -> None:
    values = config_of("t5")
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    module = AutoModelForSeq2SeqLM.from_config(config).eval()
    tokens = torch.randint(0, 100, (SEQUENCES, TOKENS))
    with torch.no_grad():
        answer = module(input_ids=tokens, decoder_input_ids=tokens, use_cache=True)
    held = answer.past_key_values
    own, cross = sizes(held.self_attention_cache.layers), sizes(held.cross_attention_cache.layers)
    assert predicted(spec_of("t5")) == [a + b for a, b in zip(own, cross, strict=True)]


def test_a_growing_cache_of_transformers_keeps_one_token_less_of_a_window() -> None:
    values = config_of("gemma2")
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        answer = module(torch.randint(0, 100, (SEQUENCES, TOKENS)), use_cache=True)
    window = values["sliding_window"]
    expected = [
        size * (window - 1) / window if kind.attention.window else size
        for size, kind in zip(
            predicted(spec_of("gemma2")),
            (k for i in range(2) for k in spec_of("gemma2").kinds),
            strict=True,
        )
    ]
    assert sizes(answer.past_key_values.layers) == pytest.approx(expected, rel=1e-12)


def test_linear_attention_keeps_a_state_whatever_the_length() -> None:
    spec = preset("qwen3-next-80b-a3b")
    linear, full = spec.kinds
    stored = CACHE_FORMATS["bf16"]
    short, long = (float(layer_cache_bytes(linear, 1, n, 1, stored)) for n in (1, 100_000))
    # a matrix of 128 x 128 in fp32 for each of 32 heads, and 4 inputs of 8192 channels
    assert short == long == 32 * 128 * 128 * 4 + 4 * 8192 * 2
    assert float(layer_cache_bytes(linear, 3, 1, 2, stored)) == 3 * short / 2
    # of a token only the 12 layers with full attention: 2 heads of 256, keys and values
    assert float(bytes_per_token(spec, stored)) == 12 * 2 * 2 * 256 * 2
    assert float(token_bytes(full.attention, 1, stored)) == 2 * 2 * 256 * 2


def test_every_family_is_a_case() -> None:
    assert set(FAMILY_CASES) <= CONFIGS.keys() | MORE.keys()
    assert not any(has_cache(preset(name)) for name in ("bert-base", "roberta-base"))


@pytest.mark.parametrize(
    ("name", "expected", "source"),
    [
        ("llama-2-7b", 512 * 1024, "2 x 32 x 32 x 128 x 2 B; vllm-project/vllm/pull/2031"),
        ("opt-13b", 800 * 1024, "800 KB a token: Kwon et al., arXiv:2309.06180, sec. 3"),
        ("llama-3-8b", 128 * 1024, "2 x 32 x 8 x 128 x 2 B"),
        ("deepseek-v3", 70_272, "70.272 KB: arXiv:2505.09343, table 1"),
        ("qwen2.5-72b", 327_680, "327.680 KB: arXiv:2505.09343, table 1"),
        ("llama-3.1-405b", 516_096, "516.096 KB: arXiv:2505.09343, table 1"),
    ],
)
def test_published_bytes_of_a_token(name: str, expected: float, source: str) -> None:
    assert float(bytes_per_token(preset(name), CACHE_FORMATS["bf16"])) == expected, source


@pytest.mark.parametrize(
    ("name", "blocks", "gib", "source"),
    [
        ("llama-2-7b", 7191, 56.18, "gateway-api-inference-extension/pull/550"),
        ("llama-3.1-8b", 1952, 3.81, "vllm-project/vllm/issues/10517, 20,000 tokens"),
        ("llama-3.1-8b", 1478, 2.89, "vllm-project/vllm/issues/10517, 29,000 tokens"),
        ("qwen3-0.6b", 36184, 61.84, "generative-computing/mellea/pull/416"),
    ],
)
def test_blocks_of_published_logs(name: str, blocks: int, gib: float, source: str) -> None:
    """vLLM says how many blocks of 16 tokens a cache of so many GiB has; block and size rounded."""
    one = 16.0 * float(bytes_per_token(preset(name), CACHE_FORMATS["bf16"]))
    assert blocks * one == pytest.approx(gib * GIB, abs=0.005 * GIB + one), source


def test_more_ranks_than_key_heads_hold_copies() -> None:
    assert kv_heads_on_rank(8, np.array([1, 2, 8, 16, 64])).tolist() == [8, 4, 1, 1, 1]
    llama = preset("llama-3-8b").kinds[0].attention
    each = token_bytes(llama, np.array([1, 4, 8, 32]), CACHE_FORMATS["bf16"])
    assert each.tolist() == [4096, 1024, 512, 512]  # type: ignore[union-attr]


def test_latents_are_whole_on_every_rank() -> None:
    latent = preset("deepseek-v3").kinds[0].attention
    each = token_bytes(latent, np.array([1, 8, 128]), CACHE_FORMATS["bf16"])
    assert each.tolist() == [1152, 1152, 1152]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("stored", "elements", "scales"),
    [("fp32", 4.0, 0), ("bf16", 2.0, 0), ("fp8", 1.0, 0), ("int8", 1.0, 4), ("int4", 0.5, 4)],
)
def test_scales_of_a_quantised_cache(stored: str, elements: float, scales: int) -> None:
    """Of every head's key and value in int8 and int4 a scale and a zero point of 16 bits."""
    attention = Attention(num_heads=8, num_kv_heads=2, head_dim=128, value_head_dim=64)
    expected = 2 * (elements * (128 + 64) + 2 * scales)
    assert float(token_bytes(attention, 1, CACHE_FORMATS[stored])) == expected


def test_gemma_3_keeps_little_beyond_the_window() -> None:
    """Five layers of six have a window of 512 (arXiv:2503.19786, sec. 2): 22 of 26 in the 1B."""
    model, stored = preset("gemma-3-1b"), CACHE_FORMATS["bf16"]
    beyond = float(bytes_per_token(model, stored, beyond_windows=True))
    assert beyond / float(bytes_per_token(model, stored)) == pytest.approx(4 / 26)


@given(
    sequences=st.integers(1, 10**5),
    context=st.integers(1, 10**7),
    window=st.integers(1, 10**6),
    step=st.integers(0, 10**5),
    block=st.sampled_from([1.0, 16.0, 64.0]),
)
def test_cached_tokens_grow_with_everything(
    sequences: int, context: int, window: int, step: int, block: float
) -> None:
    def tokens(**changes: Any) -> float:
        values = {"sequences": sequences, "context_len": context, "window": window}
        values |= {"step_tokens": step, "block": block, **changes}
        return float(cached_tokens(**values))  # type: ignore[arg-type]

    now, whole = tokens(), tokens(window=None)
    assert sequences * min(context, window) <= now <= whole
    assert whole <= sequences * (context + block - 1)
    assert tokens(context_len=context + 1) >= now
    assert tokens(sequences=sequences + 1) >= now
    assert tokens(window=window + 1) >= now
    assert tokens(step_tokens=step + 1) >= now
    assert tokens(sequences=2 * sequences, window=None) == 2 * whole


@pytest.mark.parametrize("name", preset_names())
def test_a_column_is_its_rows(name: str) -> None:
    kind = preset(name).kinds[-1]
    sequences, context = np.array([1, 7, 300]), np.array([5, 4097, 131_072])
    tensor, step = np.array([1, 2, 16]), np.array([0, 512, 8192])
    options: dict[str, Any] = {"stored": CACHE_FORMATS["int4"], "block": 16.0}
    column = layer_cache_bytes(kind, sequences, context, tensor, step_tokens=step, **options)
    rows = [
        layer_cache_bytes(kind, n, s, t, step_tokens=u, **options)
        for n, s, t, u in zip(sequences, context, tensor, step, strict=True)
    ]
    assert np.array_equal(column, rows)
