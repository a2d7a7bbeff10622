"""Cost of a training run: days, accelerator hours, dollars, joules; or tokens for a budget.

steps     = ceil(tokens / tokens of a step)
seconds   = steps x seconds of a step
hours     = seconds x accelerators / 3600
dollars   = hours x price          joules = seconds x accelerators x watts
CO2       = joules x grams of a kilowatt hour
"""

from __future__ import annotations

import math
import re
from typing import Final

from msgspec import Struct

from hardware_profiles.errors import InputError
from hardware_profiles.record import Record
from hardware_profiles.software.failures import FailureProfile, parse_failures
from planner.run_cost.prices import HOUR, AcceleratorCost

DAY: Final = 24 * HOUR
MOST_TOKENS: Final = 1e18
MOST_DOLLARS: Final = 1e15
MOST_DAYS: Final = 1e6
MOST_GRAMS: Final = 1e5  # of CO2 a kilowatt hour
KILOWATT_HOUR: Final = 3.6e6  # joules
SUFFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_AMOUNT: Final = re.compile(
    r"^\$?(?P<number>[0-9][0-9_,]*\.?[0-9]*(?:e\+?[0-9]{1,3})?)\s*(?P<suffix>[a-z]?)$", re.I
)


class RunRequest(Struct, frozen=True):
    """Requested tokens and limits of a training run; None: not given."""

    tokens: float | None = None
    budget: float | None = None  # dollars
    days: float | None = None
    carbon: float | None = None  # grams of CO2 a kilowatt hour
    failures: FailureProfile | None = None  # None: published values

    @property
    def is_given(self) -> bool:
        """Whether tokens or a limit are given."""
        return not (self.tokens is None and self.budget is None and self.days is None)


def parse_amount(option: str, given: str | float | None, highest: float) -> float | None:
    """Read an amount above 0 such as ``5000``, ``1.5T`` or ``300B``.

    >>> parse_amount("--tokens", "1.5T", 1e18)
    1500000000000.0
    """
    if given is None:
        return None
    value = _number(given) if isinstance(given, str) else float(given)
    if not 0.0 < value <= highest:
        raise InputError(
            f"{option} {str(given)[:40]!r}: must be a number above 0 and at most {highest:g}, such "
            "as 5000, 300B or 1.5T"
        )
    return value


def _number(text: str) -> float:
    """Read a number with a suffix; 0 for invalid text."""
    match = _AMOUNT.match(text.strip())
    scale = None if match is None else SUFFIXES.get(match["suffix"].lower())
    if match is None or scale is None:
        return 0.0
    return float(match["number"].replace(",", "").replace("_", "")) * scale


def parse_run_request(
    tokens: str | float | None,
    budget: str | float | None,
    days: str | float | None,
    carbon: str | float | None = None,
    failures: str | None = None,
) -> RunRequest:
    """Read the options of a training run."""
    about = {"--carbon": carbon, "--failures": failures}
    alone = [name for name, value in about.items() if value is not None]
    if alone and tokens is None and budget is None and days is None:
        raise InputError(f"{', '.join(alone)}: needs --tokens, such as --tokens 300B")
    return RunRequest(
        parse_amount("--tokens", tokens, MOST_TOKENS),
        parse_amount("--budget", budget, MOST_DOLLARS),
        parse_amount("--days", days, MOST_DAYS),
        parse_amount("--carbon", carbon, MOST_GRAMS),
        parse_failures(failures),
    )


class StepCost(Struct, frozen=True):
    """Time and cost of one step of a plan."""

    seconds: float
    tokens: int
    num_gpus: int
    accelerator_cost: AcceleratorCost

    @property
    def dollars(self) -> float | None:
        """Dollars of a step."""
        price = self.accelerator_cost.dollars_per_hour
        return None if price is None else self.seconds * self.num_gpus / HOUR * price

    @property
    def joules(self) -> float | None:
        """Joules of a step."""
        watts = self.accelerator_cost.watts
        return None if watts is None else self.seconds * self.num_gpus * watts

    def per_token(self, objective: str) -> float | None:
        """Return seconds, dollars or joules of a token."""
        value = {"time": self.seconds, "cost": self.dollars, "energy": self.joules}[objective]
        return None if value is None else value / self.tokens


def affordable_tokens(request: RunRequest, step: StepCost, progress: float = 1.0) -> float | None:
    """Return the tokens that budget and days allow; None if neither is given.

    ``progress``: goodput, the share of the time that is progress.
    """
    limits = []
    if request.budget is not None and step.dollars is not None:
        limits.append(request.budget / step.dollars)
    if request.days is not None:
        limits.append(request.days * DAY / step.seconds)
    return None if not limits else float(math.floor(min(limits) * progress) * step.tokens)


class RunCost(Record, frozen=True):
    """Size, time and cost of a training run without failures; None: unknown or not limited."""

    tokens: float
    steps: int
    seconds: float
    gpu_hours: float
    dollars: float | None
    joules: float | None
    co2_kg: float | None
    within_budget: bool | None
    within_days: bool | None


def cost_of_run(request: RunRequest, step: StepCost, progress: float = 1.0) -> RunCost | None:
    """Return time and cost of a training run; None without tokens and limits.

    Without tokens: the tokens that budget and days allow with a goodput of ``progress``.
    """
    tokens = (
        request.tokens if request.tokens is not None else affordable_tokens(request, step, progress)
    )
    if tokens is None:
        return None
    steps = math.ceil(tokens / step.tokens)
    seconds = steps * step.seconds
    hours = seconds * step.num_gpus / HOUR
    dollars = None if step.dollars is None else steps * step.dollars
    joules = None if step.joules is None else steps * step.joules
    grams = (
        None
        if request.carbon is None or joules is None
        else joules / KILOWATT_HOUR * request.carbon
    )
    over_budget = request.budget is not None and dollars is not None and dollars > request.budget
    over_time = request.days is not None and seconds > request.days * DAY
    return RunCost(
        tokens=tokens,
        steps=steps,
        seconds=seconds,
        gpu_hours=hours,
        dollars=dollars,
        joules=joules,
        co2_kg=None if grams is None else grams / 1e3,
        within_budget=None if request.budget is None or dollars is None else not over_budget,
        within_days=None if request.days is None else not over_time,
    )
