"""Price and power of an accelerator: dollars an hour and watts, with their sources.

The user's price (``--price``) comes first, then the hardware profile; without either it is unknown,
and answers that need it report an error.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from hardware_profiles.cluster.catalogue import match_accelerator
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError

HOUR: Final = 3600.0
MOST_DOLLARS: Final = 1e6  # an hour of one accelerator
ABOUT_COST: Final = "all accelerators of a plan are paid for, from the first step to the last"
ABOUT_ENERGY: Final = (
    "energy at the boards' power limits: every accelerator draws it all the time; without hosts, "
    "network and cooling"
)


class AcceleratorCost(Struct, frozen=True):
    """Price and power of one accelerator; None: unknown."""

    dollars_per_hour: float | None
    watts: float | None
    notes: tuple[str, ...]  # sources


class Prices(Struct, frozen=True):
    """Dollars an hour of one accelerator as given by the user: for all, or by name."""

    every: float | None = None
    by_name: tuple[tuple[str, float], ...] = ()

    def of(self, accelerator: str) -> float | None:
        """Return the given price; None without one."""
        return dict(self.by_name).get(accelerator, self.every)


def parse_prices(given: str | float | None) -> Prices:
    """Read ``2.5`` or ``H100-SXM-80GB=3,L40S=0.9`` (dollars an hour of one accelerator).

    >>> parse_prices("h100-sxm-80gb=3, L40S=0.9").of("L40S")
    0.9
    >>> parse_prices(2).of("L40S")
    2.0
    """
    if given is None:
        return Prices()
    every: float | None = None
    by_name: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in str(given).split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        dollars = _dollars(value if equals else name, item)
        if equals:
            by_name[match_accelerator(name).entry.name] = dollars
        elif every is not None:
            raise InputError(f"--price {str(given)[:60]!r}: two prices for every accelerator")
        else:
            every = dollars
    return Prices(every, tuple(by_name.items()))


def _dollars(text: str, item: str) -> float:
    try:
        value = float(text.lstrip("$"))
    except ValueError:
        value = -1.0
    if not 0.0 < value <= MOST_DOLLARS:
        raise InputError(
            f"--price {item[:60]!r}: must be dollars an hour of one accelerator, above 0 and at "
            f"most {MOST_DOLLARS:,.0f}, or NAME=DOLLARS for each"
        )
    return value


def accelerator_cost(cluster: Cluster, prices: Prices | None = None) -> AcceleratorCost:
    """Return price and power of a cluster's accelerators."""
    accelerator = cluster.accelerator
    own = (prices or Prices()).of(accelerator.name)
    notes = []
    dollars = own
    if own is not None:
        notes.append(f"{accelerator.name} ${own:g} an hour (given)")
    elif accelerator.price is not None:
        dollars = accelerator.price.value
        price = accelerator.price
        notes.append(f"{accelerator.name} ${dollars:g} an hour ({price.kind}: {price.source})")
    watts = None if accelerator.watts is None else accelerator.watts.value
    return AcceleratorCost(dollars, watts, tuple(notes))


def require_known(clusters: list[Cluster], prices: Prices, *, what: str) -> None:
    """Raise an InputError if a price (``what`` "cost") or power ("energy") is unknown."""
    for cluster in clusters:
        known = accelerator_cost(cluster, prices)
        name = cluster.accelerator.name
        if what == "cost" and known.dollars_per_hour is None:
            raise InputError(
                f"{cluster.name}: no price of {name} is known; give dollars an hour of one "
                f"accelerator with --price 2.50, or --price {name}=2.50"
            )
        if what == "energy" and known.watts is None:
            raise InputError(
                f"{cluster.name}: the power of {name} is not known; set power in the accelerator "
                "of a cluster's file"
            )
