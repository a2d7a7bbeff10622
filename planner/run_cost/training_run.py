"""A whole training run: its days, accelerator hours, dollars and joules; or what a budget buys.

steps     = ceil(tokens / tokens of a step)
seconds   = steps x seconds of a step
hours     = seconds x accelerators / 3600
dollars   = hours x price          joules = seconds x accelerators x watts
CO2       = joules x grams of a kilowatt hour
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.software.failures import FailureProfile, parse_failures
from planner.run_cost.prices import HOUR, Tariff

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


@dataclass(frozen=True, slots=True)
class RunRequest:
    """How much is trained, and within what; None: not said."""

    tokens: float | None = None
    budget: float | None = None  # dollars
    days: float | None = None
    carbon: float | None = None  # grams of CO2 a kilowatt hour
    failures: FailureProfile | None = None  # None: as published

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to say about it."""
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
    """Read a number with a suffix; 0 for what is none."""
    match = _AMOUNT.match(text.strip())
    scale = None if match is None else SUFFIXES.get(match["suffix"].lower())
    if match is None or scale is None:
        return 0.0
    return float(match["number"].replace(",", "").replace("_", "")) * scale


def job_of(
    tokens: str | float | None,
    budget: str | float | None,
    days: str | float | None,
    carbon: str | float | None = None,
    failures: str | None = None,
) -> RunRequest:
    """Read what is asked of a whole run."""
    about = {"--carbon": carbon, "--failures": failures}
    alone = [name for name, value in about.items() if value is not None]
    if alone and tokens is None and budget is None and days is None:
        raise InputError(f"{', '.join(alone)}: about a whole run, which needs --tokens 300B")
    return RunRequest(
        parse_amount("--tokens", tokens, MOST_TOKENS),
        parse_amount("--budget", budget, MOST_DOLLARS),
        parse_amount("--days", days, MOST_DAYS),
        parse_amount("--carbon", carbon, MOST_GRAMS),
        parse_failures(failures),
    )


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step of a plan takes."""

    seconds: float
    tokens: int
    num_gpus: int
    tariff: Tariff

    @property
    def dollars(self) -> float | None:
        """Dollars of a step."""
        price = self.tariff.dollars_per_hour
        return None if price is None else self.seconds * self.num_gpus / HOUR * price

    @property
    def joules(self) -> float | None:
        """Joules of a step."""
        watts = self.tariff.watts
        return None if watts is None else self.seconds * self.num_gpus * watts

    def per_token(self, objective: str) -> float | None:
        """Return seconds, dollars or joules of a token."""
        value = {"time": self.seconds, "cost": self.dollars, "energy": self.joules}[objective]
        return None if value is None else value / self.tokens


def affordable_tokens(job: RunRequest, step: StepCost, progress: float = 1.0) -> float | None:
    """Return the tokens of the steps that budget and days allow; None where neither is given.

    ``progress``: the share of the time that goes into steps that count.
    """
    limits = []
    if job.budget is not None and step.dollars is not None:
        limits.append(job.budget / step.dollars)
    if job.days is not None:
        limits.append(job.days * DAY / step.seconds)
    return None if not limits else float(math.floor(min(limits) * progress) * step.tokens)


def job_document(job: RunRequest, step: StepCost, progress: float = 1.0) -> dict[str, Any] | None:
    """Return what the run takes, as plain JSON values; None where nothing of it is known.

    Without tokens: those that budget and days allow, failures and checkpoints counted
    (``progress``).
    """
    tokens = job.tokens if job.tokens is not None else affordable_tokens(job, step, progress)
    if tokens is None:
        return None
    steps = math.ceil(tokens / step.tokens)
    seconds = steps * step.seconds
    hours = seconds * step.num_gpus / HOUR
    dollars = None if step.dollars is None else steps * step.dollars
    joules = None if step.joules is None else steps * step.joules
    grams = None if job.carbon is None or joules is None else joules / KILOWATT_HOUR * job.carbon
    over_budget = job.budget is not None and dollars is not None and dollars > job.budget
    over_time = job.days is not None and seconds > job.days * DAY
    return {
        "tokens": tokens,
        "steps": steps,
        "seconds": seconds,
        "gpu_hours": hours,
        "dollars": dollars,
        "joules": joules,
        "co2_kg": None if grams is None else grams / 1e3,
        "within_budget": None if job.budget is None or dollars is None else not over_budget,
        "within_days": None if job.days is None else not over_time,
    }
