"""Passes of a serving replica: rooflines by hand, stages, experts, and one formula for columns."""

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute.flops import mean_keys
from cost_models.compute.rates import Rates
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import Attention, ModelSpec
from cost_models.partition.stages import even_split_contents
from cost_models.serving.forward_pass import PassTime, decode_attention_seconds
from cost_models.serving.latency import ServingTimes, serving_times
from cost_models.serving.matmul import experts_met, layer_products, product_seconds
from cost_models.serving.memory import Replica, ServingPoint, ServingWorkload
from cost_models.serving.number_formats import WEIGHT_FORMATS
from cost_models.serving.weights import tensor_bytes
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Figure
from hardware_profiles.errors import InputError
from hardware_profiles.software.serving_engine import serving_engine

FORMATS = ("fp16", "fp8", "int8", "int4")


@cache
def spec(name: str) -> ModelSpec:
    return model_spec(dict(load_preset(name).config), name=name)


def times(
    name: str,
    cluster: str = "8xH100-SXM-80GB",
    *,
    weights: str = "bf16",
    precision: str = "bf16",
    graphs: bool = True,
    prompt: Any = 512,
    **point: Any,
) -> ServingTimes:
    model = spec(name)
    given = ServingPoint(**{"sequences": 4, "context_len": 1024, "prefill_chunk": 8192, **point})
    workload = ServingWorkload(4, 1024, 8192, precision, weights, precision, cuda_graphs=graphs)  # type: ignore[arg-type]
    stages = int(np.max(given.pipeline_parallel))
    ranks = even_split_contents(model, stages, 1)
    engine = serving_engine()
    return serving_times(
        Replica(model, workload, engine, given), parse_cluster(cluster), ranks, prompt
    )


def test_a_token_reads_the_weights_once() -> None:
    """Llama-3-8B: 15.0 GB of matrices over 0.92 of 0.88 of 3.35 TB/s."""
    one = times("llama-3-8b", "1xH100-SXM-80GB", sequences=1)
    read = 2.0 * (8_030_261_248 - 128_256 * 4096)  # the table is looked up
    assert float(one.token_parts.matrices) == pytest.approx(
        read / (0.92 * 0.88 * 3.35e12), rel=0.01
    )
    cached = 32 * 8 * 256 * 2.0 * 768  # mean of 512 and 1024 tokens
    assert float(one.token_parts.attention) == pytest.approx(cached / (0.88 * 3.35e12), rel=1e-6)
    assert float(one.token_parts.kernels) == pytest.approx((32 * 11 + 8) * 4.5e-6)
    assert float(one.token) == pytest.approx(float(one.token_parts.total))
    assert float(one.batch) == pytest.approx(float(one.prefill) + 511 * float(one.token))


def test_eight_bit_weights_are_read_and_multiplied_faster() -> None:
    sixteen, eight = (times("llama-3-8b", weights=w, sequences=1) for w in ("bf16", "fp8"))
    assert float(eight.token_parts.matrices) < 0.6 * float(sixteen.token_parts.matrices)
    assert float(eight.prefill_parts.matrices) < 0.62 * float(sixteen.prefill_parts.matrices)
    # an A100 has no fp8: it reads half and multiplies in 16 bits
    sixteen, eight = (
        times("llama-3-8b", "8xA100-80GB", weights=w, sequences=1, prompt=1000)
        for w in ("bf16", "fp8")
    )
    assert float(eight.token_parts.matrices) < 0.6 * float(sixteen.token_parts.matrices)
    assert float(eight.prefill_parts.matrices) > 0.9 * float(sixteen.prefill_parts.matrices)


def test_without_graphs_small_steps_wait_for_the_host() -> None:
    """8.23 ms a token of Llama-3-8B, on which the number of operators was set, and 8.4 ms.

    Sources: sgl-project/sglang/pull/1401; cloudai.pt/tag/cuda-graphs (H100, torch's eager mode).
    """
    with_graphs, without = (times("llama-3-8b", sequences=1, graphs=g) for g in (True, False))
    assert float(with_graphs.token_parts.host) == 0.0
    assert float(without.token) == pytest.approx(8.23e-3, rel=0.05)
    assert float(without.token) == pytest.approx(8.4e-3, rel=0.05)
    assert float(without.token_parts.host) > 0.0
    large = times("llama-3-8b", sequences=1024, graphs=True, prompt=8, context_len=16)
    assert np.isfinite(float(large.token))  # larger than any graph: started eagerly


def test_tensor_parallelism_shares_out_and_adds_latencies() -> None:
    one, eight = (times("llama-3-70b", tensor_parallel=t, sequences=1) for t in (1, 8))
    ratio = float(one.token_parts.matrices) / float(eight.token_parts.matrices)
    assert 7.0 < ratio <= 8.01
    assert float(one.token_parts.communication) == 0.0
    # two all-reduces a layer and one of the embedding, of 16 KiB each: about 5 us
    reduced = float(eight.token_parts.communication) / (2 * 80 + 1)
    assert 5e-6 < reduced < 7e-6
    across = times("llama-3-70b", "2x8xH100-SXM-80GB", tensor_parallel=16, sequences=1)
    assert float(across.token_parts.communication) > 4 * float(eight.token_parts.communication)


def test_stages_follow_each_other() -> None:
    one, four = (times("llama-3-8b", pipeline_parallel=p, sequences=1) for p in (1, 4))
    # one sequence passes all stages: no faster, but for sends and a longer way
    assert float(four.token) >= float(one.token)
    assert float(four.token_parts.send) > 0.0
    many = times("llama-3-8b", pipeline_parallel=4, sequences=64)
    assert float(many.token) == pytest.approx(
        float(many.token_parts.total) + float(many.stage_wait)
    )
    # prompts in several passes: stages work on different ones
    long = {"sequences": 16, "context_len": 8192, "prompt": 4096}
    serial, piped = (times("llama-3-8b", pipeline_parallel=p, **long) for p in (1, 4))
    assert float(piped.prefill) < 0.5 * float(serial.prefill)


@pytest.mark.parametrize(
    ("stages", "groups"), [((3.0,), 1), ((1.0, 2.0), 1), ((1.0, 2.0, 1.5), 3), ((1.0, 5.0, 1.0), 2)]
)
def test_groups_on_their_way_through_stages(stages: tuple[float, ...], groups: int) -> None:
    """Event by event: a group begins its next token when its last one is there."""
    free, ready, loops = [0.0] * len(stages), [0.0] * groups, 400
    for _ in range(loops):
        for group in range(groups):
            for stage, seconds in enumerate(stages):
                begin = max(free[stage], ready[group])
                free[stage] = ready[group] = begin + seconds
    token = max(sum(stages), groups * max(stages))
    assert max(ready) / loops == pytest.approx(token, rel=0.02)


def test_prompts_follow_each_other_through_stages() -> None:
    stages, passes = (1.0, 2.5, 2.0), 7
    free = [0.0] * len(stages)
    for _ in range(passes):
        ready = 0.0
        for stage, seconds in enumerate(stages):
            ready = free[stage] = max(free[stage], ready) + seconds
    assert ready == sum(stages) + (passes - 1) * max(stages)


def test_experts_that_nobody_chose_are_not_read() -> None:
    assert float(experts_met(128.0, 1.0, 8.0, 128.0)) == pytest.approx(8.0)
    few, many = (times("mixtral-8x7b", sequences=n, context_len=1024) for n in (1, 64))
    model = spec("mixtral-8x7b")
    experts = sum(w.numel for w in model.kinds[0].weights if w.is_routed_expert)
    rest = sum(w.numel for w in model.kinds[0].weights if not w.is_routed_expert)
    share = float(few.token_parts.matrices) / float(many.token_parts.matrices)
    assert share == pytest.approx((rest + experts / 4) / (rest + experts), rel=0.1)


def test_whole_experts_of_several_replicas_send_tokens() -> None:
    apart = times(
        "mixtral-8x7b", data_parallel=4, tensor_parallel=2, expert_parallel=8, sequences=8
    )
    cut = times("mixtral-8x7b", data_parallel=4, tensor_parallel=2, sequences=8)
    assert float(apart.token_parts.communication) > float(cut.token_parts.communication)


def test_an_encoder_is_one_pass_and_behind_one_the_prompt_is_read_once() -> None:
    bert = times("bert-base", sequences=4, context_len=512, prompt=512)
    assert float(bert.batch) == float(bert.prefill)
    t5 = times("t5-large", sequences=4, context_len=512, prompt=512)
    assert float(t5.answer_len) == 512.0
    assert float(t5.token_parts.matrices) < 0.5 * float(t5.prefill_parts.matrices)


def test_kernels_are_counted_by_what_a_layer_has() -> None:
    deepseek = times("deepseek-v3", "8xH200-SXM", weights="fp8", tensor_parallel=8, sequences=1)
    kernels = 3 * (11 + 6) + 58 * (11 + 6 + 5 + 4) + 8
    assert float(deepseek.token_parts.kernels) == pytest.approx(kernels * 4.5e-6)
    assert 1.0 / float(deepseek.token) == pytest.approx(
        112, rel=0.1
    )  # SGLang, docs/how-to/serving.md


def test_ordinary_attention_multiplies_what_it_reads_on_its_share_of_the_heads() -> None:
    """Bound by work where a byte of the cache is read at no cost."""
    rate, heads = Rates(1e12, 1e30, 0.0, host_is_device=False), Attention(8, 8, 64, 32)
    for tensor in (1, 2, 8):
        seconds = decode_attention_seconds(heads, 4.0, 100.0, tensor, 1.0, rate)
        assert seconds == pytest.approx(2 * 4 * 100 * (8 / tensor) * (64 + 32) / 1e12, rel=1e-12)


def test_latent_attention_multiplies_more_than_it_reads() -> None:
    latent = Attention(128, 128, 192, 128, kv_lora_rank=512, rope_head_dim=64)
    rate = Rates(800e12, 3e12, 0.0, False, units=132)
    seconds = float(decode_attention_seconds(latent, 64.0, 4096.0, 1, 1152.0, rate))
    flop = 2.0 * 64 * 4096 * 128 * (2 * 512 + 64)
    assert seconds == pytest.approx(max(flop / 800e12, 64 * 4096 * 1152 / 3e12))


EIGHTHS = st.integers(0, 8 * 10**6).map(lambda eighths: eighths / 8.0)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 300))
def test_mean_keys_in_chunks_is_the_mean(first: int, more: int, chunk: int) -> None:
    samples = (first + (np.arange(64 * more) + 0.5) / 64) % chunk  # the midpoint rule is exact
    mean = float(mean_keys(first, first + more, chunk, chunked=True))
    assert mean == pytest.approx(float(samples.mean()), rel=1e-9)
    assert mean <= float(mean_keys(first, first + more, chunk)) * (1 + 1e-12)


@given(EIGHTHS, EIGHTHS, st.integers(1, 10**6))
def test_mean_keys_is_the_mean(first: float, more: float, window: int) -> None:
    samples = np.minimum(first + more * (np.arange(2000) + 0.5) / 2000, window)
    mean = float(mean_keys(first, first + more, window))
    assert mean == pytest.approx(float(samples.mean()), rel=1e-3, abs=1e-3)
    assert mean <= float(mean_keys(first, first + more, None)) * (1 + 1e-12)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "deepseek-v3", "falcon-40b"])
def test_products_are_the_matrices(name: str, stored: str) -> None:
    """Side by side or not: the same elements, the same bytes."""
    form = WEIGHT_FORMATS[stored]
    for kind in spec(name).kinds:
        products = layer_products(kind, 1, 1, form, 2.0)
        matrices = [w for w in kind.weights if w.is_matrix]
        held = sum(float(tensor_bytes(w, kind.attention, 1, 1, form, 2.0)) for w in matrices)
        assert sum(float(p.weight_bytes) for p in products) == pytest.approx(held)
        numel = sum(
            float(p.inputs * p.outputs) * (kind.feed_forward.num_experts if p.is_expert else 1)
            for p in products
        )
        assert numel == pytest.approx(sum(w.numel for w in matrices))


def test_few_rows_are_bound_by_bytes_and_many_by_work() -> None:
    rate = Rates(250e12, 1.8e12, 0.0, False, units=108)
    few = float(product_seconds(1.0, 4096.0, 4096.0, 2.0 * 4096**2, 2.0, rate))
    assert few == pytest.approx((2.0 * 4096**2 + 2 * 8192) / 1.8e12)
    many = float(product_seconds(8192.0, 4096.0, 4096.0, 2.0 * 4096**2, 2.0, rate))
    assert many > 2.0 * 8192 * 4096**2 / 250e12


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-9b"])
def test_a_column_is_its_rows(name: str) -> None:
    columns = {
        "sequences": np.array([1, 8, 64, 300]),
        "context_len": np.array([1024, 4096, 8192, 640]),
        "prefill_chunk": np.array([8192, 512, 2048, 4096]),
        "tensor_parallel": np.array([1, 2, 8, 4]),
        "data_parallel": np.array([8, 4, 1, 2]),
    }
    prompts = np.array([1000, 1, 4096, 512])
    table = times(name, prompt=prompts, **columns)
    for row in range(4):
        values = {key: int(value[row]) for key, value in columns.items()}
        alone = times(name, prompt=int(prompts[row]), **values)
        for field in ("prefill", "alone", "token", "batch"):
            assert float(getattr(table, field)[row]) == pytest.approx(
                float(getattr(alone, field)), rel=1e-15
            )


def test_everything_is_finite_and_counts() -> None:
    huge = times("llama-3.1-405b", sequences=10**6, context_len=10**7, prompt=10**6)
    for part in (huge.prefill_parts, huge.token_parts):
        for field in fields(PassTime):
            assert np.isfinite(float(getattr(part, field.name)))
            assert float(getattr(part, field.name)) >= 0.0
    assert float(huge.token) > 1.0


def test_other_machines() -> None:
    tpu = times("llama-3-8b", "8xTPU-v5e", sequences=1, tensor_parallel=8)
    amd = times("llama-3-8b", "8xMI300X", sequences=1, tensor_parallel=8)
    assert float(tpu.token) > float(amd.token) > 0.0
    with pytest.raises(InputError, match="no rate is known"):
        times("llama-3-8b", "1xV100-SXM2-32GB", sequences=1)


def test_a_cpu_waits_for_its_operators_and_talks_through_gloo() -> None:
    def measured(value: float) -> Figure:
        return Figure(value, "measured", "this machine")

    gpus = parse_cluster("2xA100-80GB")
    rates = {"fp32": measured(5e10)}
    cpu = replace(
        gpus.accelerator,
        device="cpu",
        peak_flops=rates,
        achievable_flops=rates,
        memory_bandwidth=measured(1e10),
        kernel_launch=measured(5e-6),
        host_bandwidth=None,
    )
    model, workload = spec("gpt2"), ServingWorkload(1, 256, 256, "fp32", "fp32", "fp32")
    ranks, engine = even_split_contents(model, 1, 1), serving_engine()
    point = ServingPoint(1, 256, 256, 2)
    found = serving_times(
        Replica(model, workload, engine, point), replace(gpus, accelerator=cpu), ranks, 128
    )
    parts = found.token_parts
    assert float(parts.kernels) == 0.0
    assert float(parts.host) == pytest.approx((12 * 32 + 30) * 5e-6)
    assert float(parts.matrices) > 0.9 * 2 * 124e6 / 2 / 5e10
    assert float(parts.communication) > 0.0


def test_engines_without_small_kernels_take_nccl() -> None:
    model, point = spec("llama-3-8b"), ServingPoint(1, 512, 8192, 8)
    workload = ServingWorkload(1, 512, 8192)
    ranks, cluster = even_split_contents(model, 1, 1), parse_cluster("8xH100-SXM-80GB")
    own = serving_engine()
    nccl = own.changed({"communication.direct_all_reduce_bytes": 0.0})
    one, other = (
        serving_times(Replica(model, workload, engine, point), cluster, ranks, 256)
        for engine in (own, nccl)
    )
    assert float(one.token) < float(other.token)
