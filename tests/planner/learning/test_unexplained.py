"""What mechanisms leave of step times, and which other runs it concerns."""

import math

import numpy as np
import pytest

from cost_models.step_time.unexplained import likeness
from planner.learning.mechanisms import Likeness
from planner.learning.unexplained import weights

PRIOR = Likeness(length=2.0, noise=0.5)
APART = np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 2.0], [3.0, 2.0, 0.0]])
LEFT = np.array([0.1, 0.3, -0.2])


def predicted(left: np.ndarray, apart: np.ndarray, to: np.ndarray) -> float:
    """Mean of the process at a run with distances ``to`` the others."""
    return float(likeness(to, PRIOR.length) @ weights(left, apart, PRIOR)[0])


def test_one_run_is_believed_as_far_as_its_own_share_allows() -> None:
    found = predicted(LEFT[:1], APART[:1, :1], np.zeros(1))
    assert found == pytest.approx(0.1 / (1.0 + 0.5**2))
    assert predicted(LEFT[:1], APART[:1, :1], np.full(1, 40.0)) == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("run", range(3))
def test_each_run_is_checked_against_the_others(run: int) -> None:
    others = [n for n in range(3) if n != run]
    mean = predicted(LEFT[others], APART[np.ix_(others, others)], APART[run, others])
    assert weights(LEFT, APART, PRIOR)[1][run] == pytest.approx(LEFT[run] - mean)


def test_a_run_without_a_step_time_counts_for_nothing() -> None:
    found, alone = weights(np.array([0.1, math.nan, -0.2]), APART, PRIOR)
    few = np.ix_([0, 2], [0, 2])
    assert found[1] == 0.0
    assert math.isnan(alone[1])
    assert found[[0, 2]] == pytest.approx(weights(LEFT[[0, 2]], APART[few], PRIOR)[0])
    assert not weights(np.full(3, math.nan), APART, PRIOR)[0].any()
