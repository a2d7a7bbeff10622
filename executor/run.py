"""The command ``run``: check, start the ranks, show and keep what they measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from executor.launch import REPORT_TO, Emit, Task, as_reporting_rank, by_fork, by_torchrun
from executor.preflight import Prepared, Torchrun, check_machine, check_world, notes, prepare
from executor.progress import Progress
from executor.report import (
    SCHEMA_VERSION,
    Row,
    as_text,
    claim_folder,
    compare,
    run_document,
    write_run,
)
from hardware_profiles.errors import InputError, RunError

DRY_STEPS: Final = 2  # the second one has optimizer states, as every later one


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    place = Torchrun.here()
    if place is not None and REPORT_TO in os.environ:
        return as_reporting_rank(place.rank, lambda emit: _task(options, _prepare(options))(emit))
    prepared = _prepare(options)
    if place is not None:
        check_world(prepared.file, place)
        return _join(options, prepared, place)
    gpus = check_machine(prepared.file)
    if gpus and options.launcher == "fork":
        raise InputError("--launcher fork: a process that uses a GPU cannot be forked off")
    said = [*prepared.notes, *notes(prepared.file, gpus)]
    with _folder(options) as folder:
        for note in said:
            print(f"note: {note}", file=sys.stderr)
        if options.launcher == "torchrun":  # every rank imports torch and transformers first
            ranks = prepared.file.plan.world_size
            print(f"starting torchrun --nproc-per-node {ranks} ...", file=sys.stderr, flush=True)
        with _progress(options) as progress:
            if options.launcher == "fork":
                answer = by_fork(prepared.file, _task(options, prepared), progress)
            else:
                answer = by_torchrun(prepared.file, arguments, progress, gpus=gpus)
        return finish(options, prepared, {"notes": said, **answer}, folder)


def _prepare(options: argparse.Namespace) -> Prepared:
    return prepare(options.plan, options.data, seed=options.seed, tokenizer=options.tokenizer)


def _join(options: argparse.Namespace, prepared: Prepared, place: Torchrun) -> int:
    """Be one rank of a torchrun that the user started; rank 0 reports."""
    task = _task(options, prepared)
    if place.rank != 0:
        task(lambda event: None)
        return 0
    with _folder(options) as folder:
        with _progress(options) as progress:
            answer = task(progress)
        return finish(options, prepared, {"notes": list(prepared.notes), **answer}, folder)


def _progress(options: argparse.Namespace) -> Progress:
    return Progress(_steps(options), quiet=options.verify)


def _steps(options: argparse.Namespace) -> int:
    return DRY_STEPS if options.dry_run else int(options.steps)


def _task(options: argparse.Namespace, prepared: Prepared) -> Task:
    """Return what every rank does."""

    def task(emit: Emit) -> Any:
        from executor.session import Training, proof, train

        if options.verify:
            return proof(prepared.file, options.seed)
        training = Training(
            steps=_steps(options),
            seed=options.seed,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
        )
        return train(prepared.file, prepared.corpus, training, emit)

    return task


@contextlib.contextmanager
def _folder(options: argparse.Namespace) -> Iterator[Path | None]:
    """Make the folder of the run before it starts; take it away if nothing came into it."""
    if options.dry_run or options.verify:
        yield None
        return
    folder = claim_folder(options.output)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty: the run is in it
            folder.rmdir()


def finish(
    options: argparse.Namespace, prepared: Prepared, answer: dict[str, Any], folder: Path | None
) -> int:
    """Print the answer of the ranks, write run.json; return the exit code."""
    if options.verify:
        return _finish_verify(options, prepared, answer)
    rows = compare(
        prepared.file.prediction, answer["measured"], prepared.file.workload.tokens_per_step
    )
    document = run_document(prepared.identity(), _recorded(options), answer, rows)
    path = None if folder is None else write_run(folder, document)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        _print_text(answer, rows, path)
    return 0


def _recorded(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that shape the result, as JSON values."""
    kept = ("data", "tokenizer", "seed", "learning_rate", "weight_decay", "max_grad_norm")
    return {**{name: getattr(options, name) for name in kept}, "steps": _steps(options)}


def _print_text(answer: dict[str, Any], rows: list[Row], path: Path | None) -> None:
    steps = answer["steps"]
    print(f"loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f} in {len(steps)} steps\n")
    print(as_text(rows, on_gpu=answer["environment"]["device"] != "cpu"))
    print("\nNothing was kept (dry run)." if path is None else f"\nWritten: {path}")


def _finish_verify(options: argparse.Namespace, prepared: Prepared, answer: dict[str, Any]) -> int:
    """Print how far the run is from the single process; raise a RunError where it is too far."""
    size = answer["collective_bytes"]
    if options.json:
        document = {"schema_version": SCHEMA_VERSION, "plan": prepared.identity(), **answer}
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        for what in ("loss", "norm", "gradient", "weight"):
            worst = answer.get(f"worst_{what}")
            named = f"  (largest: {worst})" if worst else ""
            print(f"{what + ' difference':<20} {answer[f'{what}_difference']:.1e}{named}")
        print(
            f"{'collective bytes':<20} {size['counted']:,} counted, {size['predicted']:,} predicted"
        )
        print(f"float64, {answer['processes']} ranks against one process, relative differences")
    tolerance = answer["tolerance"]
    for what in ("loss", "norm", "gradient", "weight"):
        if not answer[f"{what}_difference"] <= tolerance:
            raise RunError(
                f"--verify: the {what} differs by {answer[f'{what}_difference']:.1e} from the "
                f"single process (at most {tolerance:.0e})"
            )
    for row in answer["unexpected_traffic"]:
        raise RunError(
            f"--verify: rank {row['rank']} moved {row['counted_bytes']:,.0f} bytes by "
            f"{row['kind']} ({row['axis']}), {row['predicted_bytes']:,.0f} were predicted"
        )
    return 0
