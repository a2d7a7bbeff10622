"""Plans that people ran, compared with the best of the search.

    python -m benchmarks.accuracy.known_plans

For every published configuration from 64 GPUs up whose step time counts (``shardplan validate
--time``): the plan that was run, whether it is legal and fits, its predicted and its measured step,
and the best plan of the search on the same cluster with the same batch and trainer. Rank: its place
among the plans that fit, by predicted step. Where a source does not say what it recomputes and the
plan would not fit without, ``fit`` is asked for it with the other parts given.
``-o FILE.csv`` writes every row; ``--only GROUP`` takes some sources alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.accuracy.timed_cases import timed_cases
from cost_models.legality.rules import CODES, RULES, legality_codes
from cost_models.memory.parts import MemoryParts
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from cost_models.uncertainty import peak_interval
from cost_models.units import GIB
from planner.assessment.verdict import budget_bytes, plan_verdict_spread, verdict
from planner.explanation.choices import Choices, priced_choices
from planner.request.command import describe_plan
from planner.search.first_plan import first_plan
from planner.validation.rows.case import Case
from planner.validation.rows.runs_file import PUBLISHED, read_runs

FEWEST_GPUS: Final = 64
SAME: Final = 1e-9  # relative
RECOMPUTED: Final = ("recompute", "recompute_layers", "recompute_every")
# source groups that are not asked, each with the reason
LEFT_OUT: Final = {"maxtext-tpu": "XLA on TPU: what its compiler keeps in memory is not modelled"}


@dataclass(frozen=True, slots=True)
class Known:
    """One published plan, and the best of ours."""

    row_id: str
    source: str
    model: str
    gpus: int
    gpu: str
    trainer: str
    plan: str  # that was run
    completed: str  # what its source does not say
    rule: str  # of ours that it breaks, though its trainer does it; "" where it is legal
    why_rule: str  # in words
    verdict: str
    why: str  # it does not fit
    predicted: float  # seconds
    measured: float
    ours: str
    ours_predicted: float
    num_plans: int  # legal ones, priced
    rank: int  # of the plan that was run, by predicted step, among those that fit; from 1
    num_fitting: int

    @property
    def error(self) -> float:
        """Of the prediction for the plan that was run."""
        return self.predicted / self.measured - 1.0

    @property
    def gain(self) -> float:
        """How much longer the plan that was run is predicted to take than ours."""
        return self.predicted / self.ours_predicted - 1.0


def cases(only: Sequence[str] = ()) -> Iterator[tuple[Case, float]]:
    """Published cases that are asked, with what was measured."""
    return timed_cases(
        row
        for row in read_runs(PUBLISHED)
        if (row.num_gpus or 0) >= FEWEST_GPUS
        and row.source_group not in LEFT_OUT
        and (not only or row.source_group in only)
    )


def known_plans(asked: Iterable[tuple[Case, float]]) -> list[Known]:
    """Every case with the best plan of its scenario; a scenario is searched once."""
    settings: dict[object, list[tuple[Case, float]]] = {}
    for case, measured in asked:
        settings.setdefault(case.key, []).append((case, measured))
    found = []
    for group in settings.values():
        offloads = {"none", *(case.plan.offload for case, _ in group)}
        first = group[0][0]
        choices = priced_choices(first.scenario, first.plan, offloads=sorted(offloads))
        found += [_known(choices, case, measured) for case, measured in group]
    return found


def _known(choices: Choices, case: Case, measured: float) -> Known:
    scenario = case.scenario
    plan, completed, words, step = _completed(case)
    code = _code(scenario, plan)
    fitting = _fitting(choices, tight=words == "tight")
    ours = best_plan(choices, tight=words == "tight")
    row = case.row
    return Known(
        row_id=row.name,
        source=str(row.get("source_group")),
        model=scenario.model.name,
        gpus=scenario.cluster.num_gpus,
        gpu=scenario.cluster.accelerator.name,
        trainer=scenario.software.name,
        plan=describe_plan(plan),
        completed=completed,
        rule="" if code == "legal" else code,
        why_rule="" if code == "legal" else _why_rule(scenario, plan, code),
        verdict=words,
        why=_why_too_large(scenario, plan) if words == "does_not_fit" else "",
        predicted=step,
        measured=measured,
        ours="" if ours is None else describe_plan(choices.table.plan(ours)),
        ours_predicted=float("nan") if ours is None else float(choices.step[ours]),
        num_plans=len(choices.table) - 1,
        rank=1 + int(np.sum(choices.step[fitting] < (1.0 - SAME) * step)),
        num_fitting=len(fitting),
    )


def best_plan(choices: Choices, *, tight: bool = False) -> int | None:
    """Row of the fastest plan that fits, or is at least tight; the published one does not count."""
    rows = _fitting(choices, tight=tight)
    return int(rows[np.argmin(choices.step[rows])]) if len(rows) else None


def _fitting(choices: Choices, *, tight: bool) -> np.ndarray:
    """Rows of plans that fit, or are at least tight, without the published one."""
    spread = plan_verdict_spread(choices.scenario)
    most = (1.0 + spread.above) / (1.0 - spread.below) if tight else 1.0
    rows = np.flatnonzero(choices.on_host & (choices.needed <= most))
    return rows[rows != 0]


def _completed(case: Case) -> tuple[Plan, str, str, float]:
    """The plan that was run with the recomputation that ``fit`` chooses, where none is said."""
    scenario, plan = case.scenario, case.plan
    words, step = _priced(scenario, plan)
    unsaid = any("recompute" in default for default in case.defaults)
    if words != "does_not_fit" or not unsaid:
        return plan, "", words, step
    found = first_plan(scenario, {k: v for k, v in plan.to_dict().items() if k not in RECOMPUTED})
    other = found.plan or found.smallest
    if other is None:
        return plan, "", words, step
    layers = f" of {other.recompute_layers} layers a stage" * bool(other.recompute_layers)
    return other, f"recompute {other.recompute}{layers}", *_priced(scenario, other)


def _priced(scenario: Scenario, plan: Plan) -> tuple[str, float]:
    priced = price(scenario, PlanTable.from_plans([plan]))
    around = plan_verdict_spread(scenario)
    ends = peak_interval(float(priced.peak[0]), float(priced.typical_peak[0]), around)
    return verdict(*ends, budget_bytes(scenario.cluster)), float(priced.step[0])


def _why_too_large(scenario: Scenario, plan: Plan) -> str:
    """Name the largest parts of a peak that is over the budget."""
    priced = price(scenario, PlanTable.from_plans([plan]))
    parts = {name: float(getattr(priced.memory, name)[0]) for name in MemoryParts.__struct_fields__}
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    named = ", ".join(f"{name} {parts[name] / GIB:.0f} GiB" for name in largest)
    peak, budget = float(priced.peak[0]), budget_bytes(scenario.cluster)
    return f"{peak / GIB:.1f} of {budget / GIB:.1f} GiB ({named})"


def _why_rule(scenario: Scenario, plan: Plan, code: str) -> str:
    rule = next(rule for rule in RULES if rule.code == code)
    return rule.words(scenario, plan)


def _code(scenario: Scenario, plan: Plan) -> str:
    return CODES[int(legality_codes(scenario, PlanTable.from_plans([plan]))[0])]


def table_of(found: Sequence[Known]) -> pd.DataFrame:
    """All rows as a table."""
    return pd.DataFrame([{**asdict(k), "error": k.error, "gain": k.gain} for k in found])


def summary(rows: pd.DataFrame) -> str:
    """One line a source and what holds for all."""
    lines = [
        f"{'':<24}{'plans':>6}{'legal':>7}{'fit':>6}{'tight':>7}{'not':>5}{'error of theirs':>17}"
        f"{'theirs over ours':>18}{'rank':>8}{'slower':>8}"
    ]
    for source, group in [*rows.groupby("source"), ("all", rows)]:
        verdicts = group.verdict.value_counts()
        fitting = group[group.verdict != "does_not_fit"]
        lines.append(
            f"{source:<24}{len(group):>6}{int((group.rule == '').sum()):>7}"
            f"{verdicts.get('fits', 0):>6}{verdicts.get('tight', 0):>7}"
            f"{verdicts.get('does_not_fit', 0):>5}{100 * group.error.abs().median():>15.1f} %"
            f"{1.0 + fitting.gain.median():>17.2f}x{fitting['rank'].median():>8,.0f}"
            f"{int((fitting.gain < -SAME).sum()):>8}"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="write every row to this CSV file")
    parser.add_argument("--only", action="append", default=[], help="a source group")
    options = parser.parse_args(words)
    rows = table_of(known_plans(cases(options.only)))
    if rows.empty:
        parser.error(
            f"--only {', '.join(options.only)}: no row of these sources counts as a step time"
        )
    if options.output is not None:
        rows.to_csv(options.output, index=False)
    best = rows.sort_values("measured").drop_duplicates(["model", "gpus", "gpu", "trainer"])
    for row in best.sort_values(["source", "row_id"]).itertuples():
        print(f"{row.row_id}  {row.model} on {row.gpus} {row.gpu} ({row.trainer})")
        print(
            f"  theirs {row.predicted:8.2f} s predicted, {row.measured:8.2f} s measured "
            f"({100 * row.error:+.0f} %), {row.verdict}, rank {row.rank:,} of {row.num_fitting:,}  "
            f"{row.plan}"
        )
        print(
            f"  ours   {row.ours_predicted:8.2f} s predicted ({row.num_plans:,} plans)  {row.ours}"
        )
    print()
    print(summary(rows))
    for row in rows[rows.verdict == "does_not_fit"].itertuples():
        print(f"does not fit: {row.row_id}: {row.why}")
    for code, group in rows[rows.rule != ""].groupby("rule"):
        one = group.iloc[0]
        print(
            f"not legal here, though its trainer does it: {code}, {len(group)} plans, for example "
            f"{one.row_id}: {one.why_rule}"
        )
    for source, why in LEFT_OUT.items():
        print(f"left out: {source}: {why}")


if __name__ == "__main__":
    main()
