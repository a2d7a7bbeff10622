"""``observe``: a log of another trainer as a row of RUNS.csv, next to the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from cost_models.units import GIB, format_seconds
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from planner.observation.logs.reading import read_log
from planner.observation.run_row import append_row, measured_cells, model_cells
from planner.request.clusters import cluster_of
from planner.request.model import model_of
from planner.text.answer import SCHEMA_VERSION, Answer
from planner.text.paragraphs import labelled_line
from planner.validation.pricing import CasePrediction, predict_cases
from planner.validation.rows.case import case_of
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import Row

WARM_UP: Final = 5  # logged steps that are left out


@dataclass(frozen=True, slots=True, repr=False)
class Observation(Answer):
    """One run read from a log: its cells, its prediction, and where it was written."""

    log: Path
    trainer: str
    steps: int
    cells: Mapping[str, Any]
    prediction: CasePrediction | None
    reason: str | None  # why it is not priced
    written: Path | None
    assumptions: tuple[str, ...] = ()  # values that neither the log nor an option gives

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        found = self.prediction
        return {
            "schema_version": SCHEMA_VERSION,
            "log": str(self.log),
            "trainer": self.trainer,
            "steps": self.steps,
            "row": dict(self.cells),
            "predicted": None
            if found is None
            else {"step_seconds": found.step, "peak_bytes": found.peak},
            "not_priced": self.reason,
            "assumptions": list(self.assumptions),
            "written": None if self.written is None else str(self.written),
        }

    def __str__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        words = f", {'memory ran out' if self.cells['outcome'] == 'oom' else steps}"
        if not self.steps and self.cells["outcome"] != "oom":
            words = ""
        lines = [f"{self.log}: {self.trainer}{words}"]
        step, peak = self.cells.get("step_time_s"), self.cells.get("peak_memory_gib")
        predicted = self.prediction
        if step:
            line = f"Step    measured {format_seconds(step)}"
            if predicted is not None:
                error = 100 * (predicted.step / step - 1)
                line += f", predicted {format_seconds(predicted.step)} ({error:+z.1f} %)"
            lines.append(line)
        elif rate := self.cells.get("tokens_per_second_per_gpu"):
            lines.append(
                f"Speed   measured {rate:,.0f} tokens/s per device (for the step, give "
                "--global-batch-size)"
            )
        if peak:
            line = f"Memory  measured {peak:.1f} GiB ({self.cells['memory_definition']})"
            if predicted is not None:
                line += f", predicted {predicted.peak / GIB:.1f} GiB"
            lines.append(line)
        if self.assumptions:
            lines.append(labelled_line("Assumed", self.assumptions, " (--json: all)", "; "))
        if self.reason is not None:
            lines.append(f"Not priced: {self.reason}")
        if self.written is not None:
            lines.append(f"added to {self.written}: shardplan learn {self.written} -o mine.toml")
        return "\n".join(lines)


def observe(
    log: Path,
    *,
    model: str | None = None,
    cluster: str | None = None,
    output: Path | None = None,
    warm_up: int = WARM_UP,
    **given: Any,
) -> Observation:
    """Read a log of another trainer; ``given``: columns of RUNS.csv that the log does not state.

    Given columns replace those of the log. ``output``: a table of runs that gets the row.
    """
    if given.get("software") is not None:
        software_profile(given["software"])  # reports an unknown one
    readings, assumed = read_log(log), list[str]()
    cells: dict[str, Any] = {
        "row_id": f"{log.stem}-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}",
        "source": str(log),
        "framework": readings.trainer,
        **readings.cells,
    }
    if model is not None:
        stated = model_of(model)
        cells |= model_cells(stated)
        if "seq_len" not in cells and given.get("seq_len") is None:
            cells["seq_len"] = min(stated.max_seq_len or 4096, 4096)
            assumed.append(f"seq_len {cells['seq_len']}")
    if cluster is not None:
        found = cluster_of(cluster)
        if cells.get("num_gpus", found.num_gpus) != found.num_gpus:
            raise InputError(
                f"--cluster {cluster}: has {found.num_gpus} accelerators, but {log} is of a run on "
                f"{cells['num_gpus']}"
            )
        on_cpu = found.accelerator.device == "cpu"
        cells |= {
            "gpu": "here" if on_cpu else found.accelerator.name,
            "num_gpus": found.num_gpus,
            "gpus_per_node": min(found.gpus_per_node, found.num_gpus),
        }
    cells |= {name: value for name, value in given.items() if value is not None}
    if "seq_len" not in cells:
        options = {
            "--model MODEL": model is None and "hidden_size" not in cells,
            "--cluster CLUSTER": "gpu" not in cells,
            "--seq-len N": True,
            "--global-batch-size N": "global_batch_size" not in cells,
        }
        missing = ", ".join(option for option, lacks in options.items() if lacks)
        raise InputError(f"{log}: the log does not state everything; add {missing}")
    gpus, batch = cells.get("num_gpus"), cells.get("global_batch_size")
    tokens = cells["seq_len"] * batch / gpus if gpus and batch else None
    measured = readings.measured(warm_up, tokens, batch)
    cells |= measured_cells(measured, tokens)
    if measured.step_seconds is None and readings.tokens_per_second_per_gpu:
        rates = readings.tokens_per_second_per_gpu
        cells["tokens_per_second_per_gpu"] = rates[len(rates) // 2]
    cells["derived"] = f"{measured.steps} steps after {warm_up} of warm-up"
    prediction, reason, defaults = _predict(cells)
    if "gpu" not in cells:
        reason = "the log does not state the accelerator; add --cluster CLUSTER"
    assumptions = (*assumed, *defaults)
    if output is not None:
        append_row(output, cells)
    return Observation(
        log, readings.trainer, measured.steps, cells, prediction, reason, output, assumptions
    )


def _predict(cells: Mapping[str, Any]) -> tuple[CasePrediction | None, str | None, tuple[str, ...]]:
    """Return the prediction for a row, or the reason why it has none; and the defaults it takes."""
    try:
        row = msgspec.convert({"line": 1, **cells}, Row, strict=False)
        case = case_of(row)
    except (Unpriceable, InputError, msgspec.ValidationError) as error:
        return None, str(error), ()
    found, refused = predict_cases([case])
    return found.get(row.name), refused.get(row.name), case.defaults
