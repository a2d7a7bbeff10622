"""16-bit matmuls whose operands have rows of no multiple of 8 elements, against published rates."""

from typing import Any

import pytest
from msgspec.structs import replace

from cost_models.compute.attention import CoreWork, attention_core_seconds
from cost_models.compute.matmul import matmul_seconds, misalignment
from cost_models.compute.matrices import linear_seconds
from cost_models.compute.rates import Rates, rates
from cost_models.model.families import model_spec
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.software.trainer import software_profile
from tests.samples import GPT3

EAGER = software_profile("megatron")
A100 = rates(find_accelerator("A100-SXM-80GB"), "bf16", EAGER, long_run=False)


@pytest.mark.parametrize(
    ("columns", "published"),
    [(51136, 255.4), (51137, 76.1), (51138, 136.9), (51140, 138.4), (51152, 251.7)],
)
def test_a_projection_reaches_the_published_rate(columns: int, published: float) -> None:
    """8192 tokens of hidden size 14336 on an A100: EleutherAI/cookbook, vocab_v_sweep.out."""
    seconds = linear_seconds(8192.0, 14336.0, float(columns), 2.0, A100)
    reached = 2.0 * 8192 * 14336 * columns / float(seconds.forward) / 1e12
    assert reached == pytest.approx(published, rel=0.16)
    # every matmul of the matrix reads or writes rows of that length
    slower = float(seconds.forward) / float(
        linear_seconds(8192.0, 14336.0, 51136.0, 2.0, A100).forward
    )
    for other in (seconds.inputs, seconds.weights):
        aligned = linear_seconds(8192.0, 14336.0, 51136.0, 2.0, A100).inputs
        assert float(other / aligned) == pytest.approx(slower, rel=0.02)


@pytest.mark.parametrize(("size", "published"), [(2040, 155.9), (2055, 115.6), (2057, 106.8)])
def test_a_geforce_card_reaches_the_published_rate(size: int, published: float) -> None:
    """Square matmuls on an RTX 4090: pytorch/pytorch issue 181718."""
    rate = rates(find_accelerator("RTX-4090"), "bf16", EAGER, long_run=False)
    shape = float(size), float(size), float(size)
    seconds = float(matmul_seconds(*shape, 2.0, rate, in_memory=shape[:2]))
    assert 2.0 * size**3 / seconds / 1e12 == pytest.approx(published, rel=0.17)


@pytest.mark.parametrize(
    ("size", "figures", "published"),
    [(128, {}, 132.5), (140, {}, 85.6), (140, {"kernels.misaligned_bf16_batches": 11.0}, 12.2)],
)
def test_batched_values_reach_the_published_rate(
    size: int, figures: dict[str, Any], published: float
) -> None:
    """384 (512) matmuls of 1024 x 1024 by a head on an A100: pytorch/pytorch issue 83272."""
    rate = rates(find_accelerator("A100-SXM-80GB"), "bf16", EAGER.changed(figures), long_run=False)
    batch = 512.0 if size == 128 else 384.0
    lengths = (1024.0, float(size))
    shape = 1024.0, 1024.0, float(size)
    seconds = float(matmul_seconds(*shape, 2.0, rate, batch=batch, in_memory=lengths, batched=True))
    reached = 2.0 * batch * 1024 * 1024 * size / seconds / 1e12
    assert reached == pytest.approx(published, rel=0.4)


@pytest.mark.parametrize(
    ("rate", "compute_bytes", "slower"),
    [
        (A100, 2.0, True),
        (A100, 4.0, False),
        (replace(A100, pads_matmuls=True), 2.0, False),
        (replace(A100, units=0.0), 2.0, False),
    ],
)
def test_heads_of_an_odd_size_are_slow_in_16_bits_unless_padded(
    rate: Rates, compute_bytes: float, slower: bool
) -> None:
    def seconds(size: int, kernel: str = "eager") -> float:
        model = model_spec({**GPT3, "n_head": 16, "n_embd": 16 * size}, name="gpt")
        attention = model.kinds[0].attention
        rest = 1, kernel, compute_bytes, rate, EAGER
        return float(attention_core_seconds(CoreWork(attention, 4096.0, 2048, *rest))) / size

    assert (seconds(321) > 1.3 * seconds(320)) is slower
    # a flash kernel pads heads in shared memory
    assert seconds(321, "flash") == pytest.approx(seconds(320, "flash"), rel=1e-6)


def test_tokens_of_no_multiple_of_8_are_as_fast() -> None:
    """Tokens are the rows' number, not their length."""
    seconds = [float(linear_seconds(n, 4096.0, 4096.0, 2.0, A100).weights) for n in (8191.0, 8192)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)


def test_compilers_pad() -> None:
    padded = {n: software_profile(n).kernels.pads_matmuls for n in ("xla", "torchtitan", "peft")}
    assert padded == {"xla": True, "torchtitan": True, "peft": False}


@pytest.mark.parametrize(
    ("name", "odd", "even"), [("A30", 3.0, 1.8), ("RTX-A6000", 1.5, 1.0), ("L40S", 1.5, 1.0)]
)
def test_cards_of_half_an_a100s_work_a_clock_lose_half_as_much(
    name: str, odd: float, even: float
) -> None:
    """The kernels load as many elements a clock: 492 FLOP of an A100's, 341 of an RTX 4090's."""
    rate = rates(find_accelerator(name), "bf16", EAGER)
    assert misalignment([50257.0], 2.0, rate) == odd
    assert misalignment([50258.0], 2.0, rate) == even
