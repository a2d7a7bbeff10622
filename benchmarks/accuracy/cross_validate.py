"""Step times with whole sources left out of the fit.

    python -m benchmarks.accuracy.cross_validate [--write]

Prints the fitted constants of the time model (name, value, meaning, what they were fitted on), and,
for every source of published runs, its errors with all constants as they are and with those that
runs were fitted to fitted again without it. A trainer's profile whose own numbers were fitted on
the source is then replaced by the bundled executor's. Takes minutes. ``--write`` keeps the errors
in ``left_out.csv``, those of ``--memory`` in ``memory_left_out.csv``, of which
``benchmarks.accuracy`` makes tables.

A fit is one line search for each constant, the others as they are: the value, of those in steps
around the one in the code, with the smallest mean over sources of the mean absolute logarithm of
predicted over measured time (at most log 1.25 for a row, so that no broken row decides).

With ``--ranks``: step times under the trainers whose ranks' rates differ (``rank_spread``), of
published runs and those found later, on several accelerators: without it, and with it fitted again
without each source, which counts as at most ten runs.

With ``--memory``: peaks of trainers that no profile describes (``memory_left_out.py``).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from benchmarks.accuracy import memory_left_out
from benchmarks.accuracy.timed_cases import timed_cases
from benchmarks.intervals.shrunk import quantile, source_weights
from benchmarks.unseen import UNSEEN
from cost_models.communication import ring_and_tree as collectives
from cost_models.compute import kernel_launch as host
from cost_models.compute import matmul, rates
from cost_models.plan.plan import PlanTable
from cost_models.pricing.table import table_steps
from cost_models.scenario import Scenario
from hardware_profiles.software.trainer import software_profile
from planner.validation.rows.case import Case
from planner.validation.rows.runs_file import PUBLISHED, read_runs
from planner.validation.statistics import FEWEST

WRITTEN: Final = Path(__file__).with_name("left_out.csv")
MOST: Final = 0.22  # log 1.25: what one row can count
STEPS: Final = tuple(0.025 * n for n in range(-4, 5))  # relative to the value in the code


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted number of the time model."""

    name: str
    meaning: str
    fitted_on: str
    holder: Any = None  # module or mapping whose entry it is; None: of software profiles
    key: str = ""
    profile: str = ""  # and those that inherit it from here
    touches: Callable[[Scenario], bool] | None = None  # settings it can change; None: not by runs
    reach: float = 1.0  # steps of the line search over the usual ones

    @property
    def value(self) -> float:
        """What the code has."""
        if self.holder is None:
            return float(attrgetter(self.key)(software_profile(self.profile)))
        if isinstance(self.holder, Mapping):
            return float(self.holder[self.key])
        return float(getattr(self.holder, self.key))


def _is(*architectures: str) -> Callable[[Scenario], bool]:
    return lambda scenario: scenario.cluster.accelerator.architecture in architectures


def _inherits(name: str, key: str) -> Callable[[Scenario], bool]:
    source = software_profile(name).sources[key]
    return lambda scenario: scenario.software.sources[key] == source


KERNELS: Final = "183 bf16 matmuls of an A100-PCIe (python -m benchmarks.step_time.fit_matmul)"
NCCL: Final = "NCCL all-reduces over 2, 4 and 8 A100 (VIA-Research/vTrain: trace/a100)"
CONSTANTS: Final = (
    Constant(
        "FULL_WAVE_SHARE", "of the best matmul, in a full wave", KERNELS, matmul, "FULL_WAVE_SHARE"
    ),
    Constant(
        "TILE_SETUP", "elements of k that a tile's setup takes", KERNELS, matmul, "TILE_SETUP"
    ),
    Constant(
        "OPERAND_TRAFFIC", "elements: small tiles read more", KERNELS, matmul, "OPERAND_TRAFFIC"
    ),
    Constant(
        "COLLECTIVE_START", "seconds to start a collective", NCCL, collectives, "COLLECTIVE_START"
    ),
    Constant(
        "bus_efficiency",
        "of a link inside a node",
        NCCL,
        None,
        "communication.bus_efficiency",
        "shardplan",
    ),
    Constant(
        "SUSTAINED_SHARE",
        "of the best matmul, that a long run keeps",
        "runs on Volta and Ampere",
        rates,
        "SUSTAINED_SHARE",
        touches=_is("Volta", "Turing", "Ampere"),
    ),
    Constant(
        "JOULES_A_FLOP Hopper",
        "joules of a 16-bit FLOP",
        "runs on H100",
        rates.JOULES_A_FLOP,
        "Hopper",
        touches=_is("Hopper"),
    ),
    Constant(
        "JOULES_A_FLOP Blackwell",
        "joules of a 16-bit FLOP",
        "runs on B200, B300, GB200, GB300",
        rates.JOULES_A_FLOP,
        "Blackwell",
        touches=_is("Blackwell"),
    ),
    Constant(
        "JOULES_A_FLOP CDNA3",
        "joules of a 16-bit FLOP",
        "runs on MI300X and MI325X",
        rates.JOULES_A_FLOP,
        "CDNA3",
        touches=_is("CDNA3"),
    ),
    Constant(
        "FP32_SHARE",
        "of the fp32 peak without tensor cores",
        "BERT on V100",
        rates.LOWER_SHARES,
        "fp32",
        touches=lambda scenario: scenario.workload.precision == "fp32",
    ),
    Constant(
        "operator_seconds",
        "host seconds an operator of Megatron-LM",
        "runs under Megatron-LM on one node",
        None,
        "host.operator_seconds",
        "megatron",
        touches=_inherits("megatron", "host.operator_seconds"),
    ),
    Constant(
        "HOST_OVERLAP",
        "power with which host and GPU hide each other",
        "GPT under Megatron-LM on one node (vtrain-single)",
        host,
        "HOST_OVERLAP",
        touches=lambda scenario: scenario.cluster.accelerator.device != "cpu",
        reach=5.0,
    ),
    Constant(
        "data_parallel_interference",
        "seconds that hiding a second costs",
        "runs under FSDP",
        None,
        "overlap.data_parallel_interference",
        "shardplan",
        touches=_inherits("shardplan", "overlap.data_parallel_interference"),
        reach=8.0,
    ),
    Constant(
        "rank_spread",
        "standard deviation of the ranks' rates, over their mean",
        "runs under transformers and torchtune on several accelerators",
        None,
        "kernels.rank_spread",
        "hf-trainer",
        touches=_inherits("hf-trainer", "kernels.rank_spread"),
        reach=10.0,
    ),
    Constant(
        "rate_share",
        "of the accelerator's rates, that a trainer without a profile reaches",
        "first prices of runs under such trainers (python -m benchmarks.accuracy.first_prices)",
        None,
        "kernels.rate_share",
        "torch-trainer",
        touches=_inherits("torch-trainer", "kernels.rate_share"),
    ),
)
# profiles of trainers with numbers of their own fitted on one source, and what stands in for them
OF_TRAINERS: Final[Mapping[str, tuple[str, str, int]]] = {
    "composer": ("mosaic-llm-foundry", "shardplan", 2),
    "composer-2022": ("mosaic-llm-foundry", "shardplan", 3),
}


@dataclass(frozen=True)
class Work:
    """Rows that are priced at once, and their measured seconds."""

    scenario: Scenario
    table: PlanTable
    source: str
    measured: np.ndarray

    @cached_property
    def as_is(self) -> np.ndarray:
        """Predicted over measured, with the constants of the code."""
        return self.errors({})

    def errors(self, changed: Mapping[str, float]) -> np.ndarray:
        """Predicted over measured."""
        software = self.scenario.software
        for constant in CONSTANTS:
            ours = constant.touches is None or constant.touches(self.scenario)
            if constant.holder is None and ours and constant.name in changed:
                software = software.changed({constant.key: changed[constant.name]})
        with written(changed):
            steps = table_steps(replace(self.scenario, software=software), self.table)
        return np.asarray(steps / self.measured)


@contextmanager
def written(changed: Mapping[str, float]) -> Iterator[None]:
    """Constants of modules with other values, for a while."""
    ours = [c for c in CONSTANTS if c.holder is not None and c.name in changed]
    before = [c.value for c in ours]
    try:
        for constant in ours:
            _write(constant, changed[constant.name])
        yield
    finally:
        for constant, value in zip(ours, before, strict=True):
            _write(constant, value)


def _write(constant: Constant, value: float) -> None:
    if isinstance(constant.holder, dict):
        constant.holder[constant.key] = value
    else:
        setattr(constant.holder, constant.key, value)


def published(*, every: bool = False, later: bool = False) -> list[Work]:
    """All published rows whose time counts, of sources that are in the mean over sources.

    ``every``: of all sources. ``later``: and those found later; ``every``, but for those that stay
    out of means.
    """
    groups: dict[tuple[Any, ...], list[tuple[Case, float]]] = defaultdict(list)
    tables = map(read_runs, (PUBLISHED, *(UNSEEN.values() if later else ())))
    rows = (row for row in chain.from_iterable(tables) if every or row.left_out is None)
    for case, seconds in timed_cases(rows):
        groups[case.row.group, case.key].append((case, seconds))
    works = [
        Work(
            part[0][0].scenario,
            PlanTable.from_plans([case.plan for case, _ in part]),
            source,
            np.array([seconds for _, seconds in part]),
        )
        for (source, _), part in groups.items()
    ]
    counts: dict[str, int] = defaultdict(int)
    for work in works:
        counts[work.source] += len(work.measured)
    return [work for work in works if every or later or counts[work.source] >= FEWEST]


def losses(works: Sequence[Work], constant: Constant) -> pd.DataFrame:
    """Sum of losses, and rows, by value of a constant and source: of what it can change."""
    touches = constant.touches or (lambda _: False)
    found = []
    for step in STEPS:
        value = (1.0 + constant.reach * step) * constant.value
        for work in works:
            if touches(work.scenario):
                errors = work.errors({constant.name: value}) if step else work.as_is
                size = np.abs(np.log(errors))
                loss, count = float(np.minimum(size, MOST).sum()), len(size)
                found.append((value, work.source, loss, count))
    frame = pd.DataFrame(found, columns=["value", "source", "loss", "rows"])
    return frame.groupby(["value", "source"]).sum()


def best_value(table: pd.DataFrame, without: str) -> float | None:
    """The value with the smallest mean over sources; None where no source is left."""
    kept = table[table.index.get_level_values("source") != without]
    if kept.empty:
        return None
    return float((kept.loss / kept.rows).groupby("value").mean().idxmin())


def in_its_place(work: Work) -> Work:
    """The same rows under the profile that stands in for one fitted on them."""
    source, parent, _ = OF_TRAINERS.get(work.scenario.software.name, ("", "", 0))
    if source != work.source:
        return work
    return replace(work, scenario=replace(work.scenario, software=software_profile(parent)))


def figures(errors: np.ndarray) -> tuple[float, float, float]:
    """Median and 90th percentile of the absolute error, and the bias."""
    signed = errors - 1.0
    size = np.abs(signed)
    return float(np.median(size)), float(np.quantile(size, 0.9)), float(signed.mean())


def differing_ranks() -> str:
    """Return errors without ``rank_spread``, and with it fitted again without each source."""
    (constant,) = (c for c in CONSTANTS if c.name == "rank_spread")
    works = [
        work
        for work in published(later=True)
        if constant.touches
        and constant.touches(work.scenario)
        and work.scenario.cluster.num_gpus > 1
    ]
    table = losses(works, constant)
    rows: list[tuple[str, float, float, float]] = []
    for source in sorted({work.source for work in works}):
        value = best_value(table, source)
        if value is not None:
            for work in (work for work in works if work.source == source):
                without, apart = (work.errors({constant.name: x}) for x in (0.0, value))
                rows += [(source, value, *each) for each in zip(without, apart, strict=True)]
    frame = pd.DataFrame(rows, columns=["source", "rank_spread", "without", "left out"])
    weights = source_weights(frame.assign(source_group=frame.source))
    lines = [f"fitted on all {frame.source.nunique()} sources: {best_value(table, ''):.3g}"]
    for name in ("without", "left out"):
        size = np.abs(frame[name].to_numpy() - 1.0)
        median, p90 = (100.0 * quantile(size, weights, share) for share in (0.5, 0.9))
        bias = 100.0 * np.average(frame[name] - 1.0, weights=weights)
        lines.append(f"{name}: median {median:.1f} %, 90th {p90:.1f} %, bias {bias:+.1f} %")
    by_source = frame.groupby("source").median().assign(runs=frame.groupby("source").size())
    return "\n".join([by_source.round(3).to_string(), *lines])


def constants_table(refitted: Mapping[str, float | None]) -> str:
    """Every fitted constant: value, value fitted again, meaning and source."""
    rows = [
        (
            c.name,
            f"{c.value:.4g}",
            "" if refitted.get(c.name) is None else f"{refitted[c.name]:.4g}",
            c.meaning,
            c.fitted_on,
        )
        for c in CONSTANTS
    ]
    names = ["constant", "value", "fitted again", "meaning", "fitted on"]
    return pd.DataFrame(rows, columns=names).to_string(index=False)


def main() -> None:
    """Print the tables of step times, or those that an option names."""
    if "--memory" in sys.argv[1:]:
        memory_left_out.main()
        return
    if "--ranks" in sys.argv[1:]:
        print(differing_ranks())
        return
    works = published()
    sources = sorted({work.source for work in works})
    tables = {}
    for constant in CONSTANTS:
        if constant.touches is not None:
            print(f"pricing {len(STEPS)} values of {constant.name}", file=sys.stderr)
            tables[constant.name] = losses(works, constant)
    refitted = {name: best_value(table, "") for name, table in tables.items()}
    print(constants_table(refitted))
    own = ", ".join(f"{name} {count}" for name, (_, _, count) in OF_TRAINERS.items())
    print(f"\n{len(CONSTANTS)} fitted constants in the core; of trainers' profiles: {own}\n")
    rows = []
    for source in sources:
        found = {name: best_value(table, source) for name, table in tables.items()}
        changed = {name: value for name, value in found.items() if value is not None}
        ours = [work for work in works if work.source == source]
        fitted = figures(np.concatenate([work.as_is for work in ours]))
        apart = figures(np.concatenate([in_its_place(work).errors(changed) for work in ours]))
        moved = [
            f"{name} {changed[name]:.3g}"
            for name, value in refitted.items()
            if name in changed and changed[name] != value
        ]
        count = sum(len(work.measured) for work in ours)
        rows.append((source, count, *fitted, *apart, "; ".join(moved)))
    names = ["median", "p90", "bias"]
    columns = ["source", "runs", *names, *(f"{name}_left_out" for name in names)]
    table = pd.DataFrame(rows, columns=[*columns, "constants_that_move"])
    mean = table[columns[2:]].mean().to_dict() | {"constants_that_move": ""}
    table.loc[len(table)] = {"source": "mean over sources", "runs": table.runs.sum(), **mean}
    print(table.to_string(index=False, formatters=dict.fromkeys(columns[2:], "{:+.1%}".format)))
    if "--write" in sys.argv[1:]:
        table.to_csv(WRITTEN, index=False, float_format="%.4f", lineterminator="\n")


if __name__ == "__main__":
    main()
