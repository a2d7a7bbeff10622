"""Learning-rate schedules: known curves, the shape of each, and settings that make no sense."""

import math

import pytest
import torch

from executor.config.learning_rate import LearningRate
from hardware_profiles.errors import InputError


def _rates(rate, steps):
    return [rate.at(step) for step in range(steps)]


def test_a_constant_rate_warms_up():
    rate = LearningRate(2.0, warmup_steps=4)
    assert _rates(rate, 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert LearningRate(2.0).at(10**9) == 2.0


def test_cosine_is_that_of_torch():
    rate = LearningRate(0.3, "cosine", steps=25, warmup_steps=5, min_ratio=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.03)
    for step in range(5, 25):
        assert rate.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        theirs.step()
    assert rate.at(25) == rate.at(1000) == pytest.approx(0.03)


def test_a_decay_may_end_before_the_run():
    rate = LearningRate(1.0, "linear", steps=10, decay_steps=4, min_ratio=0.2)
    assert _rates(rate, 6) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    rate = LearningRate(1.0, "cosine", steps=10, decay_steps=4)
    assert rate.at(2) == pytest.approx((1 + math.cos(math.pi / 2)) / 2)


def test_wsd_is_constant_and_falls_at_the_end():
    rate = LearningRate(1.0, "wsd", steps=100, warmup_steps=10)
    assert rate.at(9) == rate.at(50) == rate.at(90) == 1.0
    assert rate.at(95) == pytest.approx(0.5)
    assert rate.at(100) == 0.0
    longer = LearningRate(1.0, "wsd", steps=100, warmup_steps=10, decay_steps=50)
    assert longer.at(50) == 1.0
    assert longer.at(75) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "constant", "decay_steps": 5}, "does not decay"),
        ({"schedule": "cosine", "warmup_steps": 20}, "leaves none of the 20 steps"),
        ({"schedule": "wsd", "warmup_steps": 11, "decay_steps": 10}, "more than the 20 steps"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        LearningRate(1.0, steps=20, **options)
