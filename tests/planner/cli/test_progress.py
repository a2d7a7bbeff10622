"""Long answers tell the share that is done, from which the status line takes the time left."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import planner
from hardware_profiles.progress import Activity, passed_to

SMALL = ("gpt2", "2xA100-80GB")


def phases_of(ask: Callable[[], Any]) -> list[list[Activity]]:
    """Return what is reported meanwhile, phase by phase."""
    seen: list[Activity] = []
    with passed_to(seen.append):
        ask()
    found: dict[int, list[Activity]] = {}
    for one in seen:
        found.setdefault(one.phase, []).append(one)
    return list(found.values())


def shares(phase: list[Activity]) -> list[float]:
    return [one.share for one in phase if one.share is not None]


def test_a_whole_explanation_has_one_share() -> None:
    answer = planner.plan(*SMALL, fix="pp=2")
    (phase,) = phases_of(lambda: planner.explain(answer, why_not=("tp=2",)))
    found = shares(phase)
    assert len(found) == len(phase)
    assert found[0] == 0.0
    assert max(found) >= 0.9
    assert len(set(found)) > 15
    # nothing but a search that begins anew within its part tells less than before
    assert sum(b < a for a, b in pairwise(found)) <= len(found) / 10


def test_ways_out_have_one_share() -> None:
    *_, phase = phases_of(lambda: planner.fit("llama-3-70b", "8xA100-80GB").ways_out)
    assert any("pricing ways out" in one.text for one in phase)
    found = shares(phase)
    assert len(found) == len(phase)
    assert max(found) >= 0.9


def test_compared_techniques_have_one_share() -> None:
    *_, phase = phases_of(lambda: planner.compare_techniques(*SMALL))
    found = shares(phase)
    assert len(found) == len(phase)
    assert max(found) >= 0.9


def test_the_choice_of_stages_tells_its_share() -> None:
    phases = phases_of(lambda: planner.plan("llama-2-13b", "2x8xA100-80GB", fix="pp=4"))
    words = "choosing stages of "
    phase, *_ = [each for each in phases if any(one.text.startswith(words) for one in each)]
    assert len(set(shares(phase))) > 3
