"""Operands smaller than the systolic array of a TPU's matrix unit, which pads them."""

from __future__ import annotations

import pytest

from cost_models.compute.attention import attention_core_seconds
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.rates import Rates, rates
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
        return float(attention_core_seconds(found, 8192.0, 65536, *rest))

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
