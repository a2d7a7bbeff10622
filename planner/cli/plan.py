"""``shardplan plan``: its options, and what it prints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import (
    Carbon,
    Failures,
    Force,
    Freeze,
    GlobalBatch,
    GradientPrecision,
    Inputs,
    Json,
    Kernel,
    Layers,
    Lora,
    LoraAlpha,
    LoraTargets,
    MasterWeights,
    Model,
    OptimizerName,
    Price,
    Qlora,
    QuantisationName,
    Require,
    SeqLen,
    Software,
    StatePrecision,
    Tokens,
)
from planner.cli.outputs import say

Clusters = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER[,…]",
        help="8xA100-80GB, 16x8xH100-SXM, FILE.toml, here:8; several with commas, 1..4x8xH100-SXM",
    ),
]
Precisions = Annotated[
    str | None,
    typer.Option("--precision", help="bf16, fp16, fp32, tf32, fp64, fp8; bf16,fp8: the better"),
]


def plan(
    model: Model,
    cluster: Clusters,
    seq_len: SeqLen = None,
    global_batch_size: GlobalBatch = None,
    precision: Precisions = None,
    optimizer: OptimizerName = None,
    optimizer_precision: StatePrecision = None,
    gradient_precision: GradientPrecision = None,
    master_weights: MasterWeights = None,
    attention: Kernel = None,
    software: Software = None,
    lora: Lora = None,
    qlora: Qlora = None,
    lora_alpha: LoraAlpha = None,
    lora_targets: LoraTargets = None,
    quantisation: QuantisationName = None,
    freeze: Freeze = None,
    layers: Layers = None,
    inputs: Inputs = None,
    fix: Annotated[str, typer.Option(help="pin parts of the plan: tp=2,pp=2,zero=1")] = "",
    require: Require = None,
    objective: Annotated[str, typer.Option(help="time, cost, memory or energy")] = "time",
    pareto: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="the exact front of two objectives: time,memory"),
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(help="offload, or offload=optimizer,offload=activations,offload=weights"),
    ] = None,
    gpus_at_most: Annotated[
        int | None, typer.Option(help="try parts of the cluster, up to so many accelerators")
    ] = None,
    price: Price = None,
    tokens: Tokens = None,
    budget: Annotated[str | None, typer.Option(metavar="DOLLARS", help="of the whole run")] = None,
    days: Annotated[str | None, typer.Option(help="of the whole run")] = None,
    carbon: Carbon = None,
    failures: Failures = None,
    find: Annotated[
        str | None,
        typer.Option(
            help="fewest-gpus, cheapest-cluster, largest-micro-batch, longest-sequence, "
            "largest-model (of several with commas), most-tokens"
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="plans to show")] = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the best plan to this file")
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """What is the best plan? A search over all parallelism, recompute and micro-batch size."""
    from cost_models.plan_file import write_plan_file
    from hardware_profiles.errors import NoLegalPlanError
    from planner.answer.answers import not_run, to_json
    from planner.api.plan import plan as ask
    from planner.cli.outputs import refuse_existing
    from planner.request.clusters import split_clusters
    from planner.request.measure_here import cluster_or_measure
    from planner.request.module_trace import refuse_for_modules
    from planner.traced.answers import TracedPlanAnswer

    if output is not None:
        refuse_existing(output, force=force)  # before any work is done
    refuse_for_modules(model, output)
    names = split_clusters(cluster)
    clusters = [cluster_or_measure(name, say, compared=len(names) > 1) for name in names]
    try:
        answer = ask(
            model,
            clusters[0] if len(clusters) == 1 else clusters,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            precision=precision,
            optimizer=optimizer,
            optimizer_state_precision=optimizer_precision,
            gradient_precision=gradient_precision,
            master_weights=master_weights,
            attention_kernel=attention,
            software=software,
            lora=lora,
            qlora=qlora,
            lora_alpha=lora_alpha,
            lora_targets=lora_targets,
            quantisation=quantisation,
            freeze=freeze,
            layers=layers,
            inputs=inputs,
            fix=fix,
            require=require or None,
            objective=objective,
            pareto=pareto,
            allow=allow,
            gpus_at_most=gpus_at_most,
            price=price,
            tokens=tokens,
            budget=budget,
            days=days,
            carbon=carbon,
            failures=failures,
            find=find,
            top=top,
        )
    except NoLegalPlanError as error:
        if json:
            print(to_json(error.document))
        raise
    if output is not None and not isinstance(answer, TracedPlanAnswer):
        write_plan_file(output, answer.plan_file(), force=force)
    print(to_json(answer.to_dict()) if json else answer)
    if output is not None and not isinstance(answer, TracedPlanAnswer):
        why = not_run(answer.scenario, answer.best)
        following = f"next: shardplan run {shlex.quote(str(output))} --data FILE"
        say(f"{'':<11}wrote {output}; {following if why is None else why}")
