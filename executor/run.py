"""The command ``run``: check, start the ranks, print and record their measurements."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.checkpoint.format.folder import is_complete_name, step_of
from executor.checkpoint.format.hugging_face_names import require_weights
from executor.checkpoint.options import newest_checkpoints, resume_after_restart, resume_source
from executor.cli.parser import STOPPED_CODE
from executor.cli.run_options import RunOptions
from executor.launch.preflight import (
    PreparedRun,
    TorchrunRank,
    check_machine,
    check_world,
    gpu_names,
    notes,
    prepare,
)
from executor.launch.start_ranks import (
    REPORT_TO,
    Emit,
    Task,
    is_restarted,
    run_as_launched_rank,
    run_as_torchrun_rank,
    run_by_fork,
    run_by_torchrun,
    single_node,
)
from executor.multinode.announcement import NodeDescription
from executor.multinode.coordinator import MultiNodeRun, run_on_nodes
from executor.multinode.nodes import NodeSettings
from executor.processes.reporter import Reporter
from executor.records.progress import ProgressDisplay
from executor.records.recorder import FAILED, INTERRUPTED, STOPPED, Recorder
from executor.records.report import SCHEMA_VERSION, as_text
from executor.records.tensorboard import require_tensorboard
from executor.run_folder import claimed_folder
from hardware_profiles.cluster.measurement import busy_words
from hardware_profiles.errors import InputError, Interrupted, RunError, ShardplanError
from hardware_profiles.progress import status_line
from hardware_profiles.terminal import say, show

# runs all ranks, or is one of them, in the folder of the run; returns the answer of rank 0
Start = Callable[[Emit, Path | None], Any]


def run(options: RunOptions, arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    place = TorchrunRank.from_environment()
    if is_restarted():  # torchrun, or all nodes together, have started the ranks again
        resume = resume_after_restart(options.checkpoints.resume, options.output)
        options = options.with_resume(resume)
    if place is not None and REPORT_TO in os.environ:
        task: Task = lambda tell: _task(options, _prepare(options), options.output)(tell)  # noqa: E731
        return run_as_launched_rank(place, task, options.supervision)
    prepared = _prepare(options)
    if _is_done(options):
        return 0
    if place is not None:
        check_world(prepared.file, place)
        return _join(options, prepared, place)
    if (many := options.node_settings()) is not None:
        return _run_on_nodes(options, prepared, arguments, many)
    gpus = check_machine(prepared.file)
    if gpus and options.launcher == "fork":
        raise InputError("--launcher fork: a process that uses a GPU cannot be forked off")

    def start(emit: Emit, folder: Path | None) -> Any:
        if options.launcher == "fork":
            import executor.launch.rank_tasks  # noqa: F401  # once, not in every rank

            return run_by_fork(
                prepared.file,
                lambda attempt: _task(_restarted(options, folder, attempt), prepared, folder),
                emit,
                options.supervision,
            )
        # every rank imports torch and transformers first
        ranks = prepared.file.plan.world_size
        say(f"starting torchrun --nproc-per-node {ranks} ...")
        output = [] if folder is None else ["--output", str(folder)]
        given = [*arguments, *output]
        local = single_node(prepared.file, options.supervision)
        return run_by_torchrun(given, emit, options.supervision, local, gpus=gpus > 0)

    messages = [*prepared.notes, *notes(prepared.file, gpus)]
    return _report(options, prepared, start, messages, arguments)


def _restarted(options: RunOptions, folder: Path | None, attempt: int) -> RunOptions:
    """Return the options of an attempt: later ones resume from the run's own checkpoints."""
    if not attempt:
        return options
    return options.with_resume(resume_after_restart(options.checkpoints.resume, folder))


def _run_on_nodes(
    options: RunOptions, prepared: PreparedRun, arguments: list[str], many: NodeSettings
) -> int:
    """Run as one of several machines; the first one prints and records the run."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch logs every lost connection
    problem, gpus = None, 0
    try:
        gpus = check_machine(prepared.file, many.count)
    except InputError as error:
        problem = str(error)
    about = NodeDescription(prepared.sha256, arguments, gpu_names() if gpus else (), problem)
    job = MultiNodeRun(many, options.supervision, options.plan, prepared.file, about)
    if many.rank != 0:
        say(f"node {many.rank} of {many.count}: meets at {many.place}")
        status = run_on_nodes(job, _nothing)
        return STOPPED_CODE if status == STOPPED else 0

    def start(recorder: Any, folder: Path | None) -> Any:
        def renew(plan: Path) -> None:
            other = replace(options, plan=plan)
            recorder.prepared = prepared if plan == options.plan else _prepare(other)

        job.folder, job.renew = folder, renew
        return run_on_nodes(job, recorder)

    messages = [*prepared.notes, *notes(prepared.file, gpus)]
    return _report(options, prepared, start, messages, arguments)


def _prepare(options: RunOptions) -> PreparedRun:
    options.training.learning_rate_schedule()  # reports bad settings before any file is read
    saving = options.checkpoints
    if saving.init_from is not None and saving.resume is None:
        require_weights(saving.init_from)
    evaluation = options.evaluation_data()
    if options.tensorboard:
        require_tensorboard()
    with status_line("checking the plan and the data"):
        seed = options.training.seed
        return prepare(options.plan, options.data, seed=seed, evaluation=evaluation)


def _join(options: RunOptions, prepared: PreparedRun, place: TorchrunRank) -> int:
    """Be one rank of a torchrun that the user started; rank 0 reports."""

    def start(emit: Emit, folder: Path | None) -> Any:
        return run_as_torchrun_rank(
            place, _task(options, prepared, folder), emit, options.supervision
        )

    if place.rank != 0:
        start(_nothing, None)
        return 0
    code = _report(options, prepared, start, list(prepared.notes))
    return 0 if code == STOPPED_CODE else code  # torchrun would take anything else for a failure


def _task(options: RunOptions, prepared: PreparedRun, folder: Path | None) -> Task:
    """Return what every rank does; ``folder``: of the run, where this rank knows it."""

    def task(tell: Reporter) -> Any:
        from executor.launch.rank_tasks import train, verification
        from executor.launch.watchdog import supervised

        with supervised(tell, options.hang_timeout, prepared.file.rank_order) as ready:
            if options.verify:
                return verification(prepared.file, options.training.seed)
            return train(
                prepared.file,
                prepared.corpus,
                options.training,
                tell,
                steps=options.steps,
                evaluation=prepared.evaluation,
                saving=options.saving,
                folder=folder,
                options=options.recorded(),
                ready=ready,
            )

    return task


def _report(
    options: RunOptions,
    prepared: PreparedRun,
    start: Start,
    messages: list[str],
    again: Sequence[str] = (),
) -> int:
    """Run, display and record the results of rank 0; return the exit code."""
    if options.verify:
        return _finish_verify(options, prepared, start(_nothing, None))
    saving = options.checkpoints
    if saving.checkpoint_every is None and saving.resume is None and not options.dry_run:
        messages = [*messages, "the weights will not be kept (--checkpoint-every N keeps them)"]
    busy = busy_words()  # before the ranks add their own load
    with _folder(options) as folder:
        for note in messages:
            say(f"note: {note}")
        with ProgressDisplay(options.steps) as progress:
            recorder = Recorder(
                prepared,
                options.recorded(),
                messages,
                folder,
                progress,
                tensorboard=options.tensorboard,
            )
            try:
                status = start(recorder, folder)
            except KeyboardInterrupt:
                recorder.finish(INTERRUPTED, "interrupted")
                raise Interrupted(_ended("interrupted", recorder, again)) from None
            except BaseException as error:
                known = isinstance(error, ShardplanError)
                recorder.finish(FAILED, str(error) if known else repr(error))
                raise
            recorder.finish(status)
        show(_outcome(recorder, busy, as_json=options.json))
    if status == STOPPED:
        say(f"shardplan: {_ended('stopped on request', recorder, again)}")
        return STOPPED_CODE
    return 0


def _ended(why: str, recorder: Recorder, again: Sequence[str]) -> str:
    """Return where a run ended early, its newest checkpoint and the command that resumes it.

    ``again``: the words of the run; none under a torchrun that the user started.
    """
    done = recorder.document()["steps_done"] if recorder.began else 0
    where = f"{why} after step {done}" if done else f"{why} before the first step was done"
    folder = recorder.folder
    newest = None if folder is None else next(iter(newest_checkpoints(folder)), None)
    if newest is None:
        return f"{where}; there is no checkpoint (--checkpoint-every N saves them)"
    command = f"--resume {shlex.quote(str(folder))}"
    if again:
        command = f"shardplan {shlex.join(without_option(again, '--resume'))} {command}"
    return f"{where}\n  newest checkpoint: {newest}\n  go on with: {command}"


def without_option(words: Sequence[str], flag: str) -> list[str]:
    """Return the words of a command without an option and its value.

    >>> without_option(["run", "plan.json", "--resume", "runs/a", "--steps=3"], "--resume")
    ['run', 'plan.json', '--steps=3']
    """
    kept: list[str] = []
    skips = False
    for word in words:
        if not skips and word != flag and not word.startswith(f"{flag}="):
            kept.append(word)
        skips = word == flag
    return kept


@contextlib.contextmanager
def _folder(options: RunOptions) -> Iterator[Path | None]:
    """Make the folder of the run before it starts, if it keeps anything."""
    if options.dry_run:
        yield None
        return
    output, resume = options.output, options.saving.resume
    if resume is not None:
        output = resume_source(resume, output).run or output
    with claimed_folder(output, resume=resume is not None) as folder:
        yield folder


def _is_done(options: RunOptions) -> bool:
    """Print a note if the checkpoint to resume from is that of the last step."""
    resume = options.saving.resume
    if resume is None or options.verify:
        return False
    newest = resume_source(resume, options.output).candidates[:1]
    if not newest or not is_complete_name(newest[0].name):
        return False
    step, steps = step_of(newest[0]), options.training.steps
    if step < steps:
        return False
    if os.environ.get("RANK", "0") == "0":
        say(f"note: {newest[0]}: step {step} of {steps} is done; nothing is left to train")
        if options.json:
            show(json.dumps({"schema_version": SCHEMA_VERSION, "steps_done": step}))
    return True


def _outcome(recorder: Recorder, busy: str, *, as_json: bool) -> str:
    document = recorder.document()
    if as_json:
        return json.dumps(document, indent=2, allow_nan=False)
    lines = []
    if records := document["steps"]:
        first, last = records[0]["loss"], records[-1]["loss"]
        done = document["steps_done"] - document["first_step"]
        lines.append(f"loss {first:.4f} -> {last:.4f} in {done} steps\n")
    on_gpu = document["environment"]["device"] != "cpu"
    other = recorder.other_machine()
    lines.append(as_text(recorder.rows(), on_gpu=on_gpu, other=other, busy=busy))
    folder = recorder.folder
    kept = "Nothing was kept (dry run)." if folder is None else f"Written: {folder}/run.json"
    return "\n".join([*lines, f"\n{kept}"])


def _nothing(event: dict[str, Any]) -> None:
    pass


def _finish_verify(options: RunOptions, prepared: PreparedRun, answer: dict[str, Any]) -> int:
    """Print how far the run is from the single process; raise a RunError where it is too far."""
    size = answer["collective_bytes"]
    if options.json:
        document = {"schema_version": SCHEMA_VERSION, "plan": prepared.identity(), **answer}
        show(json.dumps(document, indent=2, allow_nan=False))
    else:
        for what in ("loss", "norm", "gradient", "weight"):
            worst = answer.get(f"worst_{what}")
            named = f"  (largest: {worst})" if worst else ""
            show(f"{what + ' difference':<20} {answer[f'{what}_difference']:.1e}{named}")
        show(
            f"{'collective bytes':<20} {size['counted']:,} counted, {size['predicted']:,} predicted"
        )
        show(f"float64, {answer['processes']} ranks against one process, relative differences")
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
