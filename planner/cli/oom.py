"""``shardplan oom``: its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_text
from hardware_profiles.options import Option
from planner.cli.options import Json
from planner.cli.outputs import print_answer


def oom(
    file: Annotated[
        Path | None,
        Option("FILE", help="a traceback or a log; without: standard input"),
    ] = None,
    model: Annotated[
        str | None, Option("--model", metavar="MODEL", help="price fixes: the model of the run")
    ] = None,
    cluster: Annotated[
        str | None, Option("--cluster", metavar="CLUSTER", help="and its cluster")
    ] = None,
    seq_len: Annotated[
        int | None, Option("--seq-len", metavar="N", help="and its tokens of a sequence")
    ] = None,
    micro_batch_size: Annotated[
        int | None, Option("--micro-batch-size", "--mbs", metavar="N", help="and its micro-batch")
    ] = None,
    software: Annotated[
        str | None, Option("--software", metavar="NAME", help="and its trainer")
    ] = None,
    json: Json = False,
) -> int:
    """Explain an out-of-memory error of torch: which tensor, where in the step, what would help."""
    from planner.answer.answers import FitAnswer
    from planner.out_of_memory.explanation import explain_out_of_memory

    if (model is None) != (cluster is None):
        raise InputError("--model and --cluster: give both, or none")
    if file is None and sys.stdin.isatty():
        raise InputError("give a FILE, or the traceback on standard input")
    text = sys.stdin.read() if file is None else read_text(file, "a traceback")
    priced = None
    if model is not None and cluster is not None:
        from planner.api.fit import fit

        given = {"seq_len": seq_len, "micro_batch_size": micro_batch_size, "software": software}
        options: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None
        }
        answer = fit(model, cluster, **options)
        assert isinstance(answer, FitAnswer)
        priced = answer
    print_answer(explain_out_of_memory(text, priced), json=json)
    return 0
