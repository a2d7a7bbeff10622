"""Times of static batches against published ones; the intervals of ``uncertainty`` come from these.

16-bit rows of gpt-fast gave ``kernels.stream_share`` and ``kernels.seconds``; all others were only
compared.
"""

from functools import cache

import numpy as np
import pytest

from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import even_split_contents
from cost_models.serving.latency import ServingTimes, serving_times
from cost_models.serving.memory import Replica, ServingPoint, ServingWorkload
from cost_models.uncertainty import SERVING_PREFILL, SERVING_TOKEN, Spread
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.serving_engine import serving_engine

A100, H100 = "8xA100-80GB", "8xH100-SXM-80GB"
SEVEN, THIRTEEN, SEVENTY = "llama-2-7b", "llama-2-13b", "llama-2-70b"
TWENTY = "internlm-20b"


@cache
def spec(name: str) -> ModelSpec:
    if name == TWENTY:  # 60 layers of the size of Llama-2-13B's, a larger vocabulary
        shape = {"num_hidden_layers": 60, "vocab_size": 103168}
        return model_spec({**load_preset(THIRTEEN).config, **shape}, name=name)
    return model_spec(dict(load_preset(name).config), name=name)


def timed(
    name: str,
    sequences: int,
    prompt: int,
    answer: int,
    tensor: int,
    *,
    cluster: str = A100,
    weights: str = "fp16",
    nccl: bool = False,
) -> ServingTimes:
    """A static batch; ``nccl``: without kernels of the engine's own for small all-reduces."""
    model, engine = spec(name), serving_engine()
    if nccl:
        engine = engine.changed({"communication.direct_all_reduce_bytes": 0.0})
    cached = "fp8" if weights == "fp8" else "fp16"
    workload = ServingWorkload(sequences, prompt + answer, 8192, "fp16", weights, cached)  # type: ignore[arg-type]
    point = ServingPoint(sequences, prompt + answer, 8192, tensor)
    ranks = even_split_contents(model, 1, 1)
    return serving_times(
        Replica(model, workload, engine, point), parse_cluster(cluster), ranks, prompt
    )


# pytorch-labs/gpt-fast@0f925b5d: README.md: model, accelerators, tokens a second
GPT_FAST = [
    (SEVEN, 1, 104.9), (SEVEN, 2, 168.84), (SEVEN, 4, 254.02), (SEVEN, 8, 328.43),
    (SEVENTY, 2, 21.32), (SEVENTY, 4, 38.01), (SEVENTY, 8, 62.50),
]  # fmt: skip
# InternLM/lmdeploy@3e391df4: docs/en/benchmark/a100_fp16.md, static inference: model, accelerators,
# sequences, prompt, answer, median seconds of a token
LMDEPLOY = [
    (SEVEN, 1, 1, 128, 128, 0.010), (SEVEN, 1, 1, 128, 2048, 0.010),
    (SEVEN, 1, 1, 2048, 128, 0.010), (SEVEN, 1, 1, 2048, 2048, 0.011),
    (SEVEN, 1, 16, 128, 2048, 0.015), (SEVEN, 1, 16, 2048, 2048, 0.025),
    (SEVEN, 1, 32, 128, 2048, 0.021), (SEVEN, 1, 64, 128, 128, 0.014),
    (SEVEN, 1, 64, 128, 2048, 0.030), (THIRTEEN, 1, 1, 128, 128, 0.017),
    (THIRTEEN, 1, 1, 2048, 2048, 0.019), (THIRTEEN, 1, 16, 128, 2048, 0.026),
    (THIRTEEN, 1, 32, 128, 2048, 0.034), (TWENTY, 2, 1, 128, 128, 0.016),
    (TWENTY, 2, 1, 2048, 2048, 0.018), (TWENTY, 2, 16, 128, 2048, 0.024),
    (TWENTY, 2, 32, 128, 2048, 0.031), (SEVENTY, 4, 1, 128, 128, 0.029),
    (SEVENTY, 4, 1, 2048, 2048, 0.031), (SEVENTY, 4, 16, 128, 2048, 0.033),
    (SEVENTY, 4, 32, 128, 2048, 0.036), (SEVENTY, 4, 64, 128, 2048, 0.043),
    (SEVENTY, 4, 64, 2048, 2048, 0.055),
]  # fmt: skip
# the same, least latency of the first token; NVIDIA/TensorRT-LLM@138f96d4: performance.md of
# docs/source (v0.5, A100 in fp16, H100 in fp8): model, accelerators, prompt, seconds, cluster,
# weights
FIRST = [
    (SEVEN, 1, 128, 0.022, A100, "fp16"), (SEVEN, 1, 2048, 0.139, A100, "fp16"),
    (THIRTEEN, 1, 128, 0.039, A100, "fp16"), (THIRTEEN, 1, 2048, 0.242, A100, "fp16"),
    (TWENTY, 2, 128, 0.041, A100, "fp16"), (TWENTY, 2, 2048, 0.216, A100, "fp16"),
    (SEVENTY, 4, 128, 0.073, A100, "fp16"), (SEVENTY, 4, 2048, 0.401, A100, "fp16"),
    (SEVEN, 1, 128, 0.016, A100, "fp16"), (SEVEN, 1, 2048, 0.133, A100, "fp16"),
    (SEVENTY, 4, 128, 0.047, A100, "fp16"), (SEVENTY, 4, 2048, 0.377, A100, "fp16"),
    ("falcon-180b", 8, 128, 0.061, A100, "fp16"), ("falcon-180b", 8, 2048, 0.509, A100, "fp16"),
    (SEVEN, 1, 128, 0.007, H100, "fp8"), (SEVEN, 1, 2048, 0.036, H100, "fp8"),
    (SEVENTY, 4, 128, 0.026, H100, "fp8"), (SEVENTY, 4, 2048, 0.109, H100, "fp8"),
    ("falcon-180b", 8, 128, 0.027, H100, "fp8"), ("falcon-180b", 8, 2048, 0.205, H100, "fp8"),
]  # fmt: skip


def inside(measured_over_predicted: list[float], spread: Spread) -> float:
    """Share of the measurements inside the stated interval."""
    ratios = np.array(measured_over_predicted)
    return float(np.mean((ratios >= 1.0 - spread.below) & (ratios <= 1.0 + spread.above)))


def token_ratios() -> tuple[list[float], list[float]]:
    fast = [1.0 / rate / float(timed(m, 1, 5, 200, n).token) for m, n, rate in GPT_FAST]
    served = [
        seconds / float(timed(m, count, prompt, answer, n, nccl=True).token)
        for m, n, count, prompt, answer, seconds in LMDEPLOY
    ]
    return fast, served


def test_an_output_token() -> None:
    fast, served = token_ratios()
    assert max(abs(1.0 / r - 1.0) for r in fast) < 0.05
    errors = [abs(1.0 / r - 1.0) for r in served]
    assert float(np.median(errors)) < 0.05
    # grouped queries in kernels of 2023: every query head read its keys for itself
    assert max(errors[:17]) < 0.07
    assert max(errors) < 0.30
    assert 0.85 <= inside([*fast, *served], SERVING_TOKEN) <= 1.0


def test_the_first_token() -> None:
    ratios, long = [], []
    for name, tensor, prompt, seconds, cluster, weights in FIRST:
        said = float(timed(name, 1, prompt, 1, tensor, cluster=cluster, weights=weights).alone)
        ratios.append(seconds / said)
        if prompt == 2048 and cluster == A100:
            long.append(abs(said / seconds - 1.0))
    assert 0.85 <= inside(ratios, SERVING_PREFILL) <= 1.0
    assert float(np.median(long)) < 0.06
    assert max(long) < 0.10


def test_whole_batches() -> None:
    """lmdeploy's throughput of the same batches: prompts and answers together."""
    rows = [(SEVEN, 1, 16, 2048, 2048, 601.63), (SEVEN, 1, 32, 128, 2048, 1462.12)]
    rows += [(THIRTEEN, 1, 16, 128, 2048, 605.88), (TWENTY, 2, 32, 128, 2048, 1025.62)]
    for name, tensor, count, prompt, answer, rate in rows:
        batch = float(timed(name, count, prompt, answer, tensor, nccl=True).batch)
        assert count * answer / batch == pytest.approx(rate, rel=0.08)


def test_without_its_terms_the_prediction_is_wrong() -> None:
    """A roofline of bytes alone is a third too fast at eight accelerators."""
    engine = serving_engine().changed({"kernels.seconds": 0.0})
    model, point = spec(SEVEN), ServingPoint(1, 205, 8192, 8)
    workload = ServingWorkload(1, 205, 8192, "fp16", "fp16", "fp16")
    ranks = even_split_contents(model, 1, 1)
    bare = serving_times(Replica(model, workload, engine, point), parse_cluster(A100), ranks, 5)
    assert float(bare.token) < 0.6 / 328.43
