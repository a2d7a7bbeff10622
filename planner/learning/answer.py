"""``learn``: a software profile of a user's own from one to five short runs."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import to_builtins

from cost_models.step_time.unexplained import likeness
from cost_models.uncertainty import memory_spread, time_spread
from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError
from hardware_profiles.fields import write_text_atomically
from hardware_profiles.software.profile import LearnedSpread, Unexplained
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from planner.learning.conclusions import (
    about_rates,
    about_switches,
    compared_runs,
    rate_range,
)
from planner.learning.effects import MeasuredRun, effects, log_predictions, measured_run
from planner.learning.mechanisms import Prior, figure_of, published_prior
from planner.learning.next_run import next_runs
from planner.learning.plausible import require_plausible, require_positive
from planner.learning.posterior import posterior
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


def profile_toml(
    software: SoftwareProfile,
    figures: Mapping[str, Any],
    where: Mapping[str, str],
    *,
    runs: int,
    source: str,
    accelerator: str,
    spreads: Mapping[str, LearnedSpread],
    left: Unexplained | None = None,
) -> str:
    """Return a file that inherits a trainer's profile and changes figures.

    ``software``: of the runs, with figures that words of their cells changed; ``figures``: learned
    values by "group.figure"; ``where``: 90 % ranges of rates; ``source``: file of the runs;
    ``left``: errors of step times that no mechanism explains.
    """
    import tomli_w

    plural = "s" if runs > 1 else ""
    learned = f"learned from {runs} run{plural} in {source} on {datetime.date.today()}"
    document: dict[str, Any] = {
        "inherits": software.name,
        "description": f"{software.name}, {learned}",
        "learned": {
            "runs": runs,
            "accelerator": accelerator,
            **{name: to_builtins(spread) for name, spread in spreads.items()},
            **({} if left is None else {"unexplained": to_builtins(left)}),
        },
    }
    sources = dict.fromkeys(_own(software), "the words of the runs' cells (shardplan validate)")
    values = {name: figure_of(software, name) for name in sources} | dict(figures)
    for name, value in values.items():
        group, _, figure = name.partition(".")
        text = sources.get(name, "")
        if name in figures:
            text = f"{learned}{where.get(name, '')}"
        if isinstance(value, float):
            value = float(f"{value:.4g}")
        entry = {"value": dict(value) if isinstance(value, Mapping) else value, "source": text}
        document.setdefault(group, {})[figure] = entry
    return tomli_w.dumps(document)


def _own(software: SoftwareProfile) -> list[str]:
    """Return the figures in which a trainer of a row differs from the profile of its name."""
    usual = software_profile(software.name)
    return [name for name in usual.sources if figure_of(software, name) != figure_of(usual, name)]


def write_profile(path: Path, text: str, *, force: bool) -> None:
    """Write the file; a profile that was loaded from it is read again."""
    write_text_atomically(path, text, force=force)
    software_profile.cache_clear()
