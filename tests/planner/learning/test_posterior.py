"""Posterior of switches and rates."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.learning.mechanisms import OWN, Likeness, Noise, Prior
from planner.learning.posterior import Posterior, posterior, predictive, regression

NAN = math.nan
PRIOR = Prior(
    departs=0.2,
    noise=Noise(time=0.02, memory=0.02, runs=2.0, kept=0.2),
    likeness=Likeness(length=2.0, noise=0.5),
    widths={},
)


def effects(by_option: list[Any], by_rate: Any, runs: int = 2) -> Any:
    """Effects on runs whose predictions are 1 s and 1 byte."""
    return SimpleNamespace(
        base=np.zeros((runs, 2)),
        options=tuple((OWN, *map(str, range(1, len(change)))) for change in by_option),
        by_option=tuple(np.array(change, dtype=float) for change in by_option),
        by_rate=np.array(by_rate, dtype=float),
    )


def test_a_rate_is_learned_as_far_as_noise_allows() -> None:
    one = effects([], [[[0.1, 0.0], [0.1, 0.0]]])
    found = posterior(one, np.array([[0.05, NAN], [0.05, NAN]]), PRIOR)
    # precision 1 + 2 (0.1 / 0.02)^2 = 51; mean 2 x 0.1 x 0.05 / 0.02^2 / 51
    assert found.mean == pytest.approx([25.0 / 51.0])
    assert found.deviation == pytest.approx([51.0**-0.5])


def test_a_switch_that_explains_a_run_is_concluded() -> None:
    switch = [[[0.0, 0.0]] * 2, [[0.3, 0.0]] * 2]
    known = effects([switch], np.zeros((1, 2, 2)))
    explained = posterior(known, np.array([[0.3, NAN], [0.29, NAN]]), PRIOR)
    assert explained.of_option(0, 2)[1] > 0.999
    as_before = posterior(known, np.array([[0.0, NAN], [0.01, NAN]]), PRIOR)
    assert as_before.of_option(0, 2)[0] > 0.999


def test_a_rate_explains_what_a_switch_does_not() -> None:
    """Runs 10 % and 20 % longer: a switch of 20 % on both is less likely than a rate."""
    switch = [[[0.0, 0.0]] * 2, [[0.2, 0.0]] * 2]
    known = effects([switch], [[[0.1, 0.0], [0.2, 0.0]]])
    found = posterior(known, np.array([[0.1, NAN], [0.2, NAN]]), PRIOR)
    assert found.of_option(0, 2)[0] > 0.9
    assert found.mean == pytest.approx([1.0], abs=0.1)


def test_an_option_that_refuses_the_plan_is_not_weighed() -> None:
    switch = [[[0.0, 0.0]] * 2, [[NAN, NAN], [0.0, 0.0]]]
    known = effects([switch], np.zeros((1, 2, 2)))
    found = posterior(known, np.array([[0.5, NAN], [0.0, NAN]]), PRIOR)
    assert list(found.of_option(0, 2)) == [1.0, 0.0]


def test_peaks_tell_about_switches_that_change_no_time() -> None:
    switch = [[[0.0, 0.0]] * 2, [[0.0, 0.3]] * 2]
    known = effects([switch], np.zeros((1, 2, 2)))
    found = posterior(known, np.array([[0.0, 0.3], [NAN, NAN]]), PRIOR)
    assert found.of_option(0, 2)[1] > 0.999
    assert posterior(known, np.array([[0.0, NAN]] * 2), PRIOR).of_option(0, 2)[1] == 0.0


def test_the_evidence_is_that_of_a_normal_distribution() -> None:
    residual, noise = np.array([[0.03]]), np.array([0.02])
    found = regression(np.zeros((1, 0)), residual, np.array([[0.1]]), noise, np.zeros(1))
    variance = 0.1**2 + 0.02**2
    expected = -0.5 * (0.03**2 / variance + math.log(2.0 * math.pi * variance))
    assert found.log_evidence == pytest.approx(expected)


def test_predictions_are_as_uncertain_as_what_was_not_told() -> None:
    known = effects([[[[0.0, 0.0]] * 2, [[0.2, 0.0]] * 2]], [[[0.1, 0.0], [0.1, 0.05]]])
    found = Posterior(
        combinations=np.array([[0], [1]]),
        weights=np.array([0.5, 0.5]),
        means=np.zeros((2, 1)),
        covariance=np.array([[1.0]]),
        log_evidence=0.0,
    )
    mean, covariance = predictive(known, 1, found)
    assert mean == pytest.approx([0.1, 0.0])
    assert covariance == pytest.approx(np.array([[0.02, 0.005], [0.005, 0.0025]]))
