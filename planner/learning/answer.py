"""``learn``: a software profile of a user's own from one to five short runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from cost_models.step_time.unexplained import likeness
from cost_models.uncertainty import memory_spread, time_spread
from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError
from planner.learning.conclusions import (
    about_rates,
    about_switches,
    compared_runs,
    rate_range,
)
from planner.learning.effects import MeasuredRun, effects, log_predictions, measured_run
from planner.learning.mechanisms import Prior, published_prior
from planner.learning.next_run import next_runs
from planner.learning.plausible import require_plausible, require_positive
from planner.learning.posterior import posterior
from planner.learning.profile_file import profile_toml, write_profile
from planner.learning.refinement import refined
from planner.learning.spreads import learned_spreads
from planner.learning.text import LearnAnswer
from planner.learning.unexplained import distances_between, unexplained, weights
from planner.validation.measurement import lacks_definition
from planner.validation.pricing import why_impossible
from planner.validation.rows.case import case_of
from planner.validation.rows.implied import with_named_ends
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import BadCell, read_runs_file

MOST_RUNS: Final = 20
NOTHING: Final = "neither step time nor peak memory can be compared"
DIED: Final = (
    "ran out of memory, which is no figure to learn from; shardplan validate with the file says "
    "whether such a run fits"
)


@names_arguments("planner.learn")
def learn(
    runs: str | Path, output: str | Path | None = None, *, force: bool = False
) -> LearnAnswer:
    """Learn the switches and rates of a trainer from measured runs, and write its profile.

    ``runs``: a RUNS.csv (docs/reference/validate.md) of one trainer on one kind of accelerator;
    ``output``: the profile, which ``software=`` of ``fit`` and ``plan`` accepts.
    """
    if output is None:
        raise InputError("learn needs a file to write: output=FILE.toml")
    path, target = Path(runs), Path(output)
    if target.suffix != ".toml":
        raise InputError(f"{target}: must end in .toml (--software reads such files as profiles)")
    if target.exists() and not force:
        raise InputError(f"{target}: exists already; choose another name or add --force")
    file = read_runs_file(path)
    require_positive(path, file.rows)
    measured, skipped = [], {}
    for row in with_named_ends(file.rows):
        try:
            case = case_of(row)
        except Unpriceable as error:
            skipped[row.name] = str(error)
            continue
        run, impossible = measured_run(case), why_impossible(case)
        if run is None or impossible is not None:
            skipped[row.name] = impossible or (DIED if row.outcome == "oom" else NOTHING)
        else:
            measured.append(run)
            if lack := lacks_definition(row):
                skipped[row.name] = lack
    _require_one_trainer(path, measured, skipped)
    require_plausible(path, measured, log_predictions([run.case for run in measured], {}))
    prior = published_prior()
    answer = _learned(path, target, measured, prior, skipped, file.bad_cells)
    write_profile(target, answer.profile, force=force)
    scenario = measured[0].case.scenario
    chip, experts = scenario.cluster.accelerator, scenario.model.has_experts
    spreads = {
        "time": time_spread(str(target), chip, experts=experts),
        "memory": memory_spread(str(target), experts=experts),
    }
    return replace(answer, spreads=spreads)


def _require_one_trainer(path: Path, runs: Sequence[MeasuredRun], skipped: dict[str, str]) -> None:
    """Raise where no run can be used, or where runs need profiles or machines of their own."""
    if not runs:
        name, reason = next(iter(skipped.items()))
        rest = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        raise InputError(f"{path}: no run to learn from: {name}: {reason}{rest}")
    if len(runs) > MOST_RUNS:
        raise InputError(f"{path}: {len(runs)} runs (must be 1 to {MOST_RUNS}; five tell most)")
    for what, names in (
        ("trainers", [run.case.scenario.software.name for run in runs]),
        ("accelerators", [run.case.scenario.cluster.accelerator.name for run in runs]),
    ):
        if len(set(names)) > 1:
            first = {names[n]: runs[n].case.row.name for n in reversed(range(len(runs)))}
            words = ", ".join(f"{name} ({first[name]})" for name in sorted(first))
            raise InputError(
                f"{path}: runs of {len(first)} {what}: {words} (must be one; write a file for each)"
            )
    if runs[0].case.scenario.software.learned is not None:
        raise InputError(
            f"{path}: the runs name {runs[0].case.scenario.software.name}, which was learned "
            "(must be a profile of shardplan; add the earlier runs instead)"
        )
    if runs[0].case.scenario.cluster.accelerator.device == "cpu":
        raise InputError(
            f"{path}: runs on CPU processes: shardplan calibrate measures this machine"
        )


def _learned(
    path: Path,
    target: Path,
    runs: Sequence[MeasuredRun],
    prior: Prior,
    skipped: dict[str, str],
    bad_cells: tuple[BadCell, ...],
) -> LearnAnswer:
    cases, measured = [run.case for run in runs], np.array([run.logs for run in runs])
    software = cases[0].scenario.software
    known = effects(cases, prior)
    priced = ~np.isnan(known.base).any(axis=1)
    if not priced.any():
        raise InputError(f"{path}: no run to learn from: no price of {cases[0].row.name} is known")
    found = posterior(known, measured, prior)
    learned = refined(known, cases, measured, found, prior)
    explained = log_predictions(cases, learned.figures)
    apart = distances_between(cases, cases)
    weight, alone = weights(measured[:, 0] - explained[:, 0], apart, prior.likeness)
    after, checked = explained.copy(), explained.copy()
    after[:, 0] += likeness(apart, prior.likeness.length) @ weight
    checked[:, 0] = measured[:, 0] - alone
    spreads = learned_spreads(measured, known.base, checked, prior)
    conclusions = tuple(about_switches(known, found, learned, prior)) + tuple(
        about_rates(known, found, learned, software, prior)
    )
    ranges = {
        rate.figure: f": {rate_range(rate.figure, known, found, learned, software, prior)} (90 %)"
        for rate in known.rates
    }
    accelerator = cases[0].scenario.cluster.accelerator.name
    text = profile_toml(
        software,
        learned.figures,
        ranges,
        runs=len(runs),
        source=path.name,
        accelerator=accelerator,
        spreads=spreads,
        left=unexplained(cases, weight, f"learned from {path.name}", prior.likeness.length),
    )
    return LearnAnswer(
        path=target,
        source=path.name,
        trainer=software.name,
        accelerator=accelerator,
        runs=tuple(compared_runs(runs, known.base, explained, after)),
        conclusions=conclusions,
        next_runs=tuple(next_runs(cases, known, found, prior)),
        spreads={},
        profile=text,
        skipped=skipped,
        bad_cells=bad_cells,
    )
