"""Confidence in a prediction: measured, published or datasheet, and the runs it rests on."""

from __future__ import annotations

import csv
import datetime
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from cost_models.scenario import Scenario
from cost_models.uncertainty import compared_as, peak_was_compared
from hardware_profiles.cluster.schema import Figure
from hardware_profiles.fields import names_in

Confidence = Literal["measured", "published", "learned", "datasheet"]
# families, precisions and accelerators of the published runs that the time model was validated on
COMPARED_FAMILIES: Final = ("gpt2", "llama")
COMPARED_PRECISIONS: Final = ("bf16", "fp16")
COMPARED: Final = ("A100-SXM-80GB", "H100-SXM-80GB")
# made of the published runs by ``python -m benchmarks.intervals.compared_runs --write``
COMPARED_RUNS: Final = Path(__file__).parent / "compared_runs.csv"
COLUMNS: Final = names_in("software accelerator experts runs median_error trainers sources")
MOST_NAMES: Final = 3  # trainers that are listed


class ComparedRuns(Struct, frozen=True):
    """Published runs of one kind whose step time was compared with its prediction."""

    runs: int
    median_error: float  # absolute, relative to the measurement
    trainers: tuple[str, ...]  # the most frequent first
    sources: tuple[str, ...]  # groups of ``shardplan validate --only``


def confidence(scenario: Scenario) -> Confidence:
    """Return the confidence in predictions for a scenario.

    measured   the rates were measured on this machine
    published  ``shardplan validate`` compares with published runs of this trainer on this
               accelerator, with the same model family and precision, and the intervals contain them
    learned    a file of ``shardplan learn`` was learned on this accelerator
    datasheet  no such run: rates come from the vendor, the error from other runs
    """
    accelerator = scenario.cluster.accelerator
    if accelerator.device == "cpu":
        return "measured"
    learned = scenario.software.learned
    if learned is not None and learned.accelerator == accelerator.name:
        return "learned"
    alike = (
        accelerator.name in COMPARED
        and compared_runs(scenario) is not None
        and scenario.model.family in COMPARED_FAMILIES
        and scenario.workload.precision in COMPARED_PRECISIONS
    )
    return "published" if alike else "datasheet"


def compared_runs(scenario: Scenario) -> ComparedRuns | None:
    """Return the compared runs of this trainer on this accelerator; None: there are none."""
    software, accelerator = scenario.software.name, scenario.cluster.accelerator.name
    kind = compared_as(software), accelerator, scenario.model.has_experts
    return _table().get(kind)


def confidence_words(scenario: Scenario) -> str:
    """Return the confidence with the runs that were compared."""
    return _time_words(scenario) + _memory_words(scenario.software.name)


def _memory_words(software: str) -> str:
    """Return why an interval of peak memory is that of other trainers; "" where it is not."""
    if peak_was_compared(software):
        return ""
    return "; no peak of this trainer was compared: its interval is that of other trainers"


def _time_words(scenario: Scenario) -> str:
    level, chip = confidence(scenario), scenario.cluster.accelerator
    if level == "measured":
        return f"measured: rates were {_measured_words(chip.memory_bandwidth)}"
    found = compared_runs(scenario)
    if level == "published" and found is not None:
        only = found.sources[0]
        return f"published: {_words(found, chip.name)} (shardplan validate --time --only {only})"
    learned = scenario.software.learned
    if level == "learned" and learned is not None:
        runs = f"{learned.runs} run{'s' if learned.runs > 1 else ''}"
        words = f"learned: {scenario.software.name} explains {runs} of your own on {chip.name}"
        carries = "; steps of plans like them include what it leaves unexplained"
        return words + carries * (learned.unexplained is not None)
    words = "datasheet: rates come from the vendor; "
    if found is None:
        kind = "a mixture of experts" if scenario.model.has_experts else "this trainer"
        return f"{words}no run of {kind} on {chip.name} was compared yet"
    model, precision = scenario.model.family, scenario.workload.precision
    return f"{words}{_words(found, chip.name)}, but none of {model} in {precision} as here"


def _measured_words(figure: Figure) -> str:
    """Return where and when a rate was measured, with the age of the measurement."""
    date = re.search(r"\d{4}-\d\d-\d\d", figure.source)
    if figure.kind != "measured" or date is None:
        return "measured on this machine"
    try:
        days = (datetime.date.today() - datetime.date.fromisoformat(date[0])).days
    except ValueError:
        return figure.source
    age = "today" if days <= 0 else "yesterday" if days == 1 else f"{days:,} days ago"
    return f"{figure.source} ({age})"


def _words(found: ComparedRuns, accelerator: str) -> str:
    runs = f"{found.runs:,} run{'s' if found.runs > 1 else ''}"
    was = "were" if found.runs > 1 else "was"
    error = f"{100 * found.median_error:.0f} %" if found.median_error >= 0.01 else "below 1 %"
    return (
        f"{runs} of {_listed(found.trainers)} on {accelerator} {was} compared, median error {error}"
    )


def _listed(names: Sequence[str]) -> str:
    """Return names in words, the first ones of many.

    >>> _listed(["NeMo"]), _listed(["a", "b"]), _listed(["a", "b", "c", "d"])
    ('NeMo', 'a and b', 'a, b, c and others')
    """
    shown = [*names[:MOST_NAMES], *(["others"] if len(names) > MOST_NAMES else [])]
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


@cache
def _table() -> Mapping[tuple[str, str, bool], ComparedRuns]:
    """Return the compared runs by software profile, accelerator, and mixtures of experts."""
    found = {}
    with COMPARED_RUNS.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            kind = row["software"], row["accelerator"], row["experts"] == "1"
            trainers, sources = (tuple(row[name].split("; ")) for name in ("trainers", "sources"))
            error = float(row["median_error"])
            found[kind] = ComparedRuns(int(row["runs"]), error, trainers, sources)
    return found
