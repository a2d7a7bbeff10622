from dataclasses import replace
from statistics import median

import pytest

from cost_models.compute.rates import (
    ACHIEVABLE_SHARE,
    ACHIEVABLE_SHARE_BEFORE_HOPPER,
    ACHIEVABLE_SHARE_OF_OTHERS,
    CUDA,
    FP32_SHARE,
    FP32_SHARE_OF_DOUBLED_LANES,
    FP32_SHARE_SINCE_HOPPER,
    JOULES_A_FLOP,
    MEMORY_SHARE,
    SUSTAINED_SHARE,
    best_matmul,
    peak_of,
    rates,
    training_rates,
)
from hardware_profiles.cluster.catalogue import accelerators
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile

SOFTWARE = software_profile("shardplan")


def test_measured_rates_come_before_the_share_of_the_datasheet() -> None:
    chip = parse_cluster("8xA100-80GB").accelerator
    peak = chip.peak_flops["bf16"]
    unmeasured = replace(chip, achievable_flops={})
    alone = rates(unmeasured, "bf16", SOFTWARE, long_run=False)
    assert alone.matmul == pytest.approx(ACHIEVABLE_SHARE_BEFORE_HOPPER * peak.value)
    newer = replace(unmeasured, architecture="Hopper")
    alone = rates(newer, "bf16", SOFTWARE, long_run=False)
    assert alone.matmul == pytest.approx(ACHIEVABLE_SHARE * peak.value)
    other = replace(unmeasured, architecture="MUSA")
    alone = rates(other, "bf16", SOFTWARE, long_run=False)
    assert alone.matmul == pytest.approx(ACHIEVABLE_SHARE_OF_OTHERS * peak.value)
    measured = replace(chip, achievable_flops={"bf16": replace(peak, value=2e14)})
    assert rates(measured, "bf16", SOFTWARE, long_run=False).matmul == 2e14
    assert rates(measured, "bf16", SOFTWARE).matmul == pytest.approx(SUSTAINED_SHARE * 2e14)
    assert rates(chip, "bf16", SOFTWARE).memory == MEMORY_SHARE * chip.memory_bandwidth.value
    cpu = rates(replace(measured, device="cpu"), "bf16", SOFTWARE)
    assert cpu.host_is_device
    assert cpu.matmul == 2e14  # measured on this very machine, under load
    assert cpu.memory == chip.memory_bandwidth.value


def test_the_share_of_other_vendors_is_the_median_of_their_measured_cards() -> None:
    others = [card for card in accelerators() if card.architecture not in (*CUDA, "TPU")]
    shares = [
        figure.value / card.peak_flops[name].value
        for card in others
        for name, figure in card.achievable_flops.items()
        if name == "bf16" and figure.kind == "published"
    ]
    assert median(shares) == pytest.approx(ACHIEVABLE_SHARE_OF_OTHERS, abs=0.01)


def test_an_unknown_rate_is_an_error_that_says_which_are_known() -> None:
    chip = replace(parse_cluster("8xA100-80GB").accelerator, achievable_flops={})
    chip = replace(chip, peak_flops={"bf16": chip.peak_flops["bf16"]})
    with pytest.raises(InputError, match=r"no rate is known for fp64 \(known: bf16\)"):
        rates(chip, "fp64", SOFTWARE)


def test_flash_kernels_without_hoppers_matmuls_reach_their_share_of_it() -> None:
    own = {"8xA100-80GB": 1.0, "8xRTX-5090": 1.0, "8xH100-SXM": 0.6, "8xB200": 0.6 * 0.55}
    for cluster, share in own.items():
        chip = parse_cluster(cluster).accelerator
        assert rates(chip, "bf16", software_profile("torchtune")).flash == pytest.approx(share)
        assert rates(chip, "bf16", software_profile("nemo")).flash == 1.0
        # torch since 2.9.1 takes cuDNN's there
        assert rates(chip, "bf16", SOFTWARE).flash == 1.0


def test_matmuls_without_tensor_cores_come_nearer_to_their_peak() -> None:
    chip = parse_cluster("8xV100-SXM2-32GB").accelerator
    plain = rates(chip, "fp32", SOFTWARE)
    assert plain.matmul == FP32_SHARE * chip.peak_flops["fp32"].value
    sixteen = rates(chip, "fp16", SOFTWARE, long_run=False)
    assert plain.setup == pytest.approx(plain.matmul / sixteen.matmul)
    assert rates(chip, "fp16", SOFTWARE).setup == 1.0


@pytest.mark.parametrize(
    ("gpu", "share"),
    [
        ("A100-PCIe-80GB", FP32_SHARE),
        ("A30", FP32_SHARE),
        ("RTX-2080-Ti", FP32_SHARE),
        ("A10", FP32_SHARE_OF_DOUBLED_LANES),
        ("RTX-4080", FP32_SHARE_OF_DOUBLED_LANES),
        ("RTX-5070-Ti", FP32_SHARE_OF_DOUBLED_LANES),
        ("H100-PCIe-80GB", FP32_SHARE_SINCE_HOPPER),
        ("B200-SXM-180GB", FP32_SHARE_SINCE_HOPPER),
        ("MI300X", FP32_SHARE),
    ],
)
def test_doubled_lanes_reach_less_of_their_peak(gpu: str, share: float) -> None:
    chip = parse_cluster(f"1x{gpu}").accelerator
    plain = replace(chip, achievable_flops={})
    assert best_matmul(plain, "fp32") == share * chip.peak_flops["fp32"].value


def test_integers_have_twice_the_rate_of_16_bits_and_four_times_on_geforce() -> None:
    peaks = {
        "A100-PCIe-80GB": 624e12,
        "RTX-4090": 660e12,
        "RTX-A6000": 309.6e12,
        "GB300-288GB": None,
    }
    for gpu, peak in peaks.items():
        chip = parse_cluster(f"1x{gpu}").accelerator
        assert peak_of(chip, "int8") == (None if peak is None else pytest.approx(peak))
    integers = software_profile("torch-compile+int8-rowwise")
    share = integers.fp8.matmul_share
    chip = parse_cluster("1xA100-PCIe-80GB").accelerator
    sixteen = training_rates(chip, "bf16", integers)
    eight = training_rates(chip, "fp8", integers)
    assert eight.matmul == pytest.approx(2.0 * share * sixteen.matmul)
    assert eight.core == pytest.approx(sixteen.matmul)


def test_flash_kernels_multiply_fp32_by_three_products_in_tf32() -> None:
    chip = parse_cluster("1xA100-PCIe-80GB").accelerator
    assert rates(chip, "tf32", SOFTWARE).attention == pytest.approx(1 / 3)
    assert rates(chip, "fp32", SOFTWARE).attention == 1.0
    wide = parse_cluster("1xRTX-A6000").accelerator
    in_tf32, in_fp32 = (rates(wide, p, SOFTWARE) for p in ("tf32", "fp32"))
    assert in_fp32.attention * in_fp32.matmul == pytest.approx(in_tf32.matmul / 3)
    assert rates(chip, "bf16", SOFTWARE).attention == 1.0
    before = parse_cluster("8xV100-SXM2-32GB").accelerator
    assert rates(before, "fp32", SOFTWARE).attention == 1.0


def test_cores_of_fp8_set_up_their_tiles_as_in_16_bits() -> None:
    chip = parse_cluster("8xH100-SXM").accelerator
    eight = rates(chip, "fp8", SOFTWARE)
    alone = [rates(chip, precision, SOFTWARE, long_run=False) for precision in ("fp8", "bf16")]
    assert eight.setup == pytest.approx(alone[0].matmul / alone[1].matmul)
    assert eight.of_core.setup == 1.0


def test_power_bounds_long_runs_of_the_boards_that_need_more_than_they_get() -> None:
    def long(cluster: str, precision: str = "bf16", **changes: object) -> float:
        chip = parse_cluster(cluster).accelerator
        return rates(replace(chip, **changes), precision, SOFTWARE).matmul

    watts = parse_cluster("8xB200").accelerator.power
    assert watts is not None
    assert long("8xB200") == pytest.approx(watts.value / JOULES_A_FLOP["Blackwell"])
    assert long("8xB200", "fp8") == pytest.approx(2.0 * long("8xB200"))
    assert long("8xB200", power=None) == pytest.approx(SUSTAINED_SHARE * 1.745e15)
    assert long("8xB200", power=replace(watts, value=5000.0)) == long("8xB200", power=None)
    # the same chip with a lower limit is slower; an A100 is not bound by its 400 W, by 250 it is
    assert long("8xH100-SXM-96GB") == pytest.approx(long("8xH100-SXM") * 500.0 / 700.0)
    assert long("8xA100-80GB") == pytest.approx(SUSTAINED_SHARE * 271.2e12)
    assert long("8xA100-PCIe-40GB") == pytest.approx(250.0 / JOULES_A_FLOP["Ampere"])
    # 65 TFLOP/s by the datasheet, 41.9 in a short benchmark, 24 in one of a second
    assert long("4xT4", "fp16") == pytest.approx(24e12, rel=0.01)


def test_a_precision_that_nobody_measured_reaches_the_share_of_the_16_bit_ones() -> None:
    chip = parse_cluster("8xMI355X").accelerator
    eight, sixteen = (
        rates(chip, precision, SOFTWARE, long_run=False).matmul for precision in ("fp8", "bf16")
    )
    assert sixteen == chip.achievable_flops["bf16"].value
    assert eight == pytest.approx(
        sixteen * chip.peak_flops["fp8"].value / chip.peak_flops["bf16"].value
    )
    measured = parse_cluster("8xMI325X").accelerator
    assert rates(measured, "fp8", SOFTWARE, long_run=False).matmul == 1.409e15


def test_more_ranks_wait_longer_for_the_slowest_of_them() -> None:
    chip, trainer = parse_cluster("8xA100-80GB").accelerator, software_profile("hf-trainer")
    alone = training_rates(chip, "bf16", trainer)
    assert alone == rates(chip, "bf16", trainer)
    waits = [alone.matmul / training_rates(chip, "bf16", trainer, n).matmul for n in (1, 2, 8, 64)]
    assert waits == sorted(waits)
    spread = trainer.kernels.rank_spread
    assert waits[2] == pytest.approx(1.0 + 1.42 * spread, rel=2e-3)  # E of the largest of 8: 1.424
    eight = training_rates(chip, "bf16", trainer, 8)
    assert alone.memory / eight.memory == pytest.approx(waits[2])
    assert eight.operator == alone.operator
    assert training_rates(chip, "bf16", SOFTWARE, 8) == rates(chip, "bf16", SOFTWARE)


def test_a_slower_host_raises_the_time_of_an_operator_of_trainers_that_take_less() -> None:
    grace = parse_cluster("1xGH200-96GB").accelerator
    assert grace.kernel_launch is not None
    elsewhere = replace(grace, kernel_launch=None)
    for software, slowed in (("torch-trainer", True), ("nemo", False)):
        profile = software_profile(software)
        usual = rates(elsewhere, "bf16", profile).operator
        assert usual == profile.host.operator_seconds
        assert (rates(grace, "bf16", profile).operator > usual) is slowed
    faster = replace(grace, kernel_launch=replace(grace.kernel_launch, kind="measured", value=3e-6))
    assert rates(faster, "bf16", software_profile("nemo")).operator == 3e-6
