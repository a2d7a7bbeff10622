from typing import Any

import pytest

from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from planner.run_cost.prices import Prices, accelerator_cost, parse_prices, require_known


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Prices()),
        ("2.5", Prices(2.5)),
        ("$2.5", Prices(2.5)),
        (3, Prices(3.0)),
        ("L40S=0.9", Prices(None, (("L40S", 0.9),))),
        ("A100=2", Prices(None, (("A100-SXM-80GB", 2.0),))),
        ("4, l40s=0.9", Prices(4.0, (("L40S", 0.9),))),
    ],
)
def test_prices_are_read(given: Any, expected: Prices) -> None:
    assert parse_prices(given) == expected


@pytest.mark.parametrize(
    "given", ["0", "-1", "two", "nan", "inf", "1e9", "V100=2", "L4OS=2", "=2", "L40S=", "1,2"]
)
def test_a_bad_price_is_one_line(given: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_prices(given)
    assert "\n" not in str(caught.value)


def test_what_the_user_says_comes_before_the_profile() -> None:
    cluster = parse_cluster("8xH100-SXM")
    known = accelerator_cost(cluster)
    price = cluster.accelerator.price
    assert price is not None
    assert known.dollars_per_hour == price.value
    assert price.source in known.notes[0]
    given = accelerator_cost(cluster, parse_prices("1.25"))
    assert given.dollars_per_hour == 1.25
    assert "given" in given.notes[0]
    assert given.watts == known.watts == 700


def test_what_nobody_published_is_unknown_and_says_what_helps() -> None:
    cluster = parse_cluster("8xV100-SXM2-32GB")
    assert accelerator_cost(cluster).dollars_per_hour is None
    with pytest.raises(InputError, match=r"--price V100-SXM2-32GB=2\.50"):
        require_known([cluster], Prices(), what="cost")
    require_known([cluster], Prices(1.0), what="cost")
