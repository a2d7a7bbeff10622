"""Verdicts of plans of every trainer, drawn at random."""

from hypothesis import given
from hypothesis import strategies as st

from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from planner.assessment.assess import assess
from tests.drawn_plans import SETTINGS, asked
from tests.samples import with_memory

VERDICTS = ("fits", "tight", "does_not_fit")


@SETTINGS
@given(asked(), st.lists(st.floats(0.3, 3.0), min_size=2, max_size=2))
def test_more_memory_never_lowers_the_verdict_of_a_plan(
    case: tuple[Scenario, Plan], shares: list[float]
) -> None:
    scenario, plan = case
    peak = assess(scenario, plan).memory.peak_bytes
    found = [
        VERDICTS.index(assess(with_memory(scenario, peak * share), plan).verdict)
        for share in sorted(shares)
    ]
    assert found == sorted(found, reverse=True)
