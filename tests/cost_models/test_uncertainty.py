"""Intervals: whoever describes less gets none that is narrower; profiles composed of engines."""

from itertools import product
from pathlib import Path
from statistics import median
from typing import get_args

import pytest

from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.uncertainty import (
    MEMORY,
    UNKNOWN,
    MemoryKind,
    Spread,
    compared_kind,
    memory_kind,
    memory_spread,
    peak_interval,
    peak_was_compared,
    verdict_spread,
)
from hardware_profiles.software.trainer import software_names
from tests.samples import make_scenario

MEASURED = [*product(get_args(MemoryKind), (False, True))]


def _both(name: str, kind: MemoryKind, assumed: bool) -> tuple[Spread, Spread]:
    """Return the intervals of a peak and of a verdict."""
    return memory_spread(name, kind, assumed=assumed), verdict_spread(name, assumed=assumed)


@pytest.mark.parametrize(("kind", "assumed"), MEASURED)
def test_a_trainer_without_compared_peaks_has_no_narrow_interval(
    kind: MemoryKind, assumed: bool
) -> None:
    """At least as wide as the middle one of the trainers that were compared, whoever it is."""
    names = {memory_kind(name): name for name in software_names() if name != "shardplan"}
    spreads = {each: memory_spread(name, kind, assumed=assumed) for each, name in names.items()}
    compared = [spread for each, spread in spreads.items() if peak_was_compared(names[each])]
    others = {spreads[each] for each in spreads if not peak_was_compared(names[each])}
    assert others == {memory_spread("nobody's", kind, assumed=assumed)}
    assert others.pop().above >= median(spread.above for spread in compared)


def test_the_ends_lie_around_the_typical_and_the_cautious_peak() -> None:
    for name in (*software_names(), UNKNOWN):
        spread, verdict = memory_spread(name), verdict_spread(name)
        low, high = peak_interval(100.0, 90.0, spread)
        assert low == pytest.approx(90.0 - 90.0 * spread.below)
        assert high == pytest.approx(100.0 + 100.0 * spread.above)
        assert verdict.below <= spread.below
        assert verdict.above <= spread.above


@pytest.mark.parametrize("engine", ["node-dispatch", "all-to-all-dispatch"])
def test_an_engine_that_changes_times_alone_keeps_the_interval_of_peaks(engine: str) -> None:
    """A wider one would refuse plans that fit, so that a faster dispatch made steps longer."""
    name = f"shardplan+{engine}"
    assert verdict_spread(name) == MEMORY
    plan = PlanTable.from_plans([Plan(data_parallel=8, expert_parallel=8, zero_stage=1)])
    peaks = {
        float(
            price(
                make_scenario("mixtral-8x7b", "8xH100-SXM", global_batch_size=8, software=software),
                plan,
            ).peak[0]
        )
        for software in ("shardplan", name)
    }
    assert len(peaks) == 1
    assert verdict_spread("shardplan+autocast") != MEMORY
    assert compared_kind(name) == compared_kind("shardplan")


@pytest.mark.parametrize("runs", [0, 2, 3])
def test_a_few_runs_do_not_widen_an_interval_and_three_do(tmp_path: Path, runs: int) -> None:
    """Three runs that no mechanism explains count more than what other runs of the trainer say."""
    file = tmp_path / "mine.toml"
    file.write_text(
        f"""inherits = "torchtune"
        [learned]
        runs = 3
        accelerator = "H100-SXM-80GB"
        memory = {{ below = 0.6, above = 3.0, source = "a test", runs = {runs} }}
        """
    )
    found, verdict = memory_spread(str(file)), verdict_spread(str(file))
    if runs < 3:
        assert (found, verdict) == (memory_spread("torchtune"), verdict_spread("torchtune"))
    else:
        assert found.above == 3.0
        assert 1.5 < verdict.above < 3.0
