"""Mechanisms that differ between trainers and machines: switches and rates.

A switch has options; each is a set of figures of a software profile. A rate is one figure, or
several that move together. Prior widths are in prior.toml (``python -m benchmarks.accuracy.learn
--fit``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from hardware_profiles.fields import Positive, convert, read_toml
from hardware_profiles.software.engine import engine
from hardware_profiles.software.trainer import UNKNOWN, SoftwareProfile, software_profile

PRIOR: Final = Path(__file__).parent / "prior.toml"
Figures = Mapping[str, Any]  # values by "group.figure"
OWN: Final = "as the profile"  # option of every switch


class Switch(Struct, frozen=True):
    """A property of a trainer with a few options, of which one holds."""

    name: str
    options: Mapping[str, Figures]  # without the profile's own


class Rate(Struct, frozen=True):
    """A figure of a profile that differs by machine and release.

    ``log``: value · exp(x); ``linear``: value + x, at least 0. x is normal with the prior's width.
    """

    name: str
    figure: str
    scale: Literal["log", "linear"]
    most: float = 1e30
    shown_as: str = ""  # unit

    def value(self, software: SoftwareProfile, x: float) -> float:
        """Return the figure after a change of x."""
        own = float(figure_of(software, self.figure))
        moved = own * math.exp(x) if self.scale == "log" else own + x
        return min(self.most, max(0.0, moved))


class Noise(Struct, frozen=True, forbid_unknown_fields=True):
    """Standard deviation of log(measured / predicted) that no mechanism explains."""

    time: Positive
    memory: Positive
    runs: Positive  # for which it counts in the interval after learning (``spreads``)
    kept: Positive  # share of the errors before learning that other runs keep


class Likeness(Struct, frozen=True, forbid_unknown_fields=True):
    """How far an error of a step time that no mechanism explains holds (``unexplained``)."""

    length: Positive  # doublings
    noise: Positive  # of a run for itself, over what runs alike share


class Multiple(Struct, frozen=True, forbid_unknown_fields=True):
    """Ends of an interval, as multiples of the deviation that ``spreads`` expects."""

    below: Positive
    above: Positive
    source: str


class Spreads(Struct, frozen=True, forbid_unknown_fields=True):
    """90 % intervals after learning from some runs."""

    runs: int
    time: Multiple
    memory: Multiple


class Prior(Struct, frozen=True, forbid_unknown_fields=True):
    """Prior of all mechanisms, and intervals of predictions after learning."""

    departs: Positive  # probability that a switch is not as in the profile
    noise: Noise
    likeness: Likeness
    widths: Mapping[str, Positive]  # standard deviation of each rate, by its figure
    after: tuple[Spreads, ...] = ()

    def spreads(self, runs: int) -> Spreads | None:
        """Return the intervals after a number of runs."""
        return next((s for s in reversed(self.after) if s.runs <= runs), None)


@cache
def published_prior() -> Prior:
    """Load prior.toml."""
    return convert(read_toml(PRIOR, "the prior of learning"), Prior, str(PRIOR))


RATES: Final = (
    Rate("matmul and memory rates", "kernels.rate_share", "log"),
    Rate("host time of an operator", "host.operator_seconds", "log", shown_as="s"),
    Rate("link share inside a node", "communication.bus_efficiency", "log", most=1.0),
    Rate("link share between nodes", "communication.network_efficiency", "log", most=1.0),
    Rate("time between two steps", "host.step_seconds", "linear", shown_as="s"),
    Rate("buffers of collectives", "memory.buffer_bytes", "linear", shown_as="bytes"),
    Rate("share of activations held", "activations.share", "log"),
)


def figure_of(software: SoftwareProfile, name: str) -> Any:
    """Return a figure by "group.figure"."""
    group, _, figure = name.partition(".")
    return getattr(getattr(software, group), figure)


def _engine(name: str) -> dict[str, Any]:
    """Return the values of an engine's figures."""
    return {
        f"{group}.{figure}": entry.value
        for group, entries in engine(name).figures.items()
        for figure, entry in entries.items()
    }


def _unfused() -> dict[str, Any]:
    """Return the figures of an ordinary training loop that compiling changes."""
    plain = software_profile(UNKNOWN)
    return {name: figure_of(plain, name) for name in _engine("compiled-layers")}


def switches(software: SoftwareProfile) -> tuple[Switch, ...]:
    """Return the switches of a trainer; options that change none of its figures are left out."""
    overlap = "overlap.data_parallel"
    tensor = ("overlap.tensor_parallel", "overlap.chunked_tensor_traffic")
    known = (
        Switch(
            "data-parallel wrapper",
            {name: _engine(name) for name in ("ddp", "fsdp1", "fsdp2", "megatron-distributed")},
        ),
        Switch(
            "layers",
            {
                "eager": _unfused(),
                "fused": _engine("fused-layers"),
                "compiled": _engine("compiled-layers"),
            },
        ),
        Switch(
            "optimizer kernels",
            {name: _engine(name) for name in ("adamw-foreach", "adamw-fused", "apex-fused")},
        ),
        Switch(
            "loss",
            {
                name: _engine(name)
                for name in (
                    "torch-loss",
                    "shifted-loss",
                    "in-place-loss",
                    "compiled-loss",
                    "fused-linear-loss",
                )
            },
        ),
        Switch(
            "data-parallel traffic",
            {"not overlapped": {overlap: 0.0}, "overlapped": {overlap: 1.0}},
        ),
        Switch(
            "tensor-parallel traffic",
            {
                "not overlapped": dict(zip(tensor, (0.0, False), strict=True)),
                "overlapped": dict(zip(tensor, (0.0, True), strict=True)),
            },
        ),
        Switch(
            "kept gradients",
            {
                "fp32": {"gradients.in_master_precision": True},
                "16 bits": {"gradients.in_master_precision": False},
            },
        ),
        Switch(
            "allocator",
            {
                "expandable segments": {"memory.expandable_segments": True},
                "segments of fixed size": {"memory.expandable_segments": False},
            },
        ),
        Switch("weights", {"fp32 under autocast": _engine("autocast")}),
        Switch(
            "attention kernel (Hopper and newer)",
            {
                "written for Ampere": {"kernels.flash_share_since_hopper": 0.6},
                "written for Hopper": {"kernels.flash_share_since_hopper": 1.0},
            },
        ),
    )
    found = []
    for switch in known:
        options = {
            name: figures
            for name, figures in switch.options.items()
            if software.changed(figures) != software
        }
        if options:
            found.append(Switch(switch.name, options))
    return tuple(found)
