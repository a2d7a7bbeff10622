"""Options of the commands ``measure``, ``tokenize``, ``export`` and ``trace``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from cost_models.plan.workload import Precision
from executor.config.bounds import Count
from executor.config.data_options import DATA, SkipBadRows, TextField, Tokenizer
from hardware_profiles.cluster.measurement import MAX_PROCESSES
from hardware_profiles.command_line.help import OUTPUT
from hardware_profiles.options import Option

Json = Annotated[bool, Option("--json", group=OUTPUT, help="one JSON document on stdout")]
Traceback = Annotated[bool, Option("--traceback", group=OUTPUT, help="show where errors arise")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of ``measure``."""

    processes: Annotated[
        int,
        Meta(ge=1, le=MAX_PROCESSES),
        Option(help="CPU processes that work at the same time (default: {default})"),
    ] = 1
    json: Json = False
    traceback: Traceback = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """Options of ``tokenize``."""

    sources: Annotated[list[str], Option("SOURCE...", help="as in run --data")]
    tokenizer: Tokenizer = None
    text_field: TextField = "text"
    skip_bad_rows: SkipBadRows = False
    vocab_size: Annotated[
        Count | None,
        Option(metavar="N", group=DATA, help="allow tokens below N (default: tokenizer's)"),
    ] = None
    output: Annotated[Path, Option("--output", "-o", metavar="FILE.bin", help="the token file")]
    force: Annotated[bool, Option(help="overwrite the output file")] = False
    json: Json = False
    traceback: Traceback = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of ``export``."""

    source: Annotated[Path, Option("RUN|CHECKPOINT", help="the folder of a run, or a checkpoint")]
    to: Annotated[Literal["huggingface"], Option(help="format (default: {default})")] = (
        "huggingface"
    )
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="the new folder")]
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        Option(help="dtype of the weights (default: compute precision of the run)"),
    ] = None
    max_shard_bytes: Annotated[
        int, Meta(ge=1), Option(metavar="N", help="size of one file (default: {default})")
    ] = 5 * 10**9
    json: Json = False
    traceback: Traceback = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of ``trace``."""

    module: Annotated[
        str, Option("module:package.path:factory", help="a function that returns the nn.Module")
    ]
    inputs: Annotated[
        tuple[str, ...],
        Option(
            "--input",
            metavar="NAME=DTYPE[B,…]",
            help="an argument of the module, for example x=float32[B,3,224,224] (may be repeated)",
        ),
    ] = ()
    precision: Annotated[Precision, Option(help="default: {default}")] = "fp32"
    device: Annotated[
        Literal["cpu", "cuda"],
        Option(help="whose operators to follow (none is needed; default: {default})"),
    ] = "cpu"
    json: Json = False
    traceback: Traceback = False
