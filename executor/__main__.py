"""``python -m executor``: run a plan, export weights, tokenize data, measure, trace a module.

Also the program that torchrun starts: ``torchrun --nproc-per-node 8 -m executor run plan.json …``.
torch is imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from executor.cli.options import ExportOptions, MeasureOptions, TokenizeOptions, TraceOptions
from executor.cli.parser import Options, parse
from executor.processes.signals import stop_numbers
from hardware_profiles.errors import Interrupted, ShardplanError
from hardware_profiles.message import error_text
from hardware_profiles.progress import status_line
from hardware_profiles.terminal import prepare_streams, say, show, show_rest

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    try:
        code = _execute(parse(given), given)
        show_rest()
        return code
    except ShardplanError as error:
        return _fail(str(error), error, error.exit_code, given)
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") != "0":
            return INTERRUPTED  # rank 0 reports it
        return _fail("interrupted", error, INTERRUPTED, given)
    except Exception as error:
        return _fail(f"internal error: {type(error).__name__}: {error}", error, 1, given)


def _execute(options: Options, arguments: list[str]) -> int:
    """Execute a command; ``arguments``: its words, which the ranks of a run receive again."""
    match options:
        case MeasureOptions():
            return _measure(options)
        case TraceOptions():
            return _trace(options)
        case TokenizeOptions():
            return _tokenize(options)
        case ExportOptions():
            return _export(options)
        case _:
            from executor.run import run

            return run(options, arguments)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, error: BaseException, code: int, arguments: list[str]) -> int:
    """Print one message, and on demand where the error comes from; return the exit code."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # every rank sees bad input: give rank 0 the time to say so alone, then torchrun ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
        message = f"rank {rank}: {message}"
    if isinstance(error, Interrupted):  # with a command to copy, which is not wrapped
        first, _, rest = message.partition("\n")
        say(error_text(f"shardplan: {first}") + f"\n{rest}" * bool(rest))
    else:
        say(error_text("shardplan: " + " ".join(message.split())))
    if "--traceback" in arguments:
        say("".join(traceback.format_exception(error)))
    return code


def _tokenize(options: TokenizeOptions) -> int:
    """Make a token file and describe it."""
    from executor.data.build import tokenize

    with status_line("tokenizing"):
        header = tokenize(
            options.sources,
            options.output,
            tokenizer=options.tokenizer,
            text_field=options.text_field,
            skip_bad_rows=options.skip_bad_rows,
            vocab_size=options.vocab_size,
            force=options.force,
        )
    if options.json:
        show(json.dumps(asdict(header), indent=2, allow_nan=False))
        return 0
    show(f"{header.tokens:,} tokens of {header.documents:,} documents ({header.dtype})")
    if header.skipped_rows:
        say(f"{header.skipped_rows:,} bad rows were skipped")
    show(f"wrote {options.output}; next: shardplan run PLAN --data {options.output}")
    return 0


def _export(options: ExportOptions) -> int:
    """Write a checkpoint as a Hugging Face folder."""
    from executor.checkpoint.export import export

    return export(
        options.source,
        options.output,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        as_json=options.json,
    )


def _trace(options: TraceOptions) -> int:
    """Print parameters, saved tensors and operations of a module, on one line."""
    from executor.trace.module_factory import load_factory, one_line

    with one_line(options.module):
        load_factory(options.module)  # refused before torch is imported
    from executor.trace.trace import trace

    with status_line("tracing"):
        found = trace(
            options.module,
            precision=options.precision,
            input_shapes=options.inputs,
            device=options.device,
        )
    show(json.dumps(found, allow_nan=False))
    return 0


def _measure(options: MeasureOptions) -> int:
    """Measure this machine, keep the result in the user's cache and print it."""
    import torch

    from executor.machine.measure import measure_gpu, measure_machine
    from hardware_profiles.cluster.measurement import save

    if torch.cuda.is_available():
        show(json.dumps(measure_gpu(), indent=2, allow_nan=False))
        return 0
    with status_line("measuring"):
        measurement = measure_machine(options.processes)
    path = save(measurement)
    say(f"kept in {path}")
    show(json.dumps(measurement.to_dict(), indent=2, allow_nan=False))
    return 0


if __name__ == "__main__":
    for number in stop_numbers(signal.SIGUSR1):  # until there are ranks that can hear them
        signal.signal(number, _interrupt)
    code = main()
    if "RANK" in os.environ:  # a rank does not take its process groups apart: mesh.leave
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
