"""``shardplan observe`` and ``oom``: logs and tracebacks of other trainers."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from cost_models.plan.workload import Precision
from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_text
from hardware_profiles.options import Option
from planner.cli.options import Json
from planner.cli.outputs import print_answer
from planner.request.requests import StatedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """What a log may leave open, and where its row goes."""

    model: Annotated[
        str | None, Option("--model", metavar="MODEL", help="the model, if the log has no sizes")
    ] = None
    cluster: Annotated[
        str | None, Option("--cluster", metavar="CLUSTER", help="8xH100-SXM and so on")
    ] = None
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="RUNS.csv", help="add the row to this table of runs"),
    ] = None
    seq_len: Annotated[
        int | None, Meta(ge=1), Option("--seq-len", metavar="N", help="tokens of a sequence")
    ] = None
    global_batch_size: Annotated[
        int | None,
        Meta(ge=1),
        Option("--global-batch-size", metavar="N", help="sequences of a step"),
    ] = None
    micro_batch_size: Annotated[
        int | None,
        Meta(ge=1),
        Option("--micro-batch-size", "--mbs", metavar="N", help="sequences of a pass"),
    ] = None
    tensor_parallel: Annotated[
        int | None, Meta(ge=1), Option("--tp", metavar="N", help="tensor-parallel ranks")
    ] = None
    pipeline_parallel: Annotated[
        int | None, Meta(ge=1), Option("--pp", metavar="N", help="pipeline ranks")
    ] = None
    zero_stage: Annotated[
        int | None, Meta(ge=0, le=3), Option("--zero", metavar="N", help="0 to 3")
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "full"] | None, Option("--recompute", help="recomputed layers")
    ] = None
    precision: Annotated[Precision | None, Option("--precision", help="of the computation")] = None
    optimizer: Annotated[
        str | None, Option("--optimizer", metavar="NAME", help="adamw and so on")
    ] = None
    software: Annotated[
        str | None, Option("--software", metavar="NAME", help="profile of the trainer")
    ] = None
    warm_up: Annotated[
        int,
        Meta(ge=0),
        Option("--warm-up", metavar="N", help="logged steps that are left out (default: 5)"),
    ] = 5


def observe(
    log: Annotated[
        Path,
        Option("LOG", help="a log of Megatron-LM, NeMo, DeepSpeed, torchtitan, trainer_state.json"),
    ],
    options: ObserveOptions,
    json: Json = False,
) -> int:
    """Read a log of another trainer: measured and predicted, a row for learn and validate."""
    from planner.observation.answer import observe as ask

    print_answer(ask(log, **asdict(options)), json=json)
    return 0


def oom(
    run: StatedRun,
    file: Annotated[
        Path | None,
        Option("FILE", help="a traceback or a log; without: standard input"),
    ] = None,
    json: Json = False,
) -> int:
    """Explain an out-of-memory error of torch: which tensor, where in the step, what would help."""
    from planner.out_of_memory.explanation import explain_out_of_memory
    from planner.out_of_memory.run import priced_run

    if file is None and sys.stdin.isatty():
        raise InputError("give a FILE, or the traceback on standard input")
    text = sys.stdin.read() if file is None else read_text(file, "a traceback")
    print_answer(explain_out_of_memory(text, priced_run(run, text)), json=json)
    return 0
