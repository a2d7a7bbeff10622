"""A run.json, read and checked: the plan that ran, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cost_models.plan_file import PlanFile, plan_file_from_fields
from cost_models.pricing.observed import measured_collective_bytes, peak_bytes
from hardware_profiles.errors import InputError
from hardware_profiles.fields import Fields, read_json

RUN_FILE: Final = "run.json"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one run measured; None: it ended before that was known."""

    folder: Path
    status: str
    on_gpu: bool
    device: str
    plan_file: PlanFile
    step_seconds: float | None
    phase_seconds: Mapping[str, float]
    exposed_seconds: float | None  # in which a step waited for communication alone
    timed_steps: int
    ranks: tuple[Mapping[str, Any], ...]  # memory and communication of each rank in one step

    @property
    def busiest(self) -> Mapping[int, Mapping[str, Any]]:
        """The rank with the highest peak on every pipeline rank."""
        best: dict[int, Mapping[str, Any]] = {}
        for rank in self.ranks:
            stage = int(rank["stage"])
            if stage not in best or peak_bytes(rank) > peak_bytes(best[stage]):
                best[stage] = rank
        return dict(sorted(best.items()))


def read_run(path: Path) -> RunRecord:
    """Read the run.json of a run's folder, or the file itself."""
    file = path / RUN_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise InputError(f"{path}: holds no {RUN_FILE} (the folder of a run is expected)")
    fields = Fields(read_json(file, "a run"), str(file))
    plan = fields.sub("plan")
    if "contents" not in plan:
        raise InputError(f"{file}: does not hold its plan; it was written by an older version")
    environment, measured = fields.sub("environment", {}), fields.sub("measured")
    device = environment.text("device", "unknown")
    try:
        phases = {str(k): float(v) for k, v in measured.sub("phase_seconds", {}).values.items()}
        waits = measured.values.get("exposed_communication_seconds")  # by operation
        record = RunRecord(
            folder=file.parent,
            status=fields.text("status", "unknown"),
            on_gpu=device not in ("cpu", "unknown"),
            device=device,
            plan_file=plan_file_from_fields(plan.sub("contents")),
            step_seconds=measured.number("step_seconds", None),
            phase_seconds=phases,
            exposed_seconds=None if waits is None else sum(map(float, waits.values())),
            timed_steps=measured.integer("timed_steps", 0),
            ranks=tuple(measured.items("ranks", ())),
        )
        measured_collective_bytes(record.ranks)  # whatever is wrong in the ranks comes up here
        for rank in record.ranks:
            peak_bytes(rank)
            dict(rank["memory"]["parts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{file}: is not a run.json of this version ({error!r})") from None
    return record
