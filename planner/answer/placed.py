"""An order of ranks in words: what it gains, and which groups come to which links."""

from __future__ import annotations

from typing import Final

from cost_models.units import format_seconds
from planner.refinement.placement import AxisPlace, Placed
from planner.request.command import describe_plan

MOST_SHOWN: Final = 16  # ranks of an order


def placed_words(placed: Placed) -> str:
    """What an order gains and why, for the answer of ``plan``."""
    which = "the best plan" if placed.rank == 0 else describe_plan(placed.plan)
    shown = ", ".join(map(str, placed.order[:MOST_SHOWN]))
    more = f", … ({len(placed.order):,} in all)" if len(placed.order) > MOST_SHOWN else ""
    proven = "no order is better" if placed.proven else "the best of the orders that were looked at"
    return (
        f"{format_seconds(placed.step)} instead of {format_seconds(placed.usual_step)} a step "
        f"({100 * placed.gain:.1f} % less, simulated) with {which} and ranks 0, 1, 2, … on the "
        f"accelerators {shown}{more}; {'; '.join(map(_talk, placed.places))}; {proven}; that is "
        "what -o writes"
    )


def _talk(place: AxisPlace) -> str:
    """Say where the groups of an axis talk, and where they would in the usual order.

    >>> _talk(AxisPlace("tensor", 2, 1.25e9, "PCIe switch", 25e9, "UPI", 5e9))
    'tensor groups of 2 (1.25 GB a step) talk over PCIe switch, 25 GB/s, instead of UPI, 5 GB/s'
    """
    kind = "stages in lines" if place.axis == "pipeline" else f"{place.axis} groups"
    words = f"{kind} of {place.size} ({place.sent / 1e9:.3g} GB a step)"
    here = f"{place.level}, {place.bandwidth / 1e9:.3g} GB/s"
    if not place.moved:
        return f"{words} stay on {here}"
    there = f"{place.usual_level}, {place.usual_bandwidth / 1e9:.3g} GB/s"
    return f"{words} talk over {here}, instead of {there}"
