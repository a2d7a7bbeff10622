"""Versions and delays of pipelines without a flush, counted in the order of passes of 1f1b."""

import numpy as np
import pytest

from cost_models.partition.schedules import actions
from cost_models.plan.plan import Plan
from cost_models.techniques.weight_versions import (
    double_buffered_versions,
    flush_bubble,
    stashed_delay,
    stashed_versions,
    version_bytes,
)

MANY = 64  # micro-batches, most of them in the steady state


def counted(pipeline: int, rank: int, every: int, *, delayed: int = 0) -> tuple[int, set[int]]:
    """Versions kept and delays of gradients where a rank updates after ``every`` backward passes.

    ``delayed``: a forward pass of batch t reads the weights of at most update t - ``delayed``, as
    PipeDream-2BW requires of all ranks alike.
    """
    plan = Plan(pipeline_parallel=pipeline, num_microbatches=MANY)
    newest, passes, most = 0, 0, 1
    read: dict[int, int] = {}  # version that a micro-batch in flight has read
    delays = set()
    for action in actions(plan, rank):
        if action.kind == "forward":
            batch = action.microbatch // every
            read[action.microbatch] = newest if not delayed else max(0, batch - delayed)
            assert read[action.microbatch] <= newest
        else:
            version = read.pop(action.microbatch)
            passes += 1
            if passes % every == 0:
                if 2 * pipeline <= action.microbatch < MANY - every:
                    delays.add(newest - version)
                newest += 1
        most = max(most, len({newest, *read.values()}))
    return most, delays


@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_pipedream_keeps_a_version_for_each_micro_batch_in_flight(pipeline: int) -> None:
    for rank in range(pipeline):
        versions, delays = counted(pipeline, rank, 1)
        assert versions == stashed_versions(pipeline, rank)
        assert delays == {stashed_delay(pipeline, rank)}


@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_double_buffering_needs_two_versions_and_is_late_by_one(pipeline: int) -> None:
    for rank in range(pipeline):
        versions, delays = counted(pipeline, rank, pipeline, delayed=1)
        assert versions == double_buffered_versions(pipeline) == 2
        assert delays == {1}


@pytest.mark.parametrize("pipeline", [1, 2, 4, 8])
def test_versions_are_those_of_the_authors_runtime(pipeline: int) -> None:
    """Github.com/msr-fiddle/pipedream, runtime/image_classification/main_with_runtime.py.

    A version more than forward passes of the warm-up, at most 2 where several micro-batches share
    an update (--macrobatch). Versions are compared with this code alone, bytes with no source.
    """
    plan = Plan(pipeline_parallel=pipeline, num_microbatches=MANY)
    for rank in range(pipeline):
        kinds = [action.kind for action in actions(plan, rank)]
        warm_up = kinds.index("backward") - 1  # the last of these forward passes is not part of it
        assert stashed_versions(pipeline, rank) == warm_up + 1
        shared = min(2, warm_up + 1)
        assert shared <= double_buffered_versions(pipeline)
        assert rank or shared == double_buffered_versions(pipeline)


def test_without_a_pipeline_there_is_one_version() -> None:
    assert counted(1, 0, 1) == (1, {0})
    assert stashed_versions(1, 0) == double_buffered_versions(1) == 1


def test_bytes_and_bubble_broadcast() -> None:
    ranks = np.arange(4)
    extra = version_bytes(1e9, 2.0, stashed_versions(4, ranks))
    assert extra.tolist() == [6e9, 4e9, 2e9, 0.0]
    assert extra.sum() == 4 * 3 / 2 * 2.0 * 1e9  # p (p - 1)/2 c N / p
    assert flush_bubble(np.array([1, 4]), 8).tolist() == [0.0, 0.375]
