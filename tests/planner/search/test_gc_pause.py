"""While much is priced the collector of cycles waits, and nothing waits for it."""

import gc
from collections.abc import Iterator

import pytest

from cost_models.columnar.projections import Frame
from cost_models.pricing.table import price_table
from hardware_profiles.cluster.parse import parse_cluster
from planner.request.model import resolve_model
from planner.request.scenario import build_scenario
from planner.search.candidates import Candidates
from planner.search.gc_pause import OBJECTS, fewer_collections


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_as_before_after_an_error(thresholds: None) -> None:
    gc.set_threshold(700, 11, 12)

    @fewer_collections()
    def fails() -> None:
        assert gc.get_threshold() == (OBJECTS, 11, 12)
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("youngest", [0, 10 * OBJECTS])
def test_whoever_collects_less_keeps_that(thresholds: None, youngest: int) -> None:
    gc.set_threshold(youngest, 11, 12)
    with fewer_collections():
        assert gc.get_threshold() == (youngest, 11, 12)


@pytest.mark.slow
def test_what_pricing_made_goes_without_the_collector() -> None:
    scenario = build_scenario(resolve_model("llama-3-8b"), parse_cluster("4x8xH100-SXM")).scenario
    gc.collect()
    before = {id(frame) for frame in _frames()}  # (other tests' results may be kept)
    gc.disable()
    try:
        legal = Candidates.of(scenario, {}).legal
        assert len(legal) > 1000
        price_table(scenario, legal)
        assert {id(frame) for frame in _frames()} <= before
    finally:
        gc.enable()


def _frames() -> list[Frame]:
    # (isinstance asks objects for their class: torch has one that warns then)
    return [each for each in gc.get_objects() if type(each) is Frame]
