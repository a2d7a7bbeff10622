"""Intervals after learning."""

import math

import numpy as np
import pytest

from planner.learning.mechanisms import Likeness, Multiple, Noise, Prior, Spreads
from planner.learning.spreads import deviations, learned_spreads

ENDS = Multiple(below=1.0, above=2.0, source="a test")
PRIOR = Prior(
    departs=0.1,
    noise=Noise(time=0.1, memory=0.05, runs=2.0, kept=0.5),
    likeness=Likeness(length=2.0, noise=0.5),
    widths={},
    after=(Spreads(1, ENDS, ENDS),),
)
NAN = math.nan


def test_runs_that_are_still_wrong_widen_the_interval() -> None:
    measured, before = np.array([[0.3, NAN], [0.3, NAN]]), np.zeros((2, 2))
    explained = deviations(measured, before, np.full((2, 2), 0.3), PRIOR)
    # (2 x 0.1^2 + 0) / (2 + 2) + 0.5^2 x 0.3^2; of memory the noise alone
    assert explained == pytest.approx([math.sqrt(0.005 + 0.0225), 0.05])
    wrong = deviations(measured, before, np.full((2, 2), 0.1), PRIOR)
    assert wrong[0] ** 2 - explained[0] ** 2 == pytest.approx(2 * 0.2**2 / 4)


def test_only_measured_quantities_have_an_interval() -> None:
    none = np.zeros((1, 2))
    found = learned_spreads(np.array([[0.0, NAN]]), none, none, PRIOR)
    size = math.sqrt(2 * 0.01 / 3)
    assert list(found) == ["time"]
    assert found["time"].below == pytest.approx(1.0 - math.exp(-size), abs=1e-3)
    assert found["time"].above == pytest.approx(math.exp(2.0 * size) - 1.0, abs=1e-3)
    assert found["time"].runs == 1
