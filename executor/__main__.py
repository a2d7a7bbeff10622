"""``python -m executor``: run a plan, or measure this machine.

Also the program that torchrun starts: ``torchrun --nproc-per-node 8 -m executor run plan.json …``.
torch is imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hardware_profiles.errors import InputError, ShardplanError

INTERRUPTED = 130
EXIT_CODES = (
    "Exit codes: 0 done, 1 our bug (--traceback shows it), 2 bad input, 5 the run failed or "
    "--verify found a difference, 130 interrupted."
)


class _Parser(argparse.ArgumentParser):
    """Reports bad arguments as one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = _Parser(prog="python -m executor", description="Run a plan.", epilog=EXIT_CODES)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train as a plan.json says", epilog=EXIT_CODES)
    run.add_argument("plan", type=Path, metavar="PLAN", help="a plan.json")
    run.add_argument(
        "--data",
        default="synthetic",
        metavar="PATH|synthetic",
        help="a text file, a folder of .txt files, or made-up data (default)",
    )
    run.add_argument("--tokenizer", metavar="FOLDER", help="local tokenizer (default: bytes)")
    run.add_argument("--steps", type=_count, default=20, help="default: %(default)s")
    run.add_argument("--seed", type=_natural, default=0, help="default: %(default)s")
    run.add_argument("--learning-rate", type=_rate, default=1e-3, help="default: %(default)s")
    run.add_argument("--weight-decay", type=_rate, default=0.1, help="default: %(default)s")
    run.add_argument("--max-grad-norm", type=_rate, default=1.0, help="default: %(default)s")
    run.add_argument(
        "--verify",
        action="store_true",
        help="instead of training, compare loss and gradients with a single process",
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, run and measure two steps, keep nothing",
    )
    run.add_argument(
        "--output", type=Path, metavar="DIR", help="for run.json (default: runs/<date-time>)"
    )
    run.add_argument(
        "--launcher",
        choices=("torchrun", "fork"),
        default="torchrun",
        help="how ranks start (default: %(default)s; fork: on a CPU only, quicker, same result)",
    )
    measure = commands.add_parser("measure", help="measure this machine", epilog=EXIT_CODES)
    measure.add_argument(
        "--processes", type=_count, default=1, help="CPU processes that work at the same time"
    )
    for command in (run, measure):
        command.add_argument("--json", action="store_true", help="one JSON document on stdout")
        command.add_argument("--traceback", action="store_true", help="show where errors arise")
    return top


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a whole number from 1)")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) > 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a whole number from 0)")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} (must be a number from 0)")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parser().parse_args(given)
        if options.command == "measure":
            return _measure(options)
        from executor.run import run

        return run(options, given)
    except ShardplanError as error:
        return _fail(str(error), error, error.exit_code, given)
    except KeyboardInterrupt as error:
        return _fail("interrupted", error, INTERRUPTED, given)
    except Exception as error:
        return _fail(f"internal error: {type(error).__name__}: {error}", error, 1, given)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, error: BaseException, code: int, arguments: list[str]) -> int:
    """Print one line, and on demand where the error comes from; return the exit code."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # every rank sees bad input: give rank 0 the time to say so alone, then torchrun ends us
        time.sleep(2)
        message = f"rank {rank}: {message}"
    print("error: " + " ".join(message.split()), file=sys.stderr)
    if "--traceback" in arguments:
        traceback.print_exception(error)
    return code


def _measure(options: argparse.Namespace) -> int:
    """Measure this machine, keep the result in the user's cache and print it."""
    import torch

    from executor.machine import measure_gpu, measure_machine
    from hardware_profiles.measurement import MAX_PROCESSES, save

    if options.processes > MAX_PROCESSES:
        raise InputError(f"--processes = {options.processes} (at most {MAX_PROCESSES})")
    if torch.cuda.is_available():
        print(json.dumps(measure_gpu(), indent=2, allow_nan=False))
        return 0
    measurement = measure_machine(options.processes)
    path = save(measurement)
    print(f"kept in {path}", file=sys.stderr)
    print(json.dumps(measurement.to_dict(), indent=2, allow_nan=False))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    code = main()
    if "RANK" in os.environ:  # a rank does not take its process groups apart: mesh.leave
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
