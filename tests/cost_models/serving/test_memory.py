"""Serving memory: what grows with what, who holds what, and one formula for rows and columns."""

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset, preset_names
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.stages import distinct_rank_contents, even_split_contents
from cost_models.serving.memory import (
    Replica,
    ServingParts,
    ServingPoint,
    ServingWorkload,
    price_serving,
    rank_serving_memory,
)
from cost_models.serving.number_formats import CACHE_FORMATS, WEIGHT_FORMATS, stored_format
from cost_models.serving.rules import (
    SERVING_CODES,
    ServingQuestion,
    serving_codes,
    why_not_served,
)
from cost_models.serving.weights import (
    key_value_part,
    position_table_bytes,
    rank_share,
    rank_weight_bytes,
    tensor_bytes,
)
from hardware_profiles.software.serving_engine import serving_engine

DECODERS = ("llama-3-8b", "gemma-2-9b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x7b", "gpt2")


@cache
def spec(name: str) -> ModelSpec:
    return model_spec(load_preset(name).config, name=name)


def priced(
    name: str, *, weights: str = "bf16", cached: str = "bf16", kernel: str = "flash", **point: Any
) -> ServingParts:
    model = spec(name)
    values = {"sequences": 8, "context_len": 1024, "prefill_chunk": 512, **point}
    stages = int(values.get("pipeline_parallel", 1))
    workload = ServingWorkload(8, 1024, 512, "bf16", weights, cached, kernel)  # type: ignore[arg-type]
    ranks = even_split_contents(model, stages, 1)
    return price_serving(
        Replica(model, workload, serving_engine(), ServingPoint(**values)), ranks, on_gpu=True
    )[0]


@given(
    name=st.sampled_from(DECODERS),
    sequences=st.integers(1, 4096),
    context=st.integers(1, 10**6),
    chunk=st.integers(1, 65_536),
    tensor=st.sampled_from([1, 2, 4, 8]),
)
def test_memory_grows_with_the_load_and_shrinks_with_ranks(
    name: str, sequences: int, context: int, chunk: int, tensor: int
) -> None:
    def peak(**changes: int) -> float:
        values = {"sequences": sequences, "context_len": context, "prefill_chunk": chunk}
        return float(priced(name, **{**values, "tensor_parallel": tensor, **changes}).peak)

    now = peak()
    assert np.isfinite(now)
    assert now > 0
    assert peak(sequences=sequences + 1) >= now
    assert peak(context_len=context + 1) >= now
    assert peak(prefill_chunk=chunk + 1) >= now
    if tensor > 1:  # one rank alone needs no buffers of communication
        assert peak(tensor_parallel=2 * tensor) <= now


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "t5-small", "gpt2"])
def test_the_cache_is_linear_in_the_sequences(name: str) -> None:
    one, many = (priced(name, sequences=n, context_len=500) for n in (1, 37))
    assert float(many.kv_cache) == 37 * float(one.kv_cache)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", preset_names())
def test_a_column_is_its_rows(name: str) -> None:
    columns: dict[str, Any] = {
        "sequences": np.array([1, 3, 64, 500]),
        "context_len": np.array([17, 512, 4096, 100_000]),
        "prefill_chunk": np.array([1, 8192, 512, 2048]),
        "tensor_parallel": np.array([1, 2, 4, 8]),
        "data_parallel": np.array([8, 4, 2, 1]),
        "expert_parallel": np.array([1, 2, 8, 1]),
    }
    table = priced(name, weights="int4", cached="int8", **columns)
    for row in range(4):
        one = priced(
            name, weights="int4", cached="int8", **{k: int(v[row]) for k, v in columns.items()}
        )
        for field in fields(ServingParts):
            assert getattr(table, field.name)[row] == getattr(one, field.name), field.name


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", preset_names())
def test_stages_hold_every_weight_and_every_cache_once(name: str) -> None:
    model = spec(name)
    if any(kind.cross_attention for kind in model.kinds) or model.num_layers < 4:
        pytest.skip("one stage only")
    workload = ServingWorkload(4, 256, 256)
    engine = serving_engine().changed({"memory.vocab_multiple": 1.0})

    def held(stages: int) -> tuple[float, float]:
        point = ServingPoint(4, 256, 256, pipeline_parallel=stages)
        cost = [
            (
                rank_serving_memory(Replica(model, workload, engine, point), rank, on_gpu=True)[0],
                rank,
            )
            for rank in even_split_contents(model, stages, 1)
        ]
        weights = sum(float(parts.weights) * rank.multiplicity for parts, rank in cost)
        return weights, sum(float(parts.kv_cache) * rank.multiplicity for parts, rank in cost)

    one, four = held(1), held(4)
    assert four[1] == one[1]
    copied = 2.0 * model.head_multiply if model.tie_embeddings else 0.0
    tables = [k.attention for k in model.kinds if k.attention.rotary]
    apart = four[0] - one[0] - copied
    assert 0 <= apart <= 3 * 2.0 * (model.max_seq_len or 0) * sum(a.head_dim for a in tables)


@pytest.mark.parametrize("name", preset_names())
def test_weights_in_16_bits_are_two_bytes_a_parameter(name: str) -> None:
    model = spec(name)
    (whole,) = even_split_contents(model, 1, 1)
    engine = serving_engine().changed({"memory.vocab_multiple": 1.0})
    total = float(rank_weight_bytes(model, whole, engine, 1, 1, WEIGHT_FORMATS["bf16"], 2.0))
    total -= position_table_bytes(model, whole, 2.0)
    assert total == 2.0 * model.num_parameters


@pytest.mark.parametrize(
    ("name", "tensor", "of_keys"),
    [
        ("llama-3-8b", "self_attn.k_proj.weight", 1.0),
        ("llama-3-8b", "self_attn.q_proj.weight", 0.0),
        ("phi-3-mini", "self_attn.qkv_proj.weight", 2 / 3),
        ("gpt2", "attn.c_attn.weight", 2 / 3),
        ("falcon-7b", "self_attention.query_key_value.weight", 2 / 73),
        ("gpt-neox-20b", "attention.query_key_value.weight", 2 / 3),
        ("opt-125m", "self_attn.v_proj.weight", 1.0),
        ("t5-small", "layer.0.SelfAttention.k.weight", 1.0),
        ("deepseek-v3", "self_attn.kv_b_proj.weight", 0.0),
    ],
)
def test_what_of_a_tensor_belongs_to_key_heads(name: str, tensor: str, of_keys: float) -> None:
    kind = spec(name).kinds[-1]
    weight = next(w for w in kind.weights if w.name == tensor)
    assert key_value_part(weight, kind.attention) == pytest.approx(of_keys)


def test_every_decoder_has_tensors_of_keys() -> None:
    """No family may hide its key heads behind a name that is not known."""
    for name in preset_names():
        for kind in spec(name).kinds:
            if not kind.attention.kv_lora_rank and kind.attention.delta_rule is None:
                assert any(key_value_part(w, kind.attention) for w in kind.weights), name


def test_ranks_beyond_the_key_heads_hold_copies_of_their_weights() -> None:
    kind = spec("llama-3-8b").kinds[0]
    keys = next(w for w in kind.weights if w.name == "self_attn.k_proj.weight")
    queries = next(w for w in kind.weights if w.name == "self_attn.q_proj.weight")
    ranks = np.array([1, 8, 32])
    assert rank_share(keys, kind.attention, ranks).tolist() == [1, 1 / 8, 1 / 8]  # type: ignore[union-attr]
    assert rank_share(queries, kind.attention, ranks).tolist() == [1, 1 / 8, 1 / 32]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("bf16", 2.0 * 4096 * 1024),
        ("fp32", 4.0 * 4096 * 1024),
        ("int8", 4096 * 1024 + 4.0 * 1024),
        ("int4", (0.5 + 2.5 / 128) * 4096 * 1024),
        ("mxfp4", 2.0 * 4096 * 1024),  # not of an expert
    ],
)
def test_bytes_of_a_matrix(stored: str, expected: float) -> None:
    weight = Weight("mlp.up_proj.weight", (1024, 4096), "linear", "column", "mlp")
    assert float(tensor_bytes(weight, None, 1, 1, WEIGHT_FORMATS[stored], 2.0)) == expected


def test_scales_of_outputs_are_whole_where_inputs_are_cut() -> None:
    weight = Weight("mlp.down_proj.weight", (1024, 4096), "linear", "row", "mlp")
    halves = tensor_bytes(weight, None, 2, 1, WEIGHT_FORMATS["fp8"], 2.0)
    assert float(halves) == 4096 * 512 + 4.0 * 1024


@pytest.mark.parametrize("part", ["embedding", "head", "router", "norm"])
def test_what_stays_as_it_is(part: Any) -> None:
    weight = Weight("x.weight", (64, 32), "linear", "replicate", part)
    assert float(tensor_bytes(weight, None, 1, 1, WEIGHT_FORMATS["int4"], 2.0)) == 2.0 * 64 * 32


def test_latent_attention_keeps_an_unpacked_copy_beside_quantised_weights() -> None:
    """61 layers x 512 x 128 x (128 + 128) x 2 B, shared by 8 ranks."""
    model = spec("deepseek-v3")
    without = replace(
        model,
        kinds=tuple(
            replace(
                kind,
                weights=tuple(
                    replace(w, name="other") if "kv_b_proj" in w.name else w for w in kind.weights
                ),
            )
            for kind in model.kinds
        ),
    )
    copies = []
    for each in (model, without):
        ranks = even_split_contents(each, 1, 1)
        workload = ServingWorkload(1, 64, 64, "bf16", "fp8")
        point = ServingPoint(1, 64, 64, tensor_parallel=8)
        parts, _, _ = price_serving(
            Replica(each, workload, serving_engine(), point), ranks, on_gpu=True
        )
        copies.append(float(parts.weights))
    assert copies[0] - copies[1] == pytest.approx(61 * 512 * 128 * 256 * 2 / 8)


def test_experts_shared_out_over_replicas_lie_once_in_all() -> None:
    apart = priced("mixtral-8x7b", data_parallel=8, expert_parallel=8)
    whole = priced("mixtral-8x7b", data_parallel=8)
    routed = 32 * 8 * 3 * 4096 * 14336 * 2.0
    assert float(whole.weights) - float(apart.weights) == pytest.approx(routed * 7 / 8)


def test_windows_bound_the_cache() -> None:
    short, long = (priced("mistral-7b", context_len=n, prefill_chunk=512) for n in (4096, 32_768))
    assert float(long.kv_cache) <= 1.04 * float(short.kv_cache)
    assert float(priced("mistral-7b-v0.3", context_len=32_768).kv_cache) > 7 * float(long.kv_cache)


def test_encoders_have_no_cache_and_see_whole_sequences() -> None:
    parts = priced("bert-base", sequences=4, context_len=512, prefill_chunk=1)
    assert float(parts.kv_cache) == 0.0
    one_word = priced("bert-base", sequences=4, context_len=1, prefill_chunk=1)
    assert float(parts.activations + parts.logits) > 100 * float(
        one_word.activations + one_word.logits
    )


def test_eager_scores_and_the_biases_of_t5_are_seen() -> None:
    eager, flash = (priced("llama-3-8b", kernel=k, context_len=8192) for k in ("eager", "flash"))
    # scores of 512 tokens with all before them, and queries and keys beside them: now the peak
    assert float(eager.activations - flash.activations) > 5.5 * 32 * 512 * 8192
    short, long = (priced("t5-large", sequences=1, context_len=n) for n in (512, 8192))
    assert float(long.activations - short.activations) > 2.0 * 16 * 7680 * 8192


def test_a_fuller_stage_is_named() -> None:
    model = spec("llama-3-8b")
    ranks = distinct_rank_contents(model, ((0, 4), (4, 32)), 2)
    point = ServingPoint(8, 4096, 512, pipeline_parallel=2)
    _, stage, _ = price_serving(
        Replica(model, ServingWorkload(8, 4096, 512), serving_engine(), point), ranks, on_gpu=True
    )
    assert int(stage) == 1


def test_nothing_but_tensors_on_a_cpu() -> None:
    model = spec("gpt2")
    parts, _, _ = price_serving(
        Replica(model, ServingWorkload(1, 8, 8), serving_engine(), ServingPoint(1, 8, 8)),
        even_split_contents(model, 1, 1),
        on_gpu=False,
    )
    assert float(parts.runtime) == 0.0


def test_extreme_sizes_are_finite() -> None:
    parts = priced("llama-3.1-405b", sequences=10**7, context_len=10**8, prefill_chunk=10**8)
    assert np.isfinite(float(parts.peak))
    assert float(parts.peak) > 1e18


@pytest.mark.parametrize(
    ("code", "name", "point", "said"),
    [
        ("world_size", "llama-3-8b", {"data_parallel": 4}, "= 4, but there are 8"),
        ("num_heads", "gpt2", {"tensor_parallel": 8}, "num_heads = 12; legal values: 1, 2, 3"),
        ("num_kv_heads", "phi-3-mini", {}, ""),
        ("without_experts", "llama-3-8b", {"data_parallel": 8, "expert_parallel": 8}, "no experts"),
        ("expert_parallel", "mixtral-8x7b", {"data_parallel": 8, "expert_parallel": 3}, "3"),
        ("expert_ranks", "qwen3-30b-a3b", {"tensor_parallel": 8, "expert_parallel": 16}, "16"),
        ("num_layers", "gpt2", {"pipeline_parallel": 8, "layers": 6}, "6 layers"),
        ("encoder_decoder_pipeline", "t5-small", {"pipeline_parallel": 8}, "must be 1"),
        ("positions", "gpt2", {"data_parallel": 8, "context_len": 2048}, "must be 1 to 1024"),
        ("stage_layers", "gpt2", {"pipeline_parallel": 8, "stages": 2}, "given for 2 stages"),
    ],
)
def test_what_cannot_be_is_said(code: str, name: str, point: dict[str, Any], said: str) -> None:
    values = {"sequences": 1, "context_len": 64, "prefill_chunk": 64, **point}
    stages, layers = values.pop("stages", None), values.pop("layers", None)
    model = spec(name)
    if layers is not None:
        model = replace(model, pattern=model.pattern[:layers])
    question = ServingQuestion(model, ServingWorkload(1, 64, 64), 8, stages)
    if not said:  # legal: ranks divide the key heads, or are a multiple of them
        values["tensor_parallel"] = 8
        assert why_not_served(question, ServingPoint(**values)) is None
        return
    words = why_not_served(question, ServingPoint(**values))
    assert words is not None
    assert said in words
    assert SERVING_CODES[int(serving_codes(question, ServingPoint(**values)))] == code


def test_rules_are_columns_too() -> None:
    question = ServingQuestion(spec("llama-3-8b"), ServingWorkload(1, 64, 64), 64)
    tensor = np.array([1, 3, 8, 16, 32, 64])
    point = ServingPoint(1, 64, 64, tensor_parallel=tensor, data_parallel=64 // tensor)
    said = [SERVING_CODES[code] for code in serving_codes(question, point)]
    assert said == ["legal", "world_size", "legal", "legal", "legal", "num_heads"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq"}, "int4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes"}, None),
    ],
)
def test_formats_that_a_config_says(said: object, expected: str | None) -> None:
    assert stored_format({"quantization_config": said}) == expected


def test_formats_say_their_names() -> None:
    assert all(name == entry.name for name, entry in WEIGHT_FORMATS.items())
    assert all(name == entry.name for name, entry in CACHE_FORMATS.items())
