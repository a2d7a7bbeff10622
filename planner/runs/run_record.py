"""Reading of run.json: the plan of a run and its measurements."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from cost_models.plan_file import PlanFile, plan_file_from_dict
from cost_models.pricing.observed import check_ranks, peak_bytes
from hardware_profiles.errors import InputError
from hardware_profiles.fields import Amount, convert, read_json, tidied

RUN_FILE: Final = "run.json"
LOCK: Final = ".in-use"  # in the folder of a run: locked while its process lives
RUNNING: Final = "running"
KILLED: Final = "killed"  # without a word: run.json says running, but nobody holds the lock


class _Planned(Struct, frozen=True):
    plan: dict[str, Any]


class _Plan(Struct, frozen=True):
    contents: dict[str, Any]


class _Environment(Struct, frozen=True):
    device: str = "unknown"


class _Measured(Struct, frozen=True):
    step_seconds: Amount | None = None
    phase_seconds: dict[str, float] = {}
    exposed_communication_seconds: dict[str, float] | None = None  # by operation
    timed_steps: Annotated[int, Meta(ge=0, le=10**9)] = 0
    ranks: tuple[dict[str, Any], ...] = ()


class _RunFile(Struct, frozen=True):
    """The parts of a run.json that a comparison reads."""

    plan: _Plan
    measured: _Measured
    environment: _Environment = _Environment()
    status: str = "unknown"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Measurements of one run; None: the run ended before the measurement."""

    folder: Path
    status: str
    on_gpu: bool
    device: str
    plan_file: PlanFile
    step_seconds: float | None
    phase_seconds: Mapping[str, float]
    exposed_seconds: float | None  # of a step, exposed communication
    timed_steps: int
    ranks: tuple[Mapping[str, Any], ...]  # memory and communication of each rank in one step

    @property
    def busiest(self) -> Mapping[int, Mapping[str, Any]]:
        """The rank with the highest peak memory, by pipeline rank."""
        best: dict[int, Mapping[str, Any]] = {}
        for rank in self.ranks:
            stage = int(rank["stage"])
            if stage not in best or peak_bytes(rank) > peak_bytes(best[stage]):
                best[stage] = rank
        return dict(sorted(best.items()))


def _is_gone(folder: Path) -> bool:
    """Return whether no process holds the lock of a run's folder; False if that is unknown."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    finally:
        os.close(descriptor)
    return True


def read_run(path: Path) -> RunRecord:
    """Read the run.json of a run's folder, or the file itself."""
    file = path / RUN_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise InputError(f"{path}: holds no {RUN_FILE} (the folder of a run is expected)")
    document = read_json(file, "a run")
    values = tidied(document)
    if "contents" not in convert(values, _Planned, str(file)).plan:
        raise InputError(f"{file}: does not hold its plan; it was written by an older version")
    try:
        run = convert(values, _RunFile, str(file))
        check_ranks(run.measured.ranks, f"{file}: measured: ranks")
    except InputError as error:
        raise InputError(f"{error}; it is not a run.json of this version") from None
    measured = run.measured
    waits = measured.exposed_communication_seconds
    return RunRecord(
        folder=file.parent,
        status=KILLED if run.status == RUNNING and _is_gone(file.parent) else run.status,
        on_gpu=run.environment.device not in ("cpu", "unknown"),
        device=run.environment.device,
        plan_file=plan_file_from_dict(document["plan"]["contents"], f"{file}: plan: contents"),
        step_seconds=measured.step_seconds,
        phase_seconds=measured.phase_seconds,
        exposed_seconds=None if waits is None else sum(waits.values()),
        timed_steps=measured.timed_steps,
        ranks=measured.ranks,
    )
