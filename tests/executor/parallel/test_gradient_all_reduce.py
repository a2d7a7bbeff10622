"""Gradients of replicas, added up where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from executor.ops.deferred_weight_gradients import DeferredGradient
from executor.parallel import gradient_all_reduce as gradient_sums
from executor.parallel.gradient_all_reduce import GradientBucket, GradientReducer
from tests.executor.tiny import assert_equal, tiny, verified

PLAN = Plan(2, num_microbatches=2)


class Started:
    """What stands for torch.distributed: keeps which gradients were sent, in order."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, gradient: torch.Tensor, **_: Any) -> Started:
        self.sent.append(gradient)
        return self

    def wait(self) -> None:
        """Nothing is under way."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(gradient_sums, "dist", found)
    return found


def weights(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def sums_of(*parameters: torch.nn.Parameter) -> GradientReducer:
    group: Any = None
    return GradientReducer([GradientBucket((parameter,), group) for parameter in parameters])


def test_only_the_last_pass_of_a_step_is_added_up(started: Started):
    (weight,) = weights(1)
    sums = sums_of(weight)
    for last in (False, True):
        sums.expect(last=last, complete=True)
        (3.0 * weight).sum().backward()
        assert len(started.sent) == int(last)
    assert started.sent[0].data_ptr() == weight.grad.data_ptr(), "in place"
    assert weight.grad.tolist() == [6.0, 6.0]


def test_blocks_start_in_one_order_whatever_order_gradients_come_in(started: Started):
    first, second = weights(2)
    sums = sums_of(first, second)
    sums.expect(last=True, complete=True)
    second.sum().backward()
    assert started.sent == [], "the first block is still missing"
    first.sum().backward()
    assert [g.data_ptr() for g in started.sent] == [first.grad.data_ptr(), second.grad.data_ptr()]


def test_what_no_gradient_reached_takes_part_with_zeros(started: Started):
    first, second = weights(2)
    sums = sums_of(first, second)
    sums.expect(last=True, complete=True)
    second.sum().backward()
    sums.finish()
    assert [g.tolist() for g in started.sent] == [[0.0, 0.0], [1.0, 1.0]]
    sums.finish()
    assert len(started.sent) == 2, "each once"


def test_weight_gradients_that_come_later_start_block_by_block(started: Started):
    first, second = weights(2)
    sums = sums_of(first, second)
    seen: list[int] = []

    def due(weight: torch.nn.Parameter) -> DeferredGradient:
        def compute() -> list[torch.Tensor]:
            seen.append(len(started.sent))
            return [torch.full_like(weight, 5.0)]

        return DeferredGradient((weight,), compute)

    sums.complete([due(second), due(first)], last=True)
    assert seen == [0, 1], "the second is computed while the first is under way"
    assert [g.tolist() for g in started.sent] == [[5.0, 5.0]] * 2


def test_a_block_is_one_message_whose_memory_stays(started: Started):
    first, second = weights(2)
    group: Any = None
    sums = GradientReducer([GradientBucket((first, second), group)])
    (buffer,) = sums.buffers()
    for step in range(2):
        sums.expect(last=True, complete=True)
        (2.0 * second).sum().backward()
        sums.finish()
        assert buffer.tolist() == [0.0, 0.0, 2.0, 2.0], "nothing of the step before"
        buffer.add_(1.0)  # as another rank would
        sums.wait()
        assert first.grad.tolist() == [1.0, 1.0]
        assert second.grad.tolist() == [3.0, 3.0]
        assert len(started.sent) == step + 1
        first.grad = second.grad = None
    assert all(sent is buffer for sent in started.sent)


def _never() -> None:
    GradientReducer._start = lambda sums, block: None  # type: ignore[method-assign]


def _at_every_pass() -> None:
    original = GradientReducer.expect
    GradientReducer.expect = lambda sums, *, last, complete: original(  # type: ignore[method-assign]
        sums, last=True, complete=complete
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("broken", [_never, _at_every_pass])
def test_sums_that_are_left_out_or_taken_twice_are_seen(broken: Any):
    assert_equal(verified(tiny(PLAN, num_layers=2)))
    assert not verified(tiny(PLAN, num_layers=2), broken).passed
