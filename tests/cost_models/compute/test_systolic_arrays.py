"""Operands smaller than the systolic array of a TPU's matrix unit, which pads them."""

from dataclasses import replace

import pytest

from cost_models.compute.attention import CoreWork, attention_core_seconds
from cost_models.compute.layer import LayerWork, layer_seconds
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.rates import Rates, rates
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import Attention
from hardware_profiles.cluster.catalogue import accelerators, find_accelerator
from hardware_profiles.software.trainer import software_profile

XLA = software_profile("xla")


def rates_of(name: str) -> Rates:
    return rates(find_accelerator(name), "bf16", XLA)


@pytest.mark.parametrize(
    ("name", "head", "times"),
    [("TPU-v5p", 128, 1), ("TPU-v5p", 64, 2), ("TPU-v6e", 256, 1), ("TPU-v6e", 128, 2)],
)
@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_attention_multiplies_whole_arrays(name: str, head: int, times: int, kernel: str) -> None:
    """Heads of fewer elements than an array has rows take as long as heads that fill it."""

    def seconds(size: int) -> float:
        found = Attention(16, 16, size, size)
        rest = 1, kernel, 2.0, rates_of(name), XLA
        return float(attention_core_seconds(CoreWork(found, 8192.0, 65536, *rest)))

    assert seconds(head) == pytest.approx(seconds(times * head), rel=0.02)


def test_a_product_of_wide_operands_loses_nothing() -> None:
    rate, rows = rates_of("TPU-v6e"), 65536.0
    whole, odd, narrow = (
        float(matmul_seconds(rows, size, size, 2.0, rate)) for size in (4096.0, 4000.0, 128.0)
    )
    assert whole == pytest.approx(2.0 * rows * 4096.0**2 / rate.matmul)
    assert odd == whole
    assert narrow == pytest.approx(
        max(2.0 * rows * 256.0**2 / rate.matmul, 4.0 * rows * 128.0 / rate.memory), rel=0.01
    )


def test_tpus_alone_have_an_array_in_the_catalogue() -> None:
    have = {one.name for one in accelerators() if one.systolic_array is not None}
    assert have == {one.name for one in accelerators() if one.architecture == "TPU"}


def mixture_seconds(name: str, experts: int, chosen: int, width: int, tokens: float) -> float:
    """Seconds of a layer of Mixtral with other experts, without its attention, computed again."""
    config = load_preset("mixtral-8x7b").config | {
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
        "intermediate_size": width,
    }
    kind = model_spec(config, name="mixture").kinds[0]
    alone = replace(kind, weights=tuple(w for w in kind.weights if w.role == "expert"))
    found = layer_seconds(
        LayerWork(
            alone,
            4096,
            1,
            tokens,
            tensor_parallel=1,
            sequence_parallel=False,
            recompute_full=True,
            recompute_core=False,
            kernel="flash",
            compute_bytes=2.0,
            rate=rates_of(name),
            software=XLA,
        )
    )
    return float(found.forward + found.backward + found.recompute)


def test_tokens_of_many_experts_halve_the_utilisation_of_a_tpu() -> None:
    """MFU of 50.4 and 28 % of a v5p: AI-Hypercomputer/maxtext, issue 1256."""
    tokens = 65536.0
    reached = [
        6.0 * tokens * 3 * 2 * 4096 * 14336 / mixture_seconds("TPU-v5p", *sizes, tokens) / 459e12
        for sizes in ((8, 2, 14336), (56, 14, 2048))
    ]
    assert reached == pytest.approx([0.504, 0.28], rel=0.08)


def test_a_gpu_moves_tokens_at_the_rate_of_its_memory() -> None:
    few, many = (
        mixture_seconds("H100-SXM-80GB", *sizes, 65536.0)
        for sizes in ((8, 2, 14336), (56, 14, 2048))
    )
    assert many < 1.15 * few
