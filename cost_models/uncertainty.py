"""90 % intervals around predictions, relative to the prediction, from errors on published runs.

Every bound comes from the errors that the named command of this repository prints.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hardware_profiles.cluster.schema import Accelerator
from hardware_profiles.software.engine import PLUS
from hardware_profiles.software.profile import LearnedSpread
from hardware_profiles.software.trainer import OWN_FILE, software_profile

_TIME_COMMAND: Final = "python -m benchmarks.time_intervals"
Bytes = TypeVar("Bytes", float, NDArray[np.float64])
MemoryKind = Literal["allocated", "reserved", "device"]  # live tensors, allocator, whole device


class Spread(Struct, frozen=True):
    """Relative distance of a measurement below and above its prediction, and the source of both."""

    below: float
    above: float
    source: str


# By software profile, architecture, and mixture of experts or not; ANY where a row is about all:
# the interval that 90 % of the runs of a source are expected in that was not compared yet
# (python -m benchmarks.time_intervals --write)
TIME_INTERVALS: Final = Path(__file__).parent / "time_intervals.csv"
TIME_COLUMNS: Final = ("software", "architecture", "experts", "below", "above", "runs", "sources")
ANY: Final = "*"
# Factor by which a link whose bandwidth is assumed may be faster or slower: all-reduces over PCIe
# range from 0.45 to 0.65 of the link, through TCP from 0.32 to 0.6 (the sources of both in the
# catalogue's sources.toml)
ASSUMED_LINK: Final = 1.5
# The same without peer-to-peer: the memory of a host that nobody described moves 77 (four channels
# of DDR4-2400) to 410 GB/s (two sockets of eight channels of DDR4-3200), 205 assumed
ASSUMED_HOST: Final = 2.5
TIME_ON_CPU: Final = Spread(0.5, 0.5, "python -m benchmarks.here")
# 90th percentile of the traced cases: 3.1 %; the rest allows for allocator slack and library memory
# on a GPU, which a trace on a CPU does not show.
MEMORY: Final = Spread(0.08, 0.08, "python -m benchmarks.memory_truth")
_MEMORY_COMMAND: Final = "shardplan validate --memory --only"
# By software profile, or the first word of its name: the shortest interval around the prediction
# that covers 90 % of (measured / predicted - 1), each end at least 2 %, rounded up to half percents
# (python -m benchmarks.memory_intervals). Device memory, which verdicts use:
MEMORY_BY_TRAINER: Final[Mapping[str, Spread]] = {
    # wide enough for the runs that ran out of memory (upper end) or completed (lower end)
    "hf": Spread(0.09, 0.07, f"{_MEMORY_COMMAND} fms-acceleration: 90 runs, 42 out of memory"),
    "litgpt": Spread(0.07, 0.035, f"{_MEMORY_COMMAND} litgpt: 34 runs"),
    "litgpt-nf4": Spread(0.065, 0.08, f"{_MEMORY_COMMAND} litgpt: 14 runs"),
    "lit": Spread(0.03, 0.02, f"{_MEMORY_COMMAND} litgpt: 12 runs of its first release"),
    "torchtune": Spread(0.105, 0.11, f"{_MEMORY_COMMAND} torchtune: 20 runs"),
    "peft": Spread(0.05, 0.075, f"{_MEMORY_COMMAND} peft-method-comparison: 7 runs"),
    "megatron-deepspeed": Spread(0.215, 0.12, f"{_MEMORY_COMMAND} bigscience-v100: 32 runs"),
    "megatron-core": Spread(0.035, 0.085, f"{_MEMORY_COMMAND} megatron-ci: 55 runs, most tiny"),
}
# Trainers with a profile, but without compared runs; and trainers that no profile describes: the
# shortest interval around the predictions for the runs of all sources that covers 90 % of them,
# with all sources counting the same. Of the runs of a source, the interval of the other sources
# holds 94 and 86 % (python -m benchmarks.cross_validate --memory). Without a profile the upper end
# is 12 points wider: 5 of 75 runs that ran out of memory would be said to fit without that.
_LEFT_OUT: Final = "python -m benchmarks.cross_validate --memory"
MEMORY_ELSEWHERE: Final = Spread(0.16, 0.25, f"{_LEFT_OUT}: trainers with a profile")
MEMORY_UNDESCRIBED: Final = Spread(0.35, 0.45, f"{_LEFT_OUT}: trainers without a profile")
UNDESCRIBED: Final = ("torch-trainer", "torch-compile")  # profiles of any trainer on torch
# Live tensors (torch's allocated memory), where enough runs report it: no allocator overhead
ALLOCATED_BY_TRAINER: Final[Mapping[str, Spread]] = {
    "hf": Spread(0.085, 0.02, f"{_MEMORY_COMMAND} fms-acceleration: 88 runs"),
    "torchtune": Spread(0.105, 0.02, f"{_MEMORY_COMMAND} torchtune: 14 runs"),
}
# Serving: weights and cache follow from shapes (published start-up logs of vLLM agree to 0.7 %).
# Memory of kernels, graphs and libraries differs between engines and versions: published activation
# peaks agree to 8 %, but CUDA graphs alone take 0.1 to 1.7 GiB.
SERVING_EXACT: Final = Spread(0.01, 0.01, "tests/cost_models/serving/test_published_serving.py")
SERVING_REST: Final = Spread(0.5, 0.5, "tests/cost_models/serving/test_published_serving.py")
# Intervals that cover 90 % of (measured / predicted - 1): time per output token in 30 static
# batches (16 bits, A100); time to the first token of 22 prompts (A100 in 16 bits, H100 in fp8), of
# which those of 128 tokens take up to twice the prediction
SERVING_TOKEN: Final = Spread(
    0.05, 0.25, "tests/cost_models/serving/test_published_serving_time.py"
)
SERVING_PREFILL_ELSEWHERE: Final = Spread(0.5, 1.0, "wider than any compared; none was")
SERVING_PREFILL: Final = Spread(
    0.17, 0.83, "tests/cost_models/serving/test_published_serving_time.py"
)


def time_spread(software: str, accelerator: Accelerator, *, experts: bool = False) -> Spread:
    """Return the spread of step times of a trainer on an accelerator.

    ``experts``: whether the model is a mixture of experts.
    """
    if accelerator.device == "cpu":
        return TIME_ON_CPU
    if software.endswith(OWN_FILE):
        own = software_profile(software)
        usual = time_spread(own.inherits, accelerator, experts=experts)
        if own.learned is None or own.learned.accelerator != accelerator.name:
            return usual
        return _narrower(usual, own.learned.time)
    return _of_kind(compared_kind(software), accelerator.architecture, experts)


@cache
def _of_kind(software: str, architecture: str, experts: bool) -> Spread:
    """Return the interval of a kind of runs.

    Without compared runs of the kind: the geometric mean of the trainer's and the accelerator's, in
    logarithms of time, times the factor of dense models or mixtures of experts.
    """
    known = _time_intervals()
    flag = str(int(experts))
    every = known[ANY, ANY, ANY]
    if (software, architecture, flag) in known:
        return known[software, architecture, flag]
    trainer = known.get((software, ANY, ANY), every)
    accelerator = known.get((ANY, architecture, ANY), every)
    alike = known[ANY, ANY, flag]

    def combined(ends: Callable[[Spread], float]) -> float:
        return math.sqrt(ends(trainer) * ends(accelerator)) * ends(alike) / ends(every)

    below = combined(lambda spread: -math.log1p(-spread.below))
    above = combined(lambda spread: math.log1p(spread.above))
    source = f"{_TIME_COMMAND}: runs of the trainer and of the accelerator"
    return Spread(-math.expm1(-below), math.expm1(above), source)


@cache
def _time_intervals() -> Mapping[tuple[str, str, str], Spread]:
    """Return the rows of ``TIME_INTERVALS`` by profile, architecture, mixtures of experts."""
    found = {}
    with TIME_INTERVALS.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            kind = row["software"], row["architecture"], row["experts"]
            source = f"{_TIME_COMMAND}: {row['sources'] or 'all sources'}"
            found[kind] = Spread(float(row["below"]), float(row["above"]), source)
    return found


def memory_spread(software: str, kind: MemoryKind = "device") -> Spread:
    """Return the spread of peak memory of a trainer.

    That of the traced cases for the bundled executor; for other trainers that of their compared
    runs, or, without any, of the runs of all other trainers.

    ``kind``: the measured quantity; verdicts use the device's.

    >>> memory_spread("hf-trainer-foak").below
    0.09
    >>> memory_spread("hf-trainer-foak", "allocated").below
    0.085
    >>> memory_spread("xla") == MEMORY_ELSEWHERE, memory_spread("torch-trainer").below
    (True, 0.35)
    """
    if software == "shardplan":
        return MEMORY
    if software.endswith(OWN_FILE):
        own = software_profile(software)
        usual = memory_spread(own.inherits, kind)
        return usual if own.learned is None else _narrower(usual, own.learned.memory)
    if software in UNDESCRIBED or PLUS in software:
        return MEMORY_UNDESCRIBED
    first = software.split("-")[0]
    if kind == "allocated" and first in ALLOCATED_BY_TRAINER:
        return ALLOCATED_BY_TRAINER[first]
    return MEMORY_BY_TRAINER.get(software, MEMORY_BY_TRAINER.get(first, MEMORY_ELSEWHERE))


def _narrower(usual: Spread, learned: LearnedSpread | None) -> Spread:
    """Return the interval after learning, unless that of the profile without it is narrower."""
    if learned is None or usual.below + usual.above <= learned.below + learned.above:
        return usual
    return Spread(learned.below, learned.above, learned.source)


def peak_interval(peak: Bytes, typical: Bytes, spread: Spread) -> tuple[Bytes, Bytes]:
    """Return the low and high end of a peak's interval, by which a verdict is found.

    The high end is above the cautious ``peak``, whose free blocks suffice in three runs of four;
    the low end is below the ``typical`` one (``memory.allocator``). A plan fits where the high end
    is within the budget, does not fit where the low end is beyond it, and is tight in between.
    """
    return typical * (1.0 - spread.below), peak * (1.0 + spread.above)


def serving_spreads(accelerator: Accelerator) -> tuple[Spread, Spread]:
    """Return the spreads of the time to the first token and of the time per output token."""
    if accelerator.device == "cpu":
        return SERVING_PREFILL_ELSEWHERE, TIME_ON_CPU
    if accelerator.architecture in ("Ampere", "Hopper"):
        return SERVING_PREFILL, SERVING_TOKEN
    return SERVING_PREFILL_ELSEWHERE, _time_intervals()[ANY, ANY, ANY]


def compared_as(software: str) -> str:
    """Return the profile of which runs were compared: the executor's is that of eager trainers."""
    return "eager-fsdp2" if software == "shardplan" else software


def compared_kind(software: str) -> str:
    """Return the profile by which runs are grouped: without engines that take the place of its own.

    >>> compared_kind("torch-trainer+fsdp1+autocast"), compared_kind("shardplan")
    ('torch-trainer', 'eager-fsdp2')
    """
    return compared_as(software).partition(PLUS)[0]


def with_assumed_links(
    low: float, high: float, communication: float, factor: float
) -> tuple[float, float]:
    """Return an interval, wider by what links may add or save of their ``communication``.

    ``factor``: how many times slower or faster they may be.

    >>> with_assumed_links(8.0, 12.0, 3.0, 1.5)
    (7.0, 13.5)
    """
    return low - communication * (1.0 - 1.0 / factor), high + communication * (factor - 1.0)


def interval(value: float, spread: Spread) -> tuple[float, float]:
    """Return the low and high end of the interval.

    >>> interval(100.0, Spread(0.25, 0.5, ""))
    (75.0, 150.0)
    """
    return value * (1.0 - spread.below), value * (1.0 + spread.above)
