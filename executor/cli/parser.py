"""The options of ``python -m executor``; imports neither torch nor models, so --help is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, get_args

from cost_models.plan.workload import Precision
from executor.cli.failure_options import add_failures, add_nodes
from executor.cli.saving_options import add_saving
from executor.cli.values import above_zero, below_one, count, large_count, natural, rate, share
from executor.config.data_options import PACKINGS, SYNTHETIC, DataOptions
from executor.config.learning_rate import SCHEDULES, LearningRate
from executor.config.training_options import TrainingOptions
from hardware_profiles.errors import InputError

DRY_STEPS: Final = 2  # the second one has optimizer states, as every later one
EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 our bug (--traceback shows it), 2 bad input, 5 the run failed or "
    "--verify found a difference, 6 stopped on request in good order, 130 interrupted."
)
STOPPED_CODE: Final = 6


class _Parser(argparse.ArgumentParser):
    """Reports bad arguments as one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = _Parser(prog="shardplan", description="Run a plan.", epilog=EXIT_CODES)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train as a plan.json says", epilog=EXIT_CODES)
    run.add_argument("plan", type=Path, metavar="PLAN", help="a plan.json")
    _add_data(run.add_argument_group("data"))
    _add_training(run.add_argument_group("training"))
    add_saving(run.add_argument_group("checkpoints"))
    _add_speed(run.add_argument_group("speed"))
    _add_watching(run.add_argument_group("watching"))
    _add_run(run.add_argument_group("the run"))
    add_failures(run.add_argument_group("failures"))
    add_nodes(run.add_argument_group("several machines"))
    measure = commands.add_parser(
        "measure",
        prog="python -m executor measure",
        help="measure this machine",
        epilog=EXIT_CODES,
    )
    measure.add_argument(
        "--processes", type=count, default=1, help="CPU processes that work at the same time"
    )
    tokenize = commands.add_parser(
        "tokenize", help="make a token file of text, once for many runs", epilog=EXIT_CODES
    )
    tokenize.add_argument("sources", nargs="+", metavar="SOURCE", help="as in run --data")
    _add_reading(tokenize)
    tokenize.add_argument(
        "--vocab-size", type=count, metavar="N", help="allow tokens below N (default: tokenizer's)"
    )
    tokenize.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.bin")
    tokenize.add_argument("--force", action="store_true", help="overwrite the output file")
    export = commands.add_parser(
        "export", help="a checkpoint as a Hugging Face folder", epilog=EXIT_CODES
    )
    export.add_argument("source", type=Path, metavar="RUN|CHECKPOINT")
    export.add_argument("--to", choices=("huggingface",), default="huggingface")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    export.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="of the weights (default: in which the run computed)",
    )
    export.add_argument(
        "--max-shard-bytes",
        type=large_count,
        default=5 * 10**9,
        metavar="N",
        help="of one file (default: %(default)s)",
    )
    trace = commands.add_parser(
        "trace",
        prog="python -m executor trace",
        help="what a module holds, keeps and computes (JSON)",
        epilog=EXIT_CODES,
    )
    trace.add_argument("module", metavar="module:package.path:factory")
    trace.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=DTYPE[B,…]",
        help="an argument of the module, for example x=float32[B,3,224,224]",
    )
    trace.add_argument("--precision", choices=get_args(Precision), default="fp32")
    trace.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="whose operators to follow (none is needed; default: %(default)s)",
    )
    for command in (run, measure, tokenize, export, trace):
        command.add_argument("--json", action="store_true", help="one JSON document on stdout")
        command.add_argument("--traceback", action="store_true", help="show where errors arise")
    return top


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        action="append",
        metavar="PATH[:WEIGHT]",
        help="a file or folder of text, JSONL, Parquet or tokens, several times for a mixture; or "
        "the word synthetic (default)",
    )
    group.add_argument(
        "--eval-data",
        action="append",
        metavar="PATH|synthetic",
        help="as --data: report loss and perplexity on it",
    )
    _add_reading(group)
    group.add_argument(
        "--packing",
        choices=PACKINGS,
        default=PACKINGS[0],
        help="how documents fill sequences: one after the other (concat, default), the same but "
        "each for itself (documents), or one a sequence (none)",
    )


def _add_reading(group: argparse._ActionsContainer) -> None:
    group.add_argument("--tokenizer", metavar="FOLDER", help="local tokenizer (default: bytes)")
    group.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="of JSONL and Parquet rows (default: %(default)s; else their input_ids)",
    )
    group.add_argument(
        "--skip-bad-rows", action="store_true", help="skip and count rows that cannot be used"
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=count, default=20, help="default: %(default)s")
    group.add_argument("--seed", type=natural, default=0, help="default: %(default)s")
    group.add_argument("--learning-rate", type=rate, default=1e-3, help="default: %(default)s")
    group.add_argument(
        "--lr-schedule",
        choices=SCHEDULES,
        default="constant",
        help="what follows the warm-up (default: %(default)s; wsd: constant, then linear)",
    )
    group.add_argument(
        "--warmup-steps", type=natural, default=0, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--decay-steps",
        type=count,
        metavar="N",
        help="default: all after the warm-up; wsd: the last tenth of the steps",
    )
    group.add_argument(
        "--min-lr-ratio",
        type=share,
        default=0.0,
        metavar="R",
        help="where the decay ends, as a share of --learning-rate (default: %(default)s)",
    )
    group.add_argument("--weight-decay", type=rate, default=0.1, help="default: %(default)s")
    group.add_argument("--beta1", type=below_one, default=0.9, help="default: %(default)s")
    group.add_argument("--beta2", type=below_one, default=0.999, help="default: %(default)s")
    group.add_argument("--epsilon", type=above_zero, default=1e-8, help="default: %(default)s")
    group.add_argument(
        "--max-grad-norm",
        type=rate,
        default=1.0,
        help="clip gradients to this norm (default: %(default)s; 0: do not clip)",
    )


def _add_speed(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the layers (runs eagerly, and says so, where no compiler is found)",
    )


def _add_watching(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--eval-every",
        type=count,
        metavar="N",
        help="evaluate after every N steps (default: after the last one)",
    )
    group.add_argument(
        "--eval-batches",
        type=count,
        default=16,
        metavar="K",
        help="global batches of an evaluation at most (default: %(default)s)",
    )
    group.add_argument(
        "--sample-every",
        type=natural,
        default=10,
        metavar="N",
        help="of every N-th step all ranks tell memory and waiting time (default: %(default)s; "
        "0: never)",
    )
    group.add_argument(
        "--tensorboard", action="store_true", help="also write the metrics for TensorBoard"
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--verify",
        action="store_true",
        help="instead of training, compare loss and gradients with a single process",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, run and measure two steps, keep nothing",
    )
    group.add_argument(
        "--output", type=Path, metavar="DIR", help="for run.json (default: runs/<date-time>)"
    )
    group.add_argument(
        "--launcher",
        choices=("torchrun", "fork"),
        default="torchrun",
        help="how ranks start (default: %(default)s; fork: on a CPU only, quicker, same result)",
    )


def steps(options: argparse.Namespace) -> int:
    """Return how many steps a run has."""
    return DRY_STEPS if options.dry_run else int(options.steps)


def data(options: argparse.Namespace) -> DataOptions:
    """Return which data a run reads, and how."""
    return _data(options, options.data or (SYNTHETIC,))


def evaluation_data(options: argparse.Namespace) -> DataOptions | None:
    """Return which data a run is evaluated on, if any."""
    if options.eval_data:
        return _data(options, options.eval_data)
    if options.eval_every is not None:
        raise InputError(f"--eval-every {options.eval_every}: needs --eval-data")
    return None


def _data(options: argparse.Namespace, sources: Sequence[str]) -> DataOptions:
    return DataOptions(
        sources=tuple(sources),
        tokenizer=options.tokenizer,
        text_field=options.text_field,
        packing=options.packing,
        skip_bad_rows=options.skip_bad_rows,
    )


def training(options: argparse.Namespace) -> TrainingOptions:
    """Return the settings of the training, checked."""
    learning_rate = LearningRate(
        peak=options.learning_rate,
        schedule=options.lr_schedule,
        steps=int(options.steps),
        warmup_steps=options.warmup_steps,
        min_ratio=options.min_lr_ratio,
        decay_steps=options.decay_steps,
    )
    return TrainingOptions(
        steps=steps(options),
        learning_rate=learning_rate,
        seed=options.seed,
        betas=(options.beta1, options.beta2),
        epsilon=options.epsilon,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm or None,
        evaluate_every=options.eval_every,
        evaluation_batches=options.eval_batches,
        sample_every=options.sample_every,
        compile=options.compile,
    )
