"""What the errors of step times come from.

    python -m benchmarks.accuracy.residuals [--rows FILE.csv]

Prices the published runs and those that were found later, and prints for every source: runs,
median and spread of log(measured / predicted), and the mean shares of its predicted steps. A share
of computation is an elasticity: by how much a step grows, relatively, where matmuls, flash
attention, memory or host are slower by one per cent. Other shares are seconds of the answer.

Then one factor for each part, and for classes of runs, is estimated with every source left out in
turn, and the errors of that source are printed with it:

    log(measured / predicted) = log(sum_k w_k exp(b_k)) + sum_c x_c b_c      w shares, x class

The b minimise the mean size of the residuals (at most ``MOST`` each; a source as at most ten runs)
plus ``RIDGE`` times their squares. None is part of a price: no factor makes sources that are left
out better (docs, "Experiments that were not adopted").
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pandas as pd
from msgspec.structs import replace
from scipy.optimize import minimize

from benchmarks.accuracy.timed_cases import timed_cases
from benchmarks.intervals.shrunk import MOST as RUNS
from benchmarks.unseen import UNSEEN
from cost_models.compute.rates import Rates, training_rates
from cost_models.plan.plan import PlanTable
from cost_models.pricing import estimate
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.step_time.parts import TIME_WORDS
from cost_models.uncertainty import compared_kind
from hardware_profiles.errors import InputError
from planner.validation.rows.case import Case
from planner.validation.rows.runs_file import PUBLISHED, read_runs

SLOWER: Final = 0.02  # log of the factor by which rates fall for an elasticity
MOST: Final = 0.5
RIDGE: Final = 0.01
UNDESCRIBED: Final = ("torch-trainer", "torch-compile")  # profiles of any trainer on torch
ROUND: Final = 0.05  # residuals below it count less than their size
RATES: Final[Mapping[str, tuple[str, ...]]] = {
    "matmul": ("matmul", "core", "single"),
    "flash": ("flash",),
    "memory": ("memory",),
    "host": ("operator",),
}
WAITS: Final = tuple(name for name in TIME_WORDS if name not in ("compute", "recompute"))
CLASSES: Final[Mapping[str, Callable[[pd.DataFrame], pd.Series]]] = {
    "trainer without a profile": lambda rows: rows.trainer.isin(UNDESCRIBED),
    "AMD": lambda rows: rows.architecture.str.startswith("CDNA"),
    "consumer card": lambda rows: rows.card.str.match(r"RTX-\d{4}(?!-Ada)"),
    "before Ampere": lambda rows: rows.architecture.isin(["Volta", "Turing", "Pascal"]),
    "each factor e of nodes": lambda rows: np.log(rows.nodes),
    "each factor e of ranks": lambda rows: np.log(rows.gpus),
    "found later": lambda rows: rows.found_later,
}


@contextmanager
def slower(names: Sequence[str]) -> Iterator[None]:
    """Rates that fall by ``SLOWER``, for a while."""
    of = training_rates

    def found(*given: Any) -> Rates:
        rates = of(*given)
        factor = {name: np.exp(SLOWER if name == "operator" else -SLOWER) for name in names}
        known = {name: getattr(rates, name) for name in names}
        return replace(rates, **{n: v * factor[n] for n, v in known.items() if v is not None})

    with patch.object(estimate, "training_rates", found):
        yield


def runs() -> pd.DataFrame:
    """Return every compared run: log error, shares of its step, and what describes it."""
    groups: dict[tuple[Any, ...], list[tuple[Case, float]]] = defaultdict(list)
    for table in (None, *UNSEEN):
        rows = read_runs(PUBLISHED if table is None else UNSEEN[table])
        for case, seconds in timed_cases(row for row in rows if row.left_out is None):
            groups[table, case.key].append((case, seconds))
    found = [
        record
        for (table, _), part in groups.items()
        for record in _records(table is not None, part)
    ]
    return pd.DataFrame(found)


def _records(found_later: bool, part: Sequence[tuple[Case, float]]) -> Iterator[dict[str, Any]]:
    scenario = part[0][0].scenario
    table = PlanTable.from_plans([case.plan for case, _ in part])
    try:
        priced = estimate.price(scenario, table)
    except InputError:
        return
    steps = with_simulated_steps(scenario, table, priced).step
    elastic = {}
    for name, rates in RATES.items():
        with slower(rates):
            elastic[name] = np.log(estimate.price(scenario, table).step / priced.step) / SLOWER
    for number, (case, seconds) in enumerate(part):
        times = {name: float(np.ravel(getattr(priced.time, name))[number]) for name in WAITS}
        yield {
            "row_id": case.row.name,
            "source": case.row.group,
            "found_later": found_later,
            "log_error": float(np.log(seconds / steps[number])),
            "trainer": compared_kind(scenario.software.name),
            "card": scenario.cluster.accelerator.name,
            "architecture": scenario.cluster.accelerator.architecture,
            "precision": scenario.workload.precision,
            "micro_batch_tokens": case.plan.micro_batch_size * scenario.workload.seq_len,
            "nodes": scenario.cluster.num_nodes,
            "gpus": scenario.cluster.num_gpus,
            **{f"{name}_elasticity": float(values[number]) for name, values in elastic.items()},
            **{name: time / float(priced.step[number]) for name, time in times.items()},
        }


def weights(rows: pd.DataFrame) -> np.ndarray:
    """Return the weight of every run: a source counts as its runs, at most ten."""
    count = rows.groupby("source").log_error.transform("size")
    found: np.ndarray = (np.minimum(count, RUNS) / count).to_numpy(float)
    return found


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the shares of a step that factors multiply; those of a run add up to 1."""
    rest = rows[[name for name in WAITS if name != "host"]].clip(lower=0.0)
    flash, matmul = rows.flash_elasticity, rows.matmul_elasticity - rows.flash_elasticity
    computed = pd.DataFrame({"matmul": matmul, "flash": flash, "memory": rows.memory_elasticity})
    shares = computed.clip(lower=0.0).join(rest).assign(host=rows.host.clip(lower=0.0))
    whole: pd.DataFrame = shares.div(shares.sum(axis=1), axis=0)
    return whole


def fitted(
    shares: np.ndarray, classes: np.ndarray, errors: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Return the logarithms of the factors of shares (the last share keeps 1) and of classes."""
    count = shares.shape[1] - 1

    def loss(logs: np.ndarray) -> float:
        left = np.minimum(np.abs(errors - expected(logs, shares, classes)), MOST)
        size = np.sqrt(left**2 + ROUND**2)
        return float(np.average(size, weights=weight) + RIDGE * np.sum(logs**2))

    start = np.zeros(count + classes.shape[1])
    return np.asarray(minimize(loss, start, method="Nelder-Mead").x)


def expected(logs: np.ndarray, shares: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return log(measured / predicted) by the factors."""
    count = shares.shape[1] - 1
    grown = shares @ np.append(np.exp(logs[:count]), 1.0)
    found: np.ndarray = np.asarray(np.log(grown) + classes @ logs[count:])
    return found


def left_out(rows: pd.DataFrame, part: str = "", kind: str = "") -> tuple[np.ndarray, float]:
    """Return log errors with the factor that the other sources give, and its mean."""
    share = parts(rows)[part].to_numpy() if part else np.zeros(len(rows))
    shares = np.column_stack([share, 1.0 - share])[:, 0 if part else 1 :]
    classes = np.zeros((len(rows), 0))
    if kind:
        classes = CLASSES[kind](rows).to_numpy(float)[:, None]
    errors, weight, source = rows.log_error.to_numpy(), weights(rows), rows.source.to_numpy()
    found, factors = errors.copy(), []
    for one in np.unique(source):
        own = source == one
        others = (each[~own] for each in (shares, classes, errors, weight))
        logs = fitted(*others)
        found[own] -= expected(logs, shares[own], classes[own])
        factors.append(float(np.exp(logs[0])))
    return found, float(np.mean(factors))


def figures(errors: np.ndarray, weight: np.ndarray) -> str:
    """Return median, 90th percentile and bias of predicted over measured, weighted."""
    signed = np.expm1(-errors)
    order = np.argsort(np.abs(signed))
    share = np.cumsum(weight[order]) / weight.sum()
    median, p90 = (np.abs(signed[order])[np.searchsorted(share, at)] for at in (0.5, 0.9))
    bias = np.average(signed, weights=weight)
    return f"{100 * median:6.1f} {100 * p90:6.1f} {100 * bias:+6.1f}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="a CSV file for all runs")
    given = parser.parse_args()
    rows = runs()
    if given.rows is not None:
        rows.to_csv(given.rows, index=False)
    shares = parts(rows)
    by_source = rows.groupby("source").log_error.agg(["size", "median", "std"])
    table = by_source.join(shares.groupby(rows.source).mean())
    print("log(measured / predicted), and mean shares of the predicted step")
    print(table.loc[:, (table > 0.0).any()].round(2).to_string())
    later, weight = rows.found_later.to_numpy(bool), weights(rows)
    print(f"\n{'factor, each source left out':<36} {'found later':>20} {'published':>20}  factor")
    asked = [("", ""), *((str(name), "") for name in shares), *(("", name) for name in CLASSES)]
    for part, kind in asked:
        if part or kind:
            errors, factor = left_out(rows, part, kind)
        else:
            errors, factor = rows.log_error.to_numpy(), 1.0
        first, second = (figures(errors[which], weight[which]) for which in (later, ~later))
        print(f"{part or kind or 'none':<36} {first:>20} {second:>20}  {factor:.3f}")


if __name__ == "__main__":
    main()
