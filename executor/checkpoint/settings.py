"""What a user asks for about checkpoints, and which ones that means. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from executor.checkpoint.folder import SUBFOLDER, CheckpointFolder, is_complete_name
from executor.checkpoint.index import NAME
from executor.run_folder import RUNS
from hardware_profiles.errors import InputError

AUTO: Final = "auto"  # --resume without a place: the newest checkpoint of the run's folder


@dataclass(frozen=True, slots=True)
class Saving:
    """When to save, and what to start from; the same on every rank."""

    every: int | None = None  # steps; None: where told to stop, at the end of a resumed run
    keep: int = 2
    keep_every: int | None = None  # steps whose checkpoints are never deleted
    resume: str | None = None  # AUTO, a run's folder, or a checkpoint
    init_from: Path | None = None  # a Hugging Face folder
    allow_other_data: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a resumed run goes on."""

    candidates: tuple[Path, ...]  # checkpoints, the newest first
    run: Path | None  # the run's folder that they lie in


def find(resume: str, output: Path | None) -> Place:
    """Return the checkpoints that ``--resume`` means.

    AUTO: those of the output folder, or of the newest run in ``runs``; none is no error, since a
    job that is started again with the same command may not have come as far as its first one. With
    another place and an output folder, the run may have been started again as well: what is in the
    output folder comes first.
    """
    if resume == AUTO:
        run = output if output is not None else _newest_run()
        return Place(() if run is None else _complete(run / SUBFOLDER), run)
    place = named_place(Path(resume), "--resume ")
    if output is None or (place.run is not None and place.run.resolve() == output.resolve()):
        return place
    return Place((*_complete(output / SUBFOLDER), *place.candidates), output)


def resume_again(resume: str | None, output: Path | None) -> str:
    """Return what ranks resume from that are started again: what this run saved itself, if it did.

    What was newer than the checkpoint that the run was told to resume from was set aside when it
    began.
    """
    own = output is not None and bool(_complete(output / SUBFOLDER))
    return AUTO if own or resume is None else resume


def named_place(named: Path, option: str = "") -> Place:
    """Return the checkpoint that is named, or those of a run; InputError if there are none."""
    if is_complete_name(named.name) or (named / NAME).exists():
        if not named.is_dir():
            raise InputError(f"{option}{named}: no such folder")
        return Place((named,), named.parent.parent if named.parent.name == SUBFOLDER else None)
    for folder in (named / SUBFOLDER, named):
        if candidates := _complete(folder):
            run = folder.parent if folder.name == SUBFOLDER else None
            return Place(candidates, run)
    reason = "no complete checkpoint in it (runs save them with --checkpoint-every)"
    reason = reason if named.is_dir() else "no such folder"
    raise InputError(f"{option}{named}: {reason}")


def _complete(folder: Path) -> tuple[Path, ...]:
    return tuple(CheckpointFolder(folder).complete())


def _newest_run() -> Path | None:
    """Return the run in ``runs`` that saved a checkpoint last."""
    runs = [path.parent for path in RUNS.glob(f"*/{SUBFOLDER}") if _complete(path)]
    return max(runs, key=lambda run: _complete(run / SUBFOLDER)[0].stat().st_mtime, default=None)
