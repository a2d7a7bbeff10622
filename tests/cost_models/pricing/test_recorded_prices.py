"""No price changes unnoticed: plans under every trainer cost as their file says."""

import pytest

from hardware_profiles.software.trainer import profile_names
from tests.cost_models.pricing.recorded_prices import ASKED, priced, recorded

AGAIN = "python -m tests.cost_models.pricing.recorded_prices --write"


def test_prices_are_those_on_file() -> None:
    rows, moved = recorded(), []
    for row, new in zip(rows, priced(rows), strict=True):
        asked = ", ".join(row[name] for name in (*ASKED, "plan"))
        moved += [
            f"{asked}: {name} {row[name]} -> {new[name]}"
            for name in new.keys() - {*ASKED, "plan"}
            if float(new[name]) != pytest.approx(float(row[name]), rel=1e-6, abs=1e-9)
        ]
    assert not moved, f"{len(moved)} moved, first {moved[0]}; if they should: {AGAIN}"


def test_the_file_has_plans_of_nearly_every_trainer() -> None:
    known = {row["software"] for row in recorded()}
    assert known <= set(profile_names())
    # a trainer of one GPU or of other precisions may have none of the questions
    assert len(known) >= 0.9 * len(profile_names())
