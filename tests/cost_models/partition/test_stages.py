from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cost_models.partition.in_flight import (
    in_flight_1f1b,
    in_flight_gpipe,
    in_flight_interleaved,
    in_flight_peaks,
)
from cost_models.partition.schedules import V_SHAPED, Action, actions
from cost_models.partition.stages import (
    distinct_rank_contents,
    even_split_contents,
)
from cost_models.plan.plan import Plan, PlanTable, split_layers
from hardware_profiles.errors import InputError
from tests.cost_models.step_time.pipeline_simulator import (
    makespan,
    most_in_flight,
    torch_order,
)
from tests.samples import bubble_fraction, llama, sample_model

# every pipeline and number of micro-batches that torch's schedules take
PIPELINES = [(p, m) for p in range(2, 9) for m in range(p, 25)]
INTERLEAVED = [
    (p, v, m)
    for p in range(2, 7)
    for v in range(2, 5)
    for m in range(1, 25)
    if m % max(1, m // p) == 0
]


@given(st.data(), st.integers(1, 300))
def test_split_covers_every_layer_once_as_evenly_as_possible(data, num_layers: int) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    ranges = split_layers(num_layers, num_stages)
    assert len(ranges) == num_stages
    assert [i for first, last in ranges for i in range(first, last)] == list(range(num_layers))
    sizes = [last - first for first, last in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert all(type(n) is int for pair in ranges for n in pair)


@given(st.data(), st.integers(3, 60))
def test_left_over_layers_go_to_the_middle(data, num_layers: int) -> None:
    num_stages = data.draw(st.integers(3, num_layers))
    sizes = [last - first for first, last in split_layers(num_layers, num_stages)]
    assert sizes[-1] == min(sizes)
    if num_layers % num_stages <= num_stages - 2:
        assert sizes[0] == min(sizes)


@pytest.mark.parametrize("num_stages", [0, -1, 7])
def test_stages_beyond_layers_embedding_and_head_are_refused(num_stages: int) -> None:
    with pytest.raises(InputError, match="must be 1 to 6"):
        split_layers(4, num_stages)


@pytest.mark.parametrize("model_name", ["llama", "gemma-2-2b", "deepseek-v2-lite"])
@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (4, 2)])
def test_rank_contents_equal_a_walk_over_the_layers(
    model_name: str, pipeline: int, virtual: int
) -> None:
    model = sample_model(model_name)
    ranges = split_layers(model.num_layers, pipeline * virtual)
    counted = []
    for rank in range(pipeline):
        counts = [0] * len(model.kinds)
        for stage, (first, last) in enumerate(ranges):
            if stage % pipeline == rank:
                for layer in range(first, last):
                    counts[model.pattern[layer]] += 1
        counted.append((tuple(counts), rank == 0, rank == pipeline - 1))
    found = distinct_rank_contents(model, ranges, pipeline)
    assert found == list(even_split_contents(model, pipeline, virtual))
    assert sum(rank.multiplicity for rank in found) == pipeline
    for rank in found:
        contents = (rank.kind_counts, rank.first, rank.last)
        assert counted[rank.index] == contents
        assert counted.index(contents) == rank.index  # the first of its kind
    # every rank's contents are represented, as often as they occur
    for contents in set(counted):
        same = [r for r in found if (r.kind_counts, r.first, r.last) == contents]
        assert sum(r.multiplicity for r in same) == counted.count(contents)


def test_uneven_layer_ranges_are_taken_as_given() -> None:
    contents = distinct_rank_contents(llama(), [(0, 1), (1, 2), (2, 8)], 3)
    assert [rank.kind_counts for rank in contents] == [(1,), (1,), (6,)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_micro_batches_in_flight_are_those_of_torch(schedule: str) -> None:
    for p, m in PIPELINES:
        for rank, order in enumerate(torch_order(schedule, p, 1, m)):
            ours = in_flight_1f1b(m, p, rank) if schedule == "1f1b" else in_flight_gpipe(m)
            assert most_in_flight(order) == float(ours), (p, m, rank)


def test_interleaved_stages_in_flight_are_those_of_torch() -> None:
    for p, v, m in INTERLEAVED:
        for rank, order in enumerate(torch_order("interleaved_1f1b", p, v, m)):
            ours = float(in_flight_interleaved(m, p, v, rank))
            assert most_in_flight(order) == ours, (p, v, m, rank)


def test_bubble_is_that_of_the_simulated_schedules() -> None:
    """Equal stages that take 1 second forward and 2 backward."""
    for p, m in PIPELINES:
        expected = 3 * m * (1 + float(bubble_fraction(m, p, 1)))
        for schedule in ("1f1b", "gpipe"):
            simulated = makespan(torch_order(schedule, p, 1, m), [1.0] * p, [2.0] * p)
            assert simulated == pytest.approx(expected, rel=1e-12), (schedule, p, m)
    for p, v, m in INTERLEAVED:
        if m % p == 0:  # what legality asks for
            order = torch_order("interleaved_1f1b", p, v, m)
            simulated = makespan(order, [1.0] * (p * v), [2.0] * (p * v))
            expected = 3 * v * m * (1 + float(bubble_fraction(m, p, v)))
            assert simulated == pytest.approx(expected, rel=1e-12), (p, v, m)


def test_in_flight_takes_columns() -> None:
    microbatches, pipeline = np.array([16, 2]), np.array([4, 4])
    assert in_flight_1f1b(microbatches, pipeline, 1).tolist() == [3, 2]
    assert in_flight_interleaved(microbatches, pipeline, np.array([2, 2]), 0).tolist() == [11, 4]


SPLIT_PIPELINES = [
    (schedule, p, v, m)
    for schedule, virtual in (
        ("zero_bubble", (1,)),
        ("interleaved_zero_bubble", (2, 3)),
        ("zbv", (2,)),
        ("dualpipev", (2,)),
    )
    for p in range(2, 7)
    for v in virtual
    for m in {"zbv": range(2 * p - 1, 20), "dualpipev": range(2 * p, 20)}.get(
        schedule, range(p, 20, p if v > 1 else 1)
    )
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("due", [0.0, 0.3, 1.0, 1.7, 12.0])
def test_the_fullest_moment_is_that_of_the_order(due: float) -> None:
    """Whatever a stage keeps for its weight gradients, in units of what it keeps in flight."""
    for schedule, p, v, m in SPLIT_PIPELINES:
        plan = Plan(1, 1, p, v, schedule, num_microbatches=m)  # type: ignore[arg-type]
        ranks = even_split_contents(
            llama(num_hidden_layers=p * v), p, v, v_shaped=schedule in V_SHAPED
        )
        held = []
        for rank in range(p):
            (contents,) = [c for c in ranks if rank in c.positions]
            moments = in_flight_peaks(PlanTable.from_plans([plan]), replace(contents, index=rank))
            ours = max(float(f[0]) + due * float(d[0]) for f, d in moments)  # type: ignore[index]
            order = max(f + due * d for f, d in peaks_in_flight(actions(plan, rank)))
            assert ours == pytest.approx(order), (schedule, p, v, m, rank)
            held.append(order)
        # one rank stands for those with the same contents: the first or the last is the fullest
        for contents in ranks:
            same = held[contents.index : contents.positions[-1] + 1]
            assert max(same) == pytest.approx(max(same[0], same[-1]))


def peaks_in_flight(order: Sequence[Action]) -> set[tuple[int, int]]:
    """Return the maximal pairs (stage inputs in flight, weight gradients pending) of an order.

    A stage input is in flight from its forward pass to the end of its (input) backward pass.
    """
    flying = pending = 0
    seen = set()
    for action in order:
        flying += action.kind == "forward"
        seen.add((flying, pending))  # an action's inputs exist while it runs
        flying -= action.kind in ("backward", "backward_input")
        pending += (action.kind == "backward_input") - (action.kind == "backward_weight")
        seen.add((flying, pending))

    def smaller(one: tuple[int, int]) -> bool:
        return any(o != one and o[0] >= one[0] and o[1] >= one[1] for o in seen)

    return {one for one in seen if not smaller(one)}
