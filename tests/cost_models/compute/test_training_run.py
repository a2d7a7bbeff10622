"""Whole runs by rules of thumb, compared with worked cases of papers."""

import numpy as np
import pytest

from cost_models.compute.training_run import (
    compute_optimal_tokens,
    training_flops,
    training_seconds,
)

DAY = 86400.0


@pytest.mark.parametrize(
    ("parameters", "tokens", "accelerators", "rate", "days"),
    [
        (175e9, 300e9, 1024, 140e12, 34),  # GPT-3, Narayanan et al. (arXiv:2104.04473), sec. 5.1
        (1008e9, 450e9, 3072, 163e12, 84),  # 1 trillion parameters (table 1: 1008 billion)
    ],
)
def test_days_of_narayanan(
    parameters: float, tokens: float, accelerators: int, rate: float, days: int
) -> None:
    flops = training_flops(parameters, tokens, recomputed=True)
    assert round(float(training_seconds(flops, accelerators, rate)) / DAY) == days


def test_gpt3_takes_3640_petaflop_days() -> None:
    """Brown et al. (arXiv:2005.14165), table D.1: 174.6 billion parameters, 300 billion tokens."""
    assert training_flops(174.6e9, 300e9) == pytest.approx(3.14e23, rel=0.002)
    assert training_flops(174.6e9, 300e9) / 1e15 / DAY == pytest.approx(3.64e3, rel=0.002)


def test_hyperclova_82b_runs_at_a_fifth_of_the_peak() -> None:
    """150 billion tokens on 1,024 A100 in 13.4 days (Kim et al., arXiv:2109.04650).

    The paper names no throughput: 62 TFLOP/s of the model's FLOP are 20 % of the A100's 312.
    """
    rate = float(training_flops(82e9, 150e9)) / (1024 * 13.4 * DAY)
    assert rate == pytest.approx(62.2e12, rel=0.01)
    assert rate / 312e12 == pytest.approx(0.20, abs=0.005)
    again = training_flops(82e9, 150e9, recomputed=True)
    # at the 140 TFLOP/s of the first case it would have taken 8 days
    assert training_seconds(again, 1024, 140e12) / DAY == pytest.approx(7.9, abs=0.1)


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [  # Hoffmann et al. (arXiv:2203.15556), table 3; Chinchilla itself last
        (400e6, 8.0e9),
        (1e9, 20.2e9),
        (10e9, 205.1e9),
        (67e9, 1.5e12),
        (175e9, 3.7e12),
        (280e9, 5.9e12),
        (520e9, 11.0e12),
        (1e12, 21.2e12),
        (70e9, 1.4e12),
    ],
)
def test_compute_optimal_tokens_of_chinchilla(parameters: float, tokens: float) -> None:
    assert compute_optimal_tokens(parameters) == pytest.approx(tokens, rel=0.12)


def test_columns_broadcast() -> None:
    flops = training_flops(np.array([1.0, 2.0]), 3.0, recomputed=np.array([False, True]))
    assert flops.tolist() == pytest.approx([18.0, 48.0])
