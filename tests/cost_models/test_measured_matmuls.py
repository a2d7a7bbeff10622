"""8-bit matmuls of a long run (10,000 before the first is timed), published and not fitted to.

Source: Azure/AI-benchmarking-guide, Azure_Results/ND_H200_v5_results.md and ND_GB200_v6_results.md:
cuBLASLt, random values, TFLOP/s of (m, n, k).
"""

from __future__ import annotations

import pytest

from cost_models.matmul import matmul_seconds
from cost_models.rates import rates
from hardware_profiles.software import software_profile
from hardware_profiles.spec import parse_cluster

H200 = {
    (4096, 4096, 4096): 1249.1,
    (8192, 8192, 8192): 1300.6,
    (16384, 16384, 16384): 1366.3,
    (32768, 32768, 32768): 1349.5,
    (6144, 12288, 12288): 1318.0,
    (802816, 192, 768): 717.5,
}
GB200 = {
    (8192, 8192, 8192): 2876.6,
    (16384, 16384, 16384): 2906.9,
    (32768, 32768, 32768): 2825.6,
    (6144, 12288, 12288): 2895.6,
    (802816, 192, 768): 1459.5,
}


@pytest.mark.parametrize(
    ("cluster", "measured", "bound"), [("8xH200-SXM", H200, 0.03), ("4xGB200", GB200, 0.1)]
)
def test_power_and_waves_say_what_a_long_run_of_one_matmul_reaches(
    cluster: str, measured: dict[tuple[int, int, int], float], bound: float
) -> None:
    rate = rates(parse_cluster(cluster).accelerator, "fp8", software_profile("nemo"))
    for (m, n, k), found in measured.items():
        seconds = float(matmul_seconds(float(m), float(k), float(n), 1.0, rate))
        assert 2e-12 * m * n * k / seconds == pytest.approx(found, rel=bound)
