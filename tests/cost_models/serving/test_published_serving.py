"""Weights and activations against published start-up logs of vLLM, and published checkpoints.

The intervals of ``cost_models.uncertainty`` come from these errors.
"""

from functools import cache
from typing import Any

import pytest

from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import even_split_contents
from cost_models.serving.memory import (
    Replica,
    ServingParts,
    ServingPoint,
    ServingWorkload,
    price_serving,
)
from cost_models.serving.number_formats import WEIGHT_FORMATS
from cost_models.serving.weights import rank_weight_bytes, tensor_bytes
from cost_models.uncertainty import SERVING_EXACT, SERVING_REST
from hardware_profiles.software.serving_engine import serving_engine

GIB = 2.0**30


@cache
def spec(name: str, positions: int | None = None) -> ModelSpec:
    config = dict(load_preset(name).config)
    if positions is not None:
        config["max_position_embeddings"] = positions
    return model_spec(config, name=name)


def weight_gib(model: ModelSpec, tensor_parallel: int, stored: str) -> float:
    (whole,) = even_split_contents(model, 1, 1)
    formats = WEIGHT_FORMATS[stored]
    total = rank_weight_bytes(model, whole, serving_engine(), tensor_parallel, 1, formats, 2.0)
    return float(total) / GIB


def parts(name: str, sequences: int, tokens: int, **options: Any) -> ServingParts:
    model = spec(name)
    point = ServingPoint(sequences, tokens, tokens, **options)
    workload = ServingWorkload(sequences, tokens, tokens)
    ranks = even_split_contents(model, 1, 1)
    priced, _, _ = price_serving(
        Replica(model, workload, serving_engine(), point), ranks, on_gpu=True
    )
    return priced


WEIGHTS = [
    ("llama-3-8b", None, 1, "bf16", 14.96, "vllm-project/vllm/pull/10511"),
    ("llama-3-8b", None, 2, "bf16", 7.48, "vllm-project/vllm/pull/10511"),
    ("llama-3.1-8b", None, 1, "bf16", 14.9888, "vllm-project/vllm/issues/10517"),
    ("llama-3.1-8b", None, 8, "bf16", 1.9028, "mlcommons/inference/issues/2267"),
    ("llama-2-7b", None, 1, "fp16", 12.55, "gateway-api-inference-extension/pull/550"),
    ("llama-3.1-70b", None, 1, "int8", 67.7229, "vllm-project/vllm/pull/12569"),
    ("qwen2.5-7b", 32768, 1, "int4", 5.2032, "vllm-project/vllm/issues/13882"),
    ("qwen2.5-32b", None, 2, "bf16", 30.7293, "vllm-project/vllm/issues/12865"),
]


@pytest.mark.parametrize(("name", "positions", "ranks", "stored", "gib", "source"), WEIGHTS)
def test_weights_of_published_logs(
    name: str, positions: int | None, ranks: int, stored: str, gib: float, source: str
) -> None:
    predicted = weight_gib(spec(name, positions), ranks, stored)
    assert predicted == pytest.approx(gib, rel=0.007), source
    assert abs(gib / predicted - 1) < SERVING_EXACT.above


def test_most_logs_are_met_within_a_thousandth() -> None:
    errors = [weight_gib(spec(n, p), t, w) / gib - 1 for n, p, t, w, gib, _ in WEIGHTS]
    assert sorted(map(abs, errors))[5] < 0.001


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)])
def test_checkpoints_of_gpt_oss(name: str, gib: float) -> None:
    """arXiv:2508.10925, table 1: checkpoint size in GiB, experts in MXFP4."""
    model = spec(name)
    kinds = [model.kinds[index] for index in model.pattern]
    tensors = [(w, k.attention) for k in kinds for w in k.weights]
    tensors += [(w, None) for w in (*model.embedding, *model.head)]
    stored = WEIGHT_FORMATS["mxfp4"]
    total = sum(float(tensor_bytes(w, a, 1, 1, stored, 2.0)) for w, a in tensors)
    assert total / GIB == pytest.approx(gib, abs=0.05)


@pytest.mark.parametrize(
    ("name", "sequences", "tokens", "gib", "source"),
    [
        # one long prompt: the MLP is the peak
        ("llama-3.1-8b", 1, 20_000, 17.06 - 14.9888, "vllm-project/vllm/issues/10517"),
        ("llama-3.1-8b", 1, 29_000, 17.98 - 14.9888, "vllm-project/vllm/issues/10517"),
        # 256 sequences: the sampler is
        ("llama-3-8b", 256, 8192, 1.26, "vllm-project/vllm/pull/10511"),
        ("qwen2.5-7b", 256, 4096, 1.42, "vllm-project/vllm/issues/13882"),
    ],
)
def test_activation_peaks_of_published_logs(
    name: str, sequences: int, tokens: int, gib: float, source: str
) -> None:
    model = parts(name, sequences, tokens)
    predicted = float(model.activations + model.logits) / GIB
    assert predicted == pytest.approx(gib, rel=0.1), source
    assert abs(gib / predicted - 1) < SERVING_REST.above


def test_tensor_parallel_ranks_hold_the_sampler_whole() -> None:
    """The log of Llama-3-8B says 1.26 GiB on one GPU and on two (vllm-project/vllm/pull/10511)."""
    one, two = (parts("llama-3-8b", 256, 8192, tensor_parallel=t) for t in (1, 2))
    assert float(one.logits) == float(two.logits) == pytest.approx(1.162 * GIB, rel=1e-3)


def test_every_number_of_the_engine_has_a_source() -> None:
    engine = serving_engine()
    assert all(len(source) > 20 for source in engine.sources.values())
    assert len(engine.sources) == 45
