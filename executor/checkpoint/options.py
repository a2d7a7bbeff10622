"""Checkpoint options of a run, and the checkpoints they refer to. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from executor.checkpoint.format.folder import CheckpointFolder, is_complete_name
from executor.checkpoint.format.index import INDEX_NAME
from executor.config.bounds import Count
from executor.run_folder import RUNS, SUBFOLDER
from hardware_profiles.errors import InputError
from hardware_profiles.options import Option

AUTO: Final = "auto"  # --resume without a path: the newest checkpoint of the run's folder
CHECKPOINTS: Final = "checkpoints"  # title of the options in the help


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """When to save, and what to start from; the same on every rank."""

    checkpoint_every: Annotated[
        Count | None,
        Option(
            metavar="N",
            common=True,
            group=CHECKPOINTS,
            help="save every N steps and at the end (default: at the end of a resumed run, and "
            "when a run receives a stop signal)",
        ),
    ] = None
    keep: Annotated[
        Count,
        Option(
            metavar="K",
            group=CHECKPOINTS,
            help="keep the K newest checkpoints (default: {default})",
        ),
    ] = 2
    keep_every: Annotated[
        Count | None,
        Option(
            metavar="N", group=CHECKPOINTS, help="never delete the checkpoint of every N-th step"
        ),
    ] = None
    resume: Annotated[
        str | None,  # AUTO, a run's folder, or a checkpoint
        Option(
            metavar="[DIR|auto]",
            common=True,
            group=CHECKPOINTS,
            optional_value=AUTO,
            help="go on from the newest complete checkpoint of the --output folder (auto), of "
            "another run, or from a given one; the plan may be another one",
        ),
    ] = None
    init_from: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            group=CHECKPOINTS,
            help="start with the weights of a Hugging Face folder (safetensors)",
        ),
    ] = None
    allow_other_data: Annotated[
        bool, Option(group=CHECKPOINTS, help="resume although the data have changed")
    ] = False


@dataclass(frozen=True, slots=True)
class ResumeSource:
    """Checkpoints that a resumed run may continue from."""

    candidates: tuple[Path, ...]  # checkpoints, the newest first
    run: Path | None  # the run's folder that contains them


def resume_source(resume: str, output: Path | None) -> ResumeSource:
    """Return the checkpoints that ``--resume`` refers to.

    AUTO: those of the output folder, or of the newest run in ``runs``; none is not an error, since
    a restarted job may not have reached its first checkpoint. With another path and an output
    folder, the run may be a restart as well: checkpoints in the output folder come first.
    """
    if resume == AUTO:
        run = output if output is not None else _newest_run()
        return ResumeSource(() if run is None else _complete(run / SUBFOLDER), run)
    place = named_source(Path(resume), "--resume ")
    if output is None or (place.run is not None and place.run.resolve() == output.resolve()):
        return place
    return ResumeSource((*_complete(output / SUBFOLDER), *place.candidates), output)


def resume_after_restart(resume: str | None, output: Path | None) -> str:
    """Return the resume option of restarted ranks: this run's own checkpoints, if any.

    Checkpoints newer than the one that the run resumed from were set aside when it began.
    """
    own = output is not None and bool(_complete(output / SUBFOLDER))
    return AUTO if own or resume is None else resume


def named_source(named: Path, option: str = "") -> ResumeSource:
    """Return the named checkpoint, or those of a run; InputError if there are none."""
    if is_complete_name(named.name) or (named / INDEX_NAME).exists():
        if not named.is_dir():
            raise InputError(f"{option}{named}: no such folder")
        return ResumeSource(
            (named,), named.parent.parent if named.parent.name == SUBFOLDER else None
        )
    for folder in (named / SUBFOLDER, named):
        if candidates := _complete(folder):
            run = folder.parent if folder.name == SUBFOLDER else None
            return ResumeSource(candidates, run)
    reason = "no complete checkpoint in it (runs save them with --checkpoint-every)"
    reason = reason if named.is_dir() else "no such folder"
    raise InputError(f"{option}{named}: {reason}")


def newest_checkpoints(run: Path) -> tuple[Path, ...]:
    """Return the complete checkpoints in the folder of a run, the newest first."""
    return _complete(run / SUBFOLDER)


def _complete(folder: Path) -> tuple[Path, ...]:
    return tuple(CheckpointFolder(folder).complete())


def _newest_run() -> Path | None:
    """Return the run in ``runs`` with the newest checkpoint."""
    runs = [path.parent for path in RUNS.glob(f"*/{SUBFOLDER}") if _complete(path)]
    return max(runs, key=lambda run: _complete(run / SUBFOLDER)[0].stat().st_mtime, default=None)
