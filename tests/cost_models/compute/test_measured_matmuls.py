"""Matmuls of a long run (10,000 before the first is timed), published and not fitted to.

Source: Azure/AI-benchmarking-guide, Azure_Results/ND_A100_v4_results.md (fp16), ND_H100_v5,
ND_H200_v5 and ND_GB200_v6 (fp8): cuBLASLt, random values, TFLOP/s of (m, n, k). Left out: 1024 and
2048 cubed, of which starting a kernel is a part.
"""

import numpy as np
import pytest
from msgspec.structs import replace

from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.rates import rates
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile

BYTES = {"fp16": 2.0, "fp8": 1.0}
SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (32768, 32768, 32768),
    (6144, 12288, 12288),
    (802816, 192, 768),  # a long and thin one, bound by memory on the newer cards
)
MEASURED = [
    ("8xA100-80GB", "fp16", (228.0, 253.7, 256.5, None, 250.8, 157.8), 0.04),
    ("8xH100-SXM", "fp8", (1216.9, 1290.1, 1377.3, 1382.2, 1351.4, 663.8), 0.11),
    ("8xH200-SXM", "fp8", (1249.1, 1300.6, 1366.3, 1349.5, 1318.0, 717.5), 0.03),
    # 4096 cubed comes a fifth faster than waves of tiles on 152 multiprocessors allow
    ("4xGB200", "fp8", (2834.6, 2876.6, 2906.9, 2825.6, 2895.6, 1459.5), 0.19),
]


@pytest.mark.parametrize(("cluster", "precision", "measured", "worst"), MEASURED)
def test_power_and_waves_say_what_a_long_run_of_one_matmul_reaches(
    cluster: str, precision: str, measured: tuple[float | None, ...], worst: float
) -> None:
    rate = rates(parse_cluster(cluster).accelerator, precision, software_profile("nemo"))
    errors = []
    for (m, n, k), found in zip(SHAPES, measured, strict=True):
        if found is None:
            continue
        seconds = float(matmul_seconds(float(m), float(k), float(n), BYTES[precision], rate))
        errors.append(abs(2e-12 * m * n * k / seconds / found - 1.0))
    assert max(errors) <= worst
    assert sorted(errors)[len(errors) // 2] <= worst / 2.0 + 0.01


SQUARES = (1024.0, 2048.0, 4096.0, 8192.0, 10240.0)
# bf16, TFLOP/s: zzc0721/torch-performance-test-data, issues 131, 171, 114, 66, 145, 78, 96 and 64
GEFORCE = {
    "RTX-3060": (19.04, 23.69, 24.29, 25.42, 25.47),
    "RTX-3070": (29.54, 35.45, 34.76, 36.98, 38.36),
    "RTX-3080": (50.13, 58.92, 61.51, 63.56, 64.68),
    "RTX-4060": (27.85, 30.10, 31.21, 30.67, 29.81),
    "RTX-4060-Ti-16GB": (41.36, 44.75, 45.00, 47.48, 47.78),
    "RTX-4090": (126.84, 164.81, 151.50, 160.17, 158.54),
    "RTX-5090": (94.16, 170.77, 181.17, 234.89, 240.05),
}


def test_half_rate_tensor_cores_set_up_their_tiles_in_half_the_sums() -> None:
    def mean_error(setup: float) -> float:
        errors = []
        for name, measured in GEFORCE.items():
            chip = parse_cluster(f"1x{name}").accelerator
            found = rates(chip, "bf16", software_profile("torch-trainer"))
            rate = replace(found, matmul=1e12 * max(measured), setup=setup or found.setup)
            for size, flops in zip(SQUARES, measured, strict=True):
                seconds = float(matmul_seconds(size, size, size, 2.0, rate))
                errors.append(abs(np.log(2e-12 * size**3 / seconds / flops)))
        return float(np.mean(errors))

    assert mean_error(0.0) == mean_error(0.5) < 0.065
    assert mean_error(1.0) > 0.085
