"""Matmuls of a long run (10,000 before the first is timed), published and not fitted to.

Source: Azure/AI-benchmarking-guide, Azure_Results/ND_A100_v4_results.md (fp16), ND_H100_v5,
ND_H200_v5 and ND_GB200_v6 (fp8): cuBLASLt, random values, TFLOP/s of (m, n, k). Left out: 1024 and
2048 cubed, of which starting a kernel is a part.
"""

from __future__ import annotations

import pytest

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
