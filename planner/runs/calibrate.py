"""``calibrate``: correct the rates and links of a cluster by the measured step time of a run.

Two factors make the predicted step of the run's plan equal to the measured one: one on the rates of
the accelerator, one on its links (only if the run measured exposed communication). With several
runs, each factor is the median over the runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from cost_models.pricing.prediction import TimePrediction, predict, scenario_of
from cost_models.units import format_seconds
from hardware_profiles.arguments import names_arguments
from hardware_profiles.cluster.calibration import (
    HIGHEST,
    LOWEST,
    Calibration,
    RunFactors,
    calibrated,
    forget_calibration,
    load_calibration,
    save_calibration,
    write_cluster_toml,
)
from hardware_profiles.cluster.cluster_json import cluster_to_dict
from hardware_profiles.cluster.local_machine import uncalibrated_here
from hardware_profiles.cluster.measurement import available_cores, cache_path, this_host
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner.request.executor_process import Say, measure
from planner.runs.compare import exposed
from planner.runs.run_record import RunRecord, read_run
from planner.text.answer import SCHEMA_VERSION, Answer

FEWEST_STEPS: Final = 3  # timed ones
WAITED_FOR_OTHERS: Final = "ranks waited for one another, not for the links"
NEAR_LOWEST: Final = 1.01 * LOWEST  # a fit that ends there found no factor
SMALLEST_SHARE: Final = 0.02  # of the step: shorter waits do not determine the links


@dataclass(frozen=True, slots=True, repr=False)
class CalibratedCluster(Answer):
    """A cluster calibrated with runs, and the predicted step before and after."""

    calibration: Calibration
    cluster: Cluster  # calibrated
    of_this_machine: bool
    before_seconds: float  # predicted step of the run's plan, without this run
    after_seconds: float
    measured_seconds: float
    kept_in: str = ""  # the file with the calibration
    waits_are_links: bool = True  # the links explain the measured waits

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "cluster": self.cluster.name,
            "rates_factor": self.calibration.rates,
            "links_factor": self.calibration.links,
            "waits_are_links": self.waits_are_links,
            "runs": [run.run for run in self.calibration.runs],
            "measured_step_seconds": self.measured_seconds,
            "predicted_before_seconds": self.before_seconds,
            "predicted_after_seconds": self.after_seconds,
            "kept_in": self.kept_in,
        }

    def notebook_parts(self) -> Iterator[str]:
        """Yield the error before and after as a table, and the factors."""
        from planner.text.html_page import note, table
        from planner.text.notebook import headline

        measured = self.measured_seconds
        steps = {"before": self.before_seconds, "now": self.after_seconds}
        errors = {name: f"{100 * (step / measured - 1):+z.1f} %" for name, step in steps.items()}
        words = f"predicted {errors['now']} from the measured step, {errors['before']} before."
        yield headline(self.cluster.name, words)
        rows = [("measured", format_seconds(measured), "")]
        rows += [(f"predicted {n}", format_seconds(s), errors[n]) for n, s in steps.items()]
        yield table(rows, ("step", "", "error"))
        factors = self.calibration
        words = f"Rates x {factors.rates:.3g}, links x {factors.links:.3g}, from {factors.words}"
        yield note(f"{words}; saved in {self.kept_in}")

    def __str__(self) -> str:
        measured, factors = self.measured_seconds, self.calibration
        links = any(run.links is not None for run in factors.runs)
        why = "not measured" if self.waits_are_links else WAITED_FOR_OTHERS
        return (
            f"measured   {format_seconds(measured)} a step\n"
            f"predicted  {format_seconds(self.before_seconds)} before "
            f"({100 * (self.before_seconds / measured - 1):+z.1f} %), "
            f"{format_seconds(self.after_seconds)} now "
            f"({100 * (self.after_seconds / measured - 1):+z.1f} %)\n"
            f"factors    from {factors.words}: rates x {factors.rates:.3g}, "
            + (f"links x {factors.links:.3g}" if links else f"links as before ({why})")
            + f"\nsaved in   {self.kept_in}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class MeasuredMachine(Answer):
    """The machine of this process after a new measurement."""

    cluster: Cluster
    kept_in: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "cluster": self.cluster.name,
            "figures": cluster_to_dict(self.cluster),
            "kept_in": self.kept_in,
        }

    def notebook_parts(self) -> Iterator[str]:
        """Yield the figures that were measured."""
        from planner.text.html_page import note, table
        from planner.text.notebook import headline

        chip, links = self.cluster.accelerator, self.cluster.tiers[-1]
        yield headline(self.cluster.name, f"{chip.name}, {self.cluster.num_gpus} processes.")
        rows = [
            (f"rate in {n}", f"{f.value / 1e9:,.0f} GFLOP/s") for n, f in chip.peak_flops.items()
        ]
        rows.append(("memory", f"{chip.memory_bandwidth.value / 1e9:,.1f} GB/s"))
        rows.append(("links", f"{links.bandwidth.value / 1e9:,.2f} GB/s"))
        yield table(rows, ("of each process", ""))
        yield note(f"saved in {self.kept_in}")

    def __str__(self) -> str:
        chip, links = self.cluster.accelerator, self.cluster.tiers[-1]
        rates = ", ".join(
            f"{name} {figure.value / 1e9:,.0f} GFLOP/s" for name, figure in chip.peak_flops.items()
        )
        return (
            f"{self.cluster.name}: {chip.name}, {self.cluster.num_gpus} processes; of each: "
            f"{rates}, memory {chip.memory_bandwidth.value / 1e9:,.1f} GB/s, "
            f"links {links.bandwidth.value / 1e9:,.2f} GB/s\n"
            f"saved in   {self.kept_in}"
        )


@names_arguments("planner.calibrate")
def calibrate(
    runs: str | Path | Sequence[str | Path] = (),
    *,
    processes: int | None = None,
    output: str | Path | None = None,
    force: bool = False,
    say: Say = print,
) -> CalibratedCluster | MeasuredMachine:
    """Calibrate a cluster with folders of runs, or measure this machine with CPU processes.

    The result is stored in the user's cache if it is of this machine, and in ``output`` (TOML, a
    CLUSTER argument) if given. ``say`` receives messages about the progress.
    """
    folders = [Path(run) for run in ([runs] if isinstance(runs, (str, Path)) else runs)]
    output = None if output is None else Path(output)
    if bool(folders) == (processes is not None):
        raise InputError("calibrate needs either --from RUN_DIR or --processes N")
    if processes is not None:
        measure(processes, say)
        cluster = uncalibrated_here(processes)
        forget_calibration(cluster.accelerator.name, cluster.num_gpus)  # of the old figures
        stored = str(cache_path(processes))
        if output is not None:
            write_cluster_toml(output, cluster, force=force)
            stored += f" and {output}"
        return MeasuredMachine(cluster, stored)
    for path in folders[:-1]:
        _store(calibrate_with_run(path), None, force=force)
    return _store(calibrate_with_run(folders[-1]), output, force=force)


def _store(result: CalibratedCluster, output: Path | None, *, force: bool) -> CalibratedCluster:
    places = []
    if result.of_this_machine:
        places.append(str(save_calibration(result.calibration)))
    if output is not None:
        write_cluster_toml(output, result.cluster, force=force)
        places.append(str(output))
    if not places:
        raise InputError(
            f"the run's plan is for {result.cluster.name}, not for `here`: name a file for "
            "the calibrated cluster with -o FILE.toml"
        )
    return replace(result, kept_in=" and ".join(places))


def calibrate_with_run(path: Path) -> CalibratedCluster:
    """Return the cluster calibrated with one run, without writing a file."""
    run = read_run(path)
    measured = _usable(run)
    base, of_this_machine = _base_cluster(run)
    name, count = base.accelerator.name, base.num_gpus
    stored = load_calibration(name, count) if of_this_machine else None
    before = base if stored is None else calibrated(base, stored)
    factors = solve(run, base, measured)
    waits_are_links = factors is not None and _by_links(base, factors, of_this_machine)
    if not waits_are_links:
        factors = solve(run, base, measured, with_links=False)
    if factors is None:
        raise InputError(
            f"{run.folder}: a step took {format_seconds(measured)} (predicted: "
            f"{format_seconds(_step(run, base))}), which no factor from {LOWEST:g} to {HIGHEST:g} "
            "on the rates explains; repeat the run while nothing else runs on the machine"
        )
    calibration = (stored or Calibration(this_host(), name, count, ())).with_run(factors)
    cluster = calibrated(base, calibration)
    return CalibratedCluster(
        calibration=calibration,
        cluster=cluster,
        of_this_machine=of_this_machine,
        before_seconds=_step(run, before),
        after_seconds=_step(run, cluster),
        measured_seconds=measured,
        waits_are_links=waits_are_links,
    )


def _usable(run: RunRecord) -> float:
    if run.step_seconds is None or run.timed_steps < FEWEST_STEPS:
        raise InputError(
            f"{run.folder}: timed {run.timed_steps} steps (at least {FEWEST_STEPS} are needed; the "
            "first step and the profiled one are not timed)"
        )
    accelerator = run.plan_file.cluster.accelerator
    if not run.on_gpu and accelerator.device != "cpu":
        raise InputError(
            f"{run.folder}: a plan for {run.plan_file.cluster.name} that ran on CPU processes; it "
            "cannot calibrate that cluster"
        )
    return run.step_seconds


def _base_cluster(run: RunRecord) -> tuple[Cluster, bool]:
    """Return the cluster without calibration, and whether it is this machine."""
    cluster = run.plan_file.cluster
    if cluster.name.split(":")[0] != "here":
        return cluster, False
    found = uncalibrated_here(cluster.num_gpus)
    if found.accelerator.name != cluster.accelerator.name:
        raise InputError(
            f"{run.folder}: ran on {cluster.accelerator.name}, this machine is "
            f"{found.accelerator.name}"
        )
    return found, True


def _predicted(run: RunRecord, cluster: Cluster) -> TimePrediction:
    file = replace(run.plan_file, cluster=cluster)
    return predict(scenario_of(file), file.plan, file.layer_ranges).time


def _step(run: RunRecord, cluster: Cluster) -> float:
    return _predicted(run, cluster).step_seconds


def _by_links(base: Cluster, factors: RunFactors, of_this_machine: bool) -> bool:
    """Whether a factor on the links, if there is one, explains the measured waits."""
    if factors.links is None:
        return True
    return factors.links > NEAR_LOWEST and _below_peak(base, factors, of_this_machine)


def _below_peak(base: Cluster, factors: RunFactors, of_this_machine: bool) -> bool:
    """Whether matrix products stay below the peak of the accelerator.

    A process uses more than its share of the processor while others wait.
    """
    chip, shared = base.accelerator, 1.0
    if of_this_machine and chip.device == "cpu":
        shared = max(1.0, base.num_gpus / available_cores())
    return all(
        factors.rates * rate.value <= shared * chip.peak_flops[name].value
        for name, rate in chip.achievable_flops.items()
        if name in chip.peak_flops
    )


def solve(
    run: RunRecord, base: Cluster, measured: float, *, with_links: bool = True
) -> RunFactors | None:
    """Return the factors that fit the prediction to the measurement (least squares of logs).

    None where none from LOWEST to HIGHEST does within 5 %.
    """
    from scipy.optimize import least_squares

    waits = run.exposed_seconds
    known = with_links and waits is not None and waits >= SMALLEST_SHARE * measured
    known = known and exposed(_predicted(run, base)) > 0.0
    folder = str(run.folder.resolve())

    def factors(x: Any) -> RunFactors:
        return RunFactors(folder, math.exp(x[0]), math.exp(x[1]) if known else None)

    def residuals(x: Any) -> list[float]:
        found = factors(x)
        one = Calibration("", "", 1, (found,))
        time = _predicted(run, calibrated(base, one))
        off = [math.log(time.step_seconds / measured)]
        if known:
            assert waits is not None
            off.append(math.log(max(exposed(time), 1e-12) / waits))
        return off

    bound = math.log(HIGHEST), math.log(LOWEST)
    start = np.zeros(2 if known else 1)
    start[0] = np.clip(residuals(start)[0], bound[1], bound[0])
    fit = least_squares(residuals, start, bounds=(bound[1], bound[0]), xtol=1e-12, ftol=1e-12)
    return None if abs(residuals(fit.x)[0]) > 0.05 else factors(fit.x)
