"""90 % intervals around predictions, relative to the prediction, from errors on published runs.

Every bound comes from the errors that the named command of this repository prints.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from hardware_profiles.cluster.schema import Accelerator
from hardware_profiles.software.engine import PLUS
from hardware_profiles.software.profile import LearnedSpread
from hardware_profiles.software.trainer import OWN_FILE, software_profile

Bytes = TypeVar("Bytes", float, NDArray[np.float64])
MemoryKind = Literal["allocated", "reserved", "device"]  # live tensors, allocator, whole device


class Spread(Struct, frozen=True):
    """Relative distance of a measurement below and above its prediction, and the source of both."""

    below: float
    above: float
    source: str


# By software profile, architecture, and mixture of experts or not; ANY where a row is about all:
# the interval that 90 % of the runs of a source are expected in that was not compared yet
# (python -m benchmarks.intervals.times --write)
TIME_INTERVALS: Final = Path(__file__).parent / "time_intervals.csv"
TIME_KIND: Final = ("software", "architecture", "experts")
TIME_COLUMNS: Final = (*TIME_KIND, "below", "above", "runs", "sources")
ANY: Final = "*"
# Factor by which a link whose bandwidth is assumed may be faster or slower: all-reduces over PCIe
# range from 0.45 to 0.65 of the link, through TCP from 0.32 to 0.6 (the sources of both in the
# catalogue's sources.toml)
ASSUMED_LINK: Final = 1.5
# The same without peer-to-peer: of eight hosts, seven reach a third to three times the share that
# is assumed (hardware_profiles/cluster/measured/pcie_collectives.csv)
ASSUMED_HOST: Final = 3.0
DECISIVE: Final = 3  # learned runs whose interval counts even where the profile's is narrower
# of a 90 % interval: one run in ten exceeds it on that side, where errors are normal (1.28 / 1.64)
ONE_IN_TEN: Final = 0.78
TIME_ON_CPU: Final = Spread(0.5, 0.5, "python -m benchmarks.step_time.here")
# 90th percentile of the traced cases: 3.1 %; the rest allows for allocator slack and library memory
# on a GPU, which a trace on a CPU does not show.
MEMORY: Final = Spread(0.08, 0.08, "python -m benchmarks.memory_truth")
# By trainer (first word of its software profile, or UNKNOWN), measured quantity, whether a setting
# of the run was assumed, and whether its model is a mixture of experts; ANY where a row is about
# all.
# below, above: the interval that 90 % of the runs of a source are expected in that was not compared
# yet; verdict_below, verdict_above: what one run in ten exceeds on that side (python -m
# benchmarks.intervals.peaks --write)
MEMORY_INTERVALS: Final = Path(__file__).parent / "memory_intervals.csv"
MEMORY_KIND: Final = ("software", "quantity", "assumed", "experts")
MEMORY_COLUMNS: Final = (
    *MEMORY_KIND,
    *("below", "above", "verdict_below", "verdict_above", "runs", "sources"),
)
EXECUTOR: Final = "shardplan"
# parts of a software profile that no formula of memory reads
TIME_ALONE: Final = ("name", "description", "sources", "inherits", "communication", "host")
UNKNOWN: Final = "unknown"  # a trainer that neither a profile describes nor its words
# Of a model of which only the number of parameters is known: intervals that cover 90 % of (a preset
# / a typical model of that size - 1): the 5th and the 95th percentile of the dense presets
TYPICAL_TIME: Final = Spread(0.21, 0.25, "tests/planner/validation/rows/test_typical_shapes.py")
TYPICAL_MEMORY: Final = Spread(0.23, 1.8, "tests/planner/validation/rows/test_typical_shapes.py")
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
        return _after_learning(usual, own.learned.time)
    kind = (compared_kind(software), accelerator.architecture, str(int(experts)))
    return _of_kind(TIME_INTERVALS, kind, (0.5, 0.5, 1.0), ("below", "above"))


@cache
def _of_kind(
    path: Path, kind: tuple[str, ...], shares: tuple[float, ...], ends: tuple[str, str]
) -> Spread:
    """Return the interval of a kind of runs from a file of intervals.

    Without compared runs of the kind: that of all runs, with the given shares of the difference
    that each property makes, in logarithms of the expected size.

    ``ends``: the columns of the ends below and above.
    """
    known = _intervals(path)
    every = (ANY,) * len(kind)
    if kind in known:
        found = known[kind]
        return Spread(found.ends[ends[0]], found.ends[ends[1]], found.source)
    logs = dict.fromkeys(ends, 0.0)
    for end in ends:
        base = math.log(_size(known[every].ends[end], end))
        logs[end] = base
        for place, (value, share) in enumerate(zip(kind, shares, strict=True)):
            alone = (*every[:place], value, *every[place + 1 :])
            if alone in known:
                logs[end] += share * (math.log(_size(known[alone].ends[end], end)) - base)
    below, above = (math.exp(logs[end]) for end in ends)
    return Spread(-math.expm1(-below), math.expm1(above), f"{_command(path)}: runs alike in part")


def _size(end: float, name: str) -> float:
    """Return an end of an interval in logarithms of the measurement."""
    return -math.log1p(-end) if name.endswith("below") else math.log1p(end)


def _command(path: Path) -> str:
    what = "times" if path == TIME_INTERVALS else "peaks"
    return f"python -m benchmarks.intervals.{what}"


class _Row(Struct, frozen=True):
    """A row of a file of intervals."""

    ends: dict[str, float]
    source: str


@cache
def _intervals(path: Path) -> Mapping[tuple[str, ...], _Row]:
    """Return the rows of a file of intervals by kind."""
    found = {}
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            sources = row.pop("sources") or "all sources"
            row.pop("runs")
            ends = {name: float(row[name]) for name in row if name.endswith(("below", "above"))}
            kind = tuple(text for name, text in row.items() if name not in ends)
            found[kind] = _Row(ends, f"{_command(path)}: {sources}")
    return found


def memory_spread(
    software: str, kind: MemoryKind = "device", *, assumed: bool = False, experts: bool = False
) -> Spread:
    """Return the 90 % interval of the peak memory of a trainer on accelerators.

    Of the bundled executor it rests on traced cases, of others on sources that were left out. A
    trainer whose peaks nobody compared has that of one that nobody described (UNKNOWN), or of the
    middle one of those that were compared, if that is wider.

    ``software``: a profile, or UNKNOWN; ``kind``: the measured quantity;
    ``assumed``: whether a setting of the run is not known, and the usual one was priced;
    ``experts``: whether the model is a mixture of experts.

    >>> memory_spread("shardplan") == MEMORY
    True
    >>> memory_spread("torchtune").above < memory_spread("unknown").above
    True
    """
    return _memory(software, (kind, assumed, experts), ("below", "above"))


def verdict_spread(software: str, *, assumed: bool = False, experts: bool = False) -> Spread:
    """Return how far a verdict looks: what one run in ten exceeds on a side of the prediction.

    A plan fits where nine runs in ten would need at most the budget, and does not fit where nine in
    ten would need more. The bundled executor's verdict looks as far as its interval.

    The errors are those of live tensors: reserved peaks of runs with room to spare have more free
    blocks, which the allocator gives back before it fails (c10/cuda/CUDACachingAllocator.cpp).

    >>> verdict_spread("torchtune").above < memory_spread("torchtune").above
    True
    """
    return _memory(software, ("allocated", assumed, experts), ("verdict_below", "verdict_above"))


def _memory(software: str, of_run: tuple[MemoryKind, bool, bool], ends: tuple[str, str]) -> Spread:
    if _has_memory_of_executor(software):
        return MEMORY
    if software.endswith(OWN_FILE):
        own = software_profile(software)
        usual = _memory(own.inherits, of_run, ends)
        learned = None if own.learned is None else own.learned.memory
        if learned is not None and ends[0].startswith("verdict"):
            below, above = math.log1p(-learned.below), math.log1p(learned.above)
            below, above = -math.expm1(ONE_IN_TEN * below), math.expm1(ONE_IN_TEN * above)
            learned = replace(learned, below=below, above=above)
        return _after_learning(usual, learned)
    compared = {trainer for trainer, *_ in _intervals(MEMORY_INTERVALS)} - {ANY, UNKNOWN}
    trainer = memory_kind(software)
    if trainer in compared:
        return _memory_of(trainer, *of_run, ends)
    unknown = _memory_of(UNKNOWN, *of_run, ends)
    known = [_memory_of(one, *of_run, ends) for one in sorted(compared)]
    below = max(unknown.below, float(np.median([spread.below for spread in known])))
    above = max(unknown.above, float(np.median([spread.above for spread in known])))
    return Spread(below, above, unknown.source)


def _memory_of(
    trainer: str, kind: MemoryKind, assumed: bool, experts: bool, ends: tuple[str, str]
) -> Spread:
    """Return the interval of a trainer's peaks of a kind.

    As if settings were assumed where no run of that quantity without assumed ones was compared.
    Assumed ones never narrow it.
    """
    known = _intervals(MEMORY_INTERVALS)
    words = {row[2] for row in known if row[:2] == (trainer, kind)} - {ANY}
    assumed = assumed or words == {"1"}
    shares = (1.0,) * len(MEMORY_KIND)
    stated, found = (
        _of_kind(MEMORY_INTERVALS, (trainer, kind, each, str(int(experts))), shares, ends)
        for each in ("0", str(int(assumed)))
    )
    return Spread(max(stated.below, found.below), max(stated.above, found.above), found.source)


@cache
def _has_memory_of_executor(software: str) -> bool:
    """Whether a profile is the bundled executor's, but for engines that change times alone."""
    name, plus, _ = software.partition(PLUS)
    if name != EXECUTOR or not plus:
        return software == EXECUTOR
    own, usual = asdict(software_profile(software)), asdict(software_profile(name))
    return all(own[group] == usual[group] for group in own if group not in TIME_ALONE)


def memory_kind(software: str) -> str:
    """Return the trainer by which peaks are grouped: the first word of a profile's name.

    Under DeepSpeed, whose engine keeps gradients and states, it is DeepSpeed.

    >>> memory_kind("hf-trainer-foak"), memory_kind("torch-trainer+fsdp1+autocast")
    ('hf', 'torch')
    >>> memory_kind("hf-trainer+deepspeed-zero2")
    'deepspeed'
    """
    if f"{PLUS}deepspeed" in software:
        return "deepspeed"
    return compared_kind(software).partition("-")[0]


def peak_was_compared(software: str) -> bool:
    """Whether peaks of a trainer were compared or learned, so that its interval is its own."""
    if _has_memory_of_executor(software):
        return True
    if software.endswith(OWN_FILE):
        own = software_profile(software)
        learned = own.learned is not None and own.learned.memory is not None
        return learned or peak_was_compared(own.inherits)
    return (memory_kind(software), ANY, ANY, ANY) in _intervals(MEMORY_INTERVALS)


def _after_learning(usual: Spread, learned: LearnedSpread | None) -> Spread:
    """Return the interval after learning, unless few runs told less than the profile's own."""
    if learned is None:
        return usual
    wider = usual.below + usual.above <= learned.below + learned.above
    if wider and learned.runs < DECISIVE:
        return usual
    return Spread(learned.below, learned.above, learned.source)


def peak_interval(peak: Bytes, typical: Bytes, spread: Spread) -> tuple[Bytes, Bytes]:
    """Return the low and high end of a peak's interval, or of that by which a verdict is found.

    The high end is above the cautious ``peak``, whose free blocks suffice in three runs of four;
    the low end is below the ``typical`` one (``memory.allocator``). With ``verdict_spread``, a plan
    fits where the high end is within the budget, does not fit where the low end is beyond it, and
    is tight in between.
    """
    return typical * (1.0 - spread.below), peak * (1.0 + spread.above)


def serving_spreads(accelerator: Accelerator) -> tuple[Spread, Spread]:
    """Return the spreads of the time to the first token and of the time per output token."""
    if accelerator.device == "cpu":
        return SERVING_PREFILL_ELSEWHERE, TIME_ON_CPU
    if accelerator.architecture in ("Ampere", "Hopper"):
        return SERVING_PREFILL, SERVING_TOKEN
    every = _of_kind(TIME_INTERVALS, (ANY,) * 3, (0.0,) * 3, ("below", "above"))
    return SERVING_PREFILL_ELSEWHERE, every


def compared_as(software: str) -> str:
    """Return the profile of which runs were compared: the executor's is that of eager trainers."""
    return "eager-fsdp2" if software == EXECUTOR else software


def compared_kind(software: str) -> str:
    """Return the profile by which runs are grouped: without engines that take the place of its own.

    >>> compared_kind("torch-trainer+fsdp1+autocast"), compared_kind("shardplan")
    ('torch-trainer', 'eager-fsdp2')
    """
    return compared_as(software.partition(PLUS)[0])


def with_assumed_links(
    low: float, high: float, communication: float, factor: float
) -> tuple[float, float]:
    """Return an interval, wider by what links may add or save of their ``communication``.

    ``factor``: how many times slower or faster they may be.

    >>> with_assumed_links(8.0, 12.0, 3.0, 1.5)
    (7.0, 13.5)
    """
    return low - communication * (1.0 - 1.0 / factor), high + communication * (factor - 1.0)


def widened(ends: tuple[Bytes, Bytes], spread: Spread) -> tuple[Bytes, Bytes]:
    """Return an interval whose ends are moved by another uncertainty.

    >>> widened((8.0, 12.0), Spread(0.25, 0.5, ""))
    (6.0, 18.0)
    """
    return ends[0] * (1.0 - spread.below), ends[1] * (1.0 + spread.above)


def interval(value: float, spread: Spread) -> tuple[float, float]:
    """Return the low and high end of the interval.

    >>> interval(100.0, Spread(0.25, 0.5, ""))
    (75.0, 150.0)
    """
    return value * (1.0 - spread.below), value * (1.0 + spread.above)
