"""What ``shardplan learn`` gains: ``python -m benchmarks.accuracy.learn``. Twelve minutes of CPU.

For every source of published and unseen runs, and every trainer and accelerator in it with enough
runs: learns from 1, 2, 3 and 5 of them (several random draws), and predicts others of the same
source, trainer and accelerator with the learned profile. Prints the median error of step time and
of peak memory before and after, the share inside the stated interval, and its width. The prior of
the mechanisms, the likeness of runs and the interval are fitted on all other sources. The tables of
docs/accuracy.md come first.

``--fit``: prints the prior of all sources and the intervals for planner/learning/prior.toml.
``--quick``: one draw, few runs of each source.

Prior: one line search for each number, one after the other: the value with the largest mean over
sources of the log evidence of a measured quantity (at least -1 for a source, trainer and
accelerator, so that no broken table decides). Without a source each number is searched again, with
the others as they are.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import pandas as pd
from msgspec.structs import asdict, replace

from benchmarks.accuracy.timed_cases import priced_cases
from benchmarks.intervals.shrunk import shortest
from benchmarks.unseen import UNSEEN
from cost_models.step_time.unexplained import likeness
from planner.learning.effects import Effects, MeasuredRun, effects, log_predictions, measured_run
from planner.learning.mechanisms import RATES, Likeness, Prior, published_prior
from planner.learning.posterior import posterior
from planner.learning.refinement import refined
from planner.learning.spreads import deviations
from planner.learning.unexplained import distances_between, weights
from planner.validation.measurement import faster_than_peak
from planner.validation.rows.runs_file import PUBLISHED, read_runs

AFTER: Final = (1, 2, 3, 5)  # runs
FEWEST: Final = 4  # runs of a source, a trainer and an accelerator
MOST: Final = 16  # of them that are priced
PREDICTED: Final = 6  # others that are predicted in a draw
STEPS: Final = tuple(2.0 ** (0.5 * n) for n in range(-4, 5))  # times a number of the prior
LEAST: Final = -1.0  # log evidence of a measured quantity of a group
WIDEST: Final = 0.7  # of a logarithm: a factor of two
LEAST_NOISE: Final = 0.1  # of two runs of one plan, at least a tenth is their own
SUMS_OF_LAYERS: Final = ("vtrain-single",)  # no measurements of steps


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one source, trainer and accelerator, and their effects."""

    source: str
    trainer: str
    runs: Sequence[MeasuredRun]
    effects: Effects
    measured: np.ndarray


def runs_by_group(most: int = MOST) -> dict[tuple[str, ...], list[MeasuredRun]]:
    """Return measured runs by source, trainer and accelerator, some of the large groups."""
    groups: dict[tuple[str, ...], list[MeasuredRun]] = defaultdict(list)
    rows = chain.from_iterable(map(read_runs, (PUBLISHED, *UNSEEN.values())))
    for case in priced_cases(row for row in rows if row.group not in SUMS_OF_LAYERS):
        run = measured_run(case)
        if run is None or faster_than_peak(case, run.step):
            continue
        software, chip = case.scenario.software, case.scenario.cluster.accelerator.name
        groups[case.row.group, software.name, chip, repr(software)].append(run)
    chosen = {}
    for key, runs in groups.items():
        if len(runs) >= FEWEST:
            random.Random(len(runs)).shuffle(runs)
            chosen[key] = runs[:most]
    return chosen


def priced_group(key: tuple[str, ...], runs: Sequence[MeasuredRun], prior: Prior) -> Group:
    """Price all mechanisms for a group."""
    found = effects([run.case for run in runs], prior)
    measured = np.array([run.logs for run in runs])
    measured[[run.case.row.left_out is not None for run in runs], 0] = np.nan
    return Group(key[0], f"{key[1]}, {key[2]}", runs, found, measured)


def with_widths(group: Group, before: Prior, after: Prior) -> Effects:
    """Return the effects under other widths of the rates."""
    scale = [after.widths[r.figure] / before.widths[r.figure] for r in group.effects.rates]
    from dataclasses import replace as changed

    return changed(group.effects, by_rate=group.effects.by_rate * np.array(scale)[:, None, None])


def evidence(group: Group, before: Prior, prior: Prior) -> float:
    """Return the log evidence of a measured quantity of a group, mean over its quantities."""
    found = posterior(with_widths(group, before, prior), group.measured, prior)
    return max(LEAST, found.log_evidence / max(1, int((~np.isnan(group.measured)).sum())))


def variants(prior: Prior) -> dict[str, list[Prior]]:
    """Return priors that differ in one number, by its name."""
    found = {"departs": [replace(prior, departs=min(0.9, s * prior.departs)) for s in STEPS]}
    for name in ("time", "memory"):
        value = getattr(prior.noise, name)
        found[f"noise.{name}"] = [
            replace(prior, noise=replace(prior.noise, **{name: s * value})) for s in STEPS
        ]
    for rate in RATES:
        most = WIDEST if rate.scale == "log" else np.inf
        widths = [min(most, s * prior.widths[rate.figure]) for s in STEPS]
        found[rate.figure] = [
            replace(prior, widths={**prior.widths, rate.figure: width}) for width in widths
        ]
    return found


def by_source(groups: Sequence[Group], before: Prior, priors: Sequence[Prior]) -> pd.DataFrame:
    """Return the mean evidence of every source (index) under each prior."""
    columns = [[evidence(group, before, one) for group in groups] for one in priors]
    frame = pd.DataFrame(np.array(columns).T, index=[group.source for group in groups])
    return frame.groupby(level=0).mean()


def fitted(groups: Sequence[Group], before: Prior) -> Prior:
    """Return the prior with the largest evidence, number by number."""
    found = before
    for name in variants(before):
        priors = variants(found)[name]
        found = priors[int(np.argmax(by_source(groups, before, priors).mean().to_numpy()))]
    return found


def without_source(tables: Mapping[str, pd.DataFrame], prior: Prior, source: str) -> Prior:
    """Return the prior with every number at its largest evidence over all other sources."""
    changed = prior
    for name, priors in variants(prior).items():
        table = tables[name].drop(index=source, errors="ignore")
        one = priors[int(np.argmax(table.mean().to_numpy()))]
        if name == "departs":
            changed = replace(changed, departs=one.departs)
        elif name.startswith("noise."):
            key = name.removeprefix("noise.")
            value = getattr(one.noise, key)
            changed = replace(changed, noise=replace(changed.noise, **{key: value}))
        else:
            changed = replace(changed, widths={**changed.widths, name: one.widths[name]})
    return changed


@dataclass(frozen=True, slots=True)
class Draw:
    """Learned runs of a group, and other runs of it: logarithms (runs, 2), NaN: unknown."""

    group: Group
    number: int
    own: np.ndarray  # measured, before, explained by mechanisms: (3, learned runs, 2)
    others: np.ndarray  # the same of other runs
    near: np.ndarray  # distances of learned runs to each other
    far: np.ndarray  # distances of other runs to learned ones


def draws_of(
    group: Group, before: Prior, prior: Prior, number: int, draws: int, predicted: int
) -> list[Draw]:
    """Learn mechanisms from random runs of a group, and predict others."""
    found = []
    generator = random.Random(number)
    under = with_widths(group, before, prior)
    for _ in range(draws):
        order = generator.sample(range(len(group.runs)), len(group.runs))
        own, others = order[:number], order[number : number + predicted]
        if not others or np.isnan(group.effects.base[own]).any():
            continue
        both = [*own, *others]
        cases = [group.runs[n].case for n in both]
        effects_of_own, measured = under.of(own), group.measured[both]
        known = posterior(effects_of_own, measured[:number], prior)
        learned = refined(effects_of_own, cases[:number], measured[:number], known, prior)
        explained = log_predictions(cases, learned.figures)
        logs = np.stack([measured, group.effects.base[both], explained])
        apart = distances_between(cases, cases[:number])
        parts = logs[:, :number], logs[:, number:], apart[:number], apart[number:]
        found.append(Draw(group, number, *parts))
    return found


def errors_of(draw: Draw, prior: Prior) -> list[dict[str, object]]:
    """Return errors of the other runs of a draw, before and after."""
    own, (measured, before, explained) = draw.own.copy(), draw.others
    weight, alone = weights(own[0, :, 0] - own[2, :, 0], draw.near, prior.likeness)
    own[2, :, 0] = own[0, :, 0] - alone
    after = explained.copy()
    after[:, 0] += likeness(draw.far, prior.likeness.length) @ weight
    sizes, found = deviations(*own, prior), []
    for quantity, name in enumerate(("time", "memory")):
        if np.isnan(own[0, :, quantity]).all():
            continue  # no run measured it
        for n in np.flatnonzero(~np.isnan(measured[:, quantity] - after[:, quantity])):
            at = n, quantity
            found.append(
                {
                    "source": draw.group.source,
                    "trainer": draw.group.trainer,
                    "quantity": name,
                    "runs": draw.number,
                    "before": np.exp(measured[at] - before[at]) - 1.0,
                    "explained": np.exp(measured[at] - explained[at]) - 1.0,
                    "after": np.exp(measured[at] - after[at]) - 1.0,
                    "deviation": sizes[quantity],
                }
            )
    return found


def likeness_errors(draws: Sequence[Draw], priors: Sequence[Prior]) -> pd.DataFrame:
    """Return the mean error of step times of every source (index) under each prior.

    Logarithms, at most ``WIDEST``. Sources weigh the same, and so do numbers of learned runs.
    """
    columns = {}
    for number, prior in enumerate(priors):
        rows = pd.DataFrame([row for draw in draws for row in errors_of(draw, prior)])
        rows = rows[rows.quantity == "time"]
        rows = rows.assign(log=np.minimum(np.log1p(rows.after).abs(), WIDEST))
        by_number = rows.groupby(["source", "runs"]).log.mean()
        columns[number] = by_number.groupby("source").mean()
    return pd.DataFrame(columns)


def likenesses(prior: Prior) -> list[Prior]:
    """Return priors that differ in the likeness of runs."""
    own = prior.likeness
    return [
        replace(prior, likeness=Likeness(x * own.length, max(LEAST_NOISE, y * own.noise)))
        for x in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
        for y in (1.0, 0.5, 0.7, 1.4, 2.0, 4.0)
    ]


def interval_of(rows: pd.DataFrame) -> tuple[float, float]:
    """Return the shortest interval after learning, in deviations; sources count the same."""
    share = 1.0 / rows.groupby("source").after.transform("size")
    return shortest((np.log1p(rows.after) / rows.deviation).to_numpy(), share.to_numpy())


def size(errors: pd.Series) -> pd.Series:
    """Return absolute errors, relative to the measurement."""
    return (1.0 / (1.0 + errors) - 1.0).abs()


def summary(rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return median errors before and after by runs, and the share inside the interval."""
    found = []
    for key, part in rows.groupby(list(names)):
        before, after = size(part.before), size(part.after)
        found.append(
            {
                **dict(zip(names, key, strict=True)),
                "predicted": len(part),
                "before": before.median(),
                "explained": size(part.explained).median(),
                "after": after.median(),
                "90th before": before.quantile(0.9),
                "90th after": after.quantile(0.9),
                "bias before": (1.0 / (1.0 + part.before) - 1.0).mean(),
                "bias after": (1.0 / (1.0 + part.after) - 1.0).mean(),
                "inside": part.inside.mean(),
                "width": part.width.median(),
            }
        )
    return pd.DataFrame(found)


def in_documentation(rows: pd.DataFrame) -> str:
    """Return the tables of docs/accuracy.md."""
    lines = []
    for quantity, name in (("time", "step time"), ("memory", "peak memory")):
        part = rows[rows.quantity == quantity]
        lines += ["", f"| {name} | before | 1 run | 2 runs | 3 runs | 5 runs |", "| --- " * 6 + "|"]
        for who, chosen in (("all", part), ("unseen", part[part.unseen])):
            table = summary(chosen, ["runs"]).set_index("runs")
            for words, before, after in (
                ("median", "before", "after"),
                ("90th percentile", "90th before", "90th after"),
                ("inside the interval", "", "inside"),
                ("width of the interval, median", "", "width"),
            ):
                cells = [f"{100.0 * table[after][number]:.1f} %" for number in AFTER]
                first = f"{100.0 * table[before][3]:.1f} %" if before else ""
                lines.append("| " + " | ".join([f"{who}, {words}", first, *cells]) + " |")
    return "\n".join(lines)


def with_coverage(rows: pd.DataFrame) -> pd.DataFrame:
    """Add whether a run is inside the interval that holds 90 % of the runs of all other sources.

    And the width of that interval, relative to the prediction.
    """
    rows = rows.assign(inside=False, width=0.0)
    for _, part in rows.groupby(["quantity", "runs"]):
        for source in part.source.unique():
            below, above = interval_of(part[part.source != source])
            own = part[part.source == source]
            low, high = np.expm1(-below * own.deviation), np.expm1(above * own.deviation)
            rows.loc[own.index, "inside"] = (own.after >= low) & (own.after <= high)
            rows.loc[own.index, "width"] = high - low
    return rows


def prior_toml(prior: Prior, rows: pd.DataFrame) -> str:
    """Return prior.toml without its comments."""
    lines = [f"departs = {prior.departs:.2g}", "", "[noise]"]
    lines += [f"{name} = {value:.2g}" for name, value in asdict(prior.noise).items()]
    lines += ["", "[likeness]"]
    lines += [f"{name} = {value:.2g}" for name, value in asdict(prior.likeness).items()]
    lines += ["", "[widths]", *(f'"{name}" = {width:.2g}' for name, width in prior.widths.items())]
    for number in AFTER:
        lines += ["", "[[after]]", f"runs = {number}"]
        for quantity in ("time", "memory"):
            part = rows[(rows.quantity == quantity) & (rows.runs == number)]
            below, above = (np.ceil(20.0 * end) / 20.0 for end in interval_of(part))
            source = f"python -m benchmarks.accuracy.learn: sources left out, after {number} run"
            source += "s" if number > 1 else ""
            lines.append(
                f'{quantity} = {{ below = {below:.2f}, above = {above:.2f}, source = "{source}" }}'
            )
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    quick, fit = "--quick" in sys.argv[1:], "--fit" in sys.argv[1:]
    prior = published_prior()
    by_group = runs_by_group(8 if quick else MOST)
    groups = []
    for key, runs in by_group.items():
        print(f"pricing {', '.join(key[:3])}: {len(runs)} runs", file=sys.stderr, flush=True)
        group = priced_group(key, runs, prior)
        if not np.isnan(group.measured).all():
            groups.append(group)
    report(groups, prior, draws=1 if quick else 2, fit=fit)


def report(groups: Sequence[Group], before: Prior, *, draws: int, fit: bool) -> None:
    """Fit the prior without each source, learn, predict, and print."""
    full = fitted(groups, before) if fit else before
    tables = {name: by_source(groups, before, priors) for name, priors in variants(full).items()}
    found: dict[str, tuple[Prior, list[Draw]]] = {}
    for group in groups:
        print(f"learning {group.source}, {group.trainer}", file=sys.stderr, flush=True)
        prior = without_source(tables, full, group.source)
        found.setdefault(group.source, (prior, []))
        for number in AFTER:
            found[group.source][1].extend(draws_of(group, before, prior, number, draws, PREDICTED))
    tried = likenesses(full)
    table = likeness_errors([draw for _, few in found.values() for draw in few], tried)
    if fit:
        full = replace(full, likeness=tried[int(table.mean().argmin())].likeness)
    rows = with_coverage(
        pd.DataFrame(
            [
                row
                for source, (prior, few) in found.items()
                for best in [tried[int(table.drop(index=source, errors="ignore").mean().argmin())]]
                for draw in few
                for row in errors_of(draw, replace(prior, likeness=best.likeness))
            ]
        )
    )
    unseen = {row.group for path in UNSEEN.values() for row in read_runs(path)}
    rows = rows.assign(unseen=rows.source.isin(unseen))
    print(in_documentation(rows))
    percent = "{:.1%}".format
    signed = "{:+.1%}".format
    for quantity, part in rows.groupby("quantity"):
        for names in (["runs"], ["unseen", "runs"], ["source", "runs"]):
            table = summary(part, names)
            formats = {
                name: signed if "bias" in name else percent
                for name in table.columns[len(names) + 1 :]
            }
            text = table.to_string(index=False, formatters=formats)
            print(f"\n{quantity}, by {' and '.join(names)}\n{text}")
    if fit:
        print(f"\n{prior_toml(full, rows)}")


if __name__ == "__main__":
    main()
