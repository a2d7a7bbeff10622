"""The options that several commands share, and how their help reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="preset, config.json, folder, hub id, size such as 7b, or module:package.path:factory",
    ),
]
ClusterText = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="8xA100-80GB, 16x8xH100-SXM, FILE.toml, here:8")
]
SeqLen = Annotated[int | None, typer.Option(help="tokens of a sequence")]
GlobalBatch = Annotated[int | None, typer.Option(help="sequences of one optimizer step")]
Precision = Annotated[str | None, typer.Option(help="bf16, fp16, fp32, tf32, fp64, fp8")]
OptimizerName = Annotated[
    str | None, typer.Option("--optimizer", help="adamw, sgd, adafactor, lion, muon, adamw_8bit, …")
]
StatePrecision = Annotated[
    str | None,
    typer.Option("--optimizer-precision", help="states: auto (as the weights updated), fp32, bf16"),
]
GradientPrecision = Annotated[
    str | None, typer.Option(help="kept and reduced gradients: auto (the trainer's), fp32, bf16")
]
MasterWeights = Annotated[
    bool | None,
    typer.Option(
        "--master-weights/--no-master-weights", help="fp32 weights beside 16-bit ones, or none"
    ),
]
Kernel = Annotated[str | None, typer.Option("--attention", help="flash, eager")]
Software = Annotated[str | None, typer.Option(help="whose memory and time: shardplan, megatron")]
Lora = Annotated[int | None, typer.Option(help="train adapters of this rank on a frozen base")]
Qlora = Annotated[int | None, typer.Option(help="the same, the frozen base in 4 bits")]
LoraAlpha = Annotated[float | None, typer.Option(help="default: twice the rank")]
QuantisationName = Annotated[
    str | None,
    typer.Option("--quantisation", help="frozen matrices of --qlora: nf4, nf4_double, int8, int4"),
]
LoraTargets = Annotated[
    str | None, typer.Option(help="matrices with adapters: all, attention, or q,k,v,o,gate,up,down")
]
Freeze = Annotated[
    str | None,
    typer.Option(
        metavar="PART[,PART…]",
        help="not trained: embedding, head, norms, layers:0-15, all-but-head",
    ),
]
Layers = Annotated[
    str | None, typer.Option(help="layers of every stage in order: 3,5,5,3 (default: even)")
]
Recompute = Annotated[
    str | None,
    typer.Option(help="none, selective, full, selective_ops; full:1/2: every other layer"),
]
RecomputeLayers = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N…]",
        help="only the first layers recompute, of every stage (0: all) or of each: 4,2,0,0",
    ),
]
Inference = Annotated[bool, typer.Option("--inference", help="serve it, instead of training")]
Concurrency = Annotated[int | None, typer.Option(help="inference: sequences at once")]
ContextLen = Annotated[
    int | None, typer.Option(help="inference: tokens of a sequence, prompt and answer")
]
PromptLen = Annotated[
    int | None, typer.Option(help="inference: tokens of a prompt (default: half of the context)")
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs", help="inference: steps started as one graph, or eagerly"
    ),
]
PrefillChunk = Annotated[
    int | None, typer.Option(help="inference: tokens of prompts computed in one step")
]
KVPrecision = Annotated[
    str | None, typer.Option(help="inference: of the cache: bf16, fp16, fp32, fp8, int8, int4")
]
WeightPrecision = Annotated[
    str | None,
    typer.Option(help="inference: of the weights: bf16, fp16, fp32, fp8, int8, int4, mxfp4"),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=DTYPE[B,…]",
        help="of module:…: an argument, for example x=float32[B,3,224,224] (may be repeated)",
    ),
]
Require = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CONSTRAINT",
        help="tp<=8, zero!=3, schedule==1f1b, memory<=70GiB, step<=10s, mfu>=0.4 (several: commas)",
    ),
]
Price = Annotated[
    str | None,
    typer.Option(metavar="DOLLARS", help="an accelerator's hour; of each: H100-SXM-80GB=3,…"),
]
Tokens = Annotated[str | None, typer.Option(help="tokens of the whole run, such as 300B or 1.5T")]
Carbon = Annotated[
    str | None, typer.Option(metavar="GRAMS", help="CO2 of a kilowatt hour where the run is")
]
Failures = Annotated[
    str | None,
    typer.Option(
        metavar="FIGURES",
        help="mtbf=HOURS of one accelerator, restart=MINUTES, stall=SECONDS of a checkpoint, "
        "storage=GB/s of a node (commas)",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Explain = Annotated[
    bool, typer.Option("--explain", help="where the peak comes from, moment by moment")
]
Drawing = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="draw the moments of a step: FILE.html or FILE.svg"),
]
Force = Annotated[bool, typer.Option("--force", help="overwrite the output file")]
