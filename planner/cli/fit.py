"""``shardplan fit``: its options, and what it prints."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import (
    Carbon,
    ClusterText,
    Concurrency,
    ContextLen,
    CudaGraphs,
    Drawing,
    Explain,
    Failures,
    Force,
    Freeze,
    GlobalBatch,
    GradientPrecision,
    Inference,
    Inputs,
    Json,
    Kernel,
    KVPrecision,
    Layers,
    Lora,
    LoraAlpha,
    LoraTargets,
    MasterWeights,
    Model,
    OptimizerName,
    Precision,
    PrefillChunk,
    Price,
    PromptLen,
    Qlora,
    QuantisationName,
    Recompute,
    RecomputeLayers,
    SeqLen,
    Software,
    StatePrecision,
    Tokens,
    WeightPrecision,
)
from planner.cli.outputs import say

EXIT_VERDICT = {"fits": 0, "does_not_fit": 3, "tight": 4}


def fit(
    model: Model,
    cluster: ClusterText,
    seq_len: SeqLen = None,
    micro_batch_size: Annotated[
        int | None, typer.Option("--micro-batch-size", "--mbs", help="sequences of a micro-batch")
    ] = None,
    global_batch_size: GlobalBatch = None,
    precision: Precision = None,
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
    dp: Annotated[int | None, typer.Option(help="data parallel")] = None,
    tp: Annotated[int | None, typer.Option(help="tensor parallel")] = None,
    pp: Annotated[int | None, typer.Option(help="pipeline parallel")] = None,
    virtual_stages: Annotated[int | None, typer.Option(help="stages on each pipeline rank")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b, zero_bubble, zbv, …")] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage 0 to 3")] = None,
    sp: Annotated[bool | None, typer.Option("--sp/--no-sp", help="sequence parallel")] = None,
    recompute: Recompute = None,
    recompute_layers: RecomputeLayers = None,
    num_microbatches: Annotated[int | None, typer.Option(help="micro-batches of a step")] = None,
    dp_replicate: Annotated[int | None, typer.Option(help="HSDP: replicas of the shards")] = None,
    cp: Annotated[int | None, typer.Option(help="context parallel")] = None,
    cp_method: Annotated[str | None, typer.Option(help="ring, ulysses, allgather")] = None,
    ep: Annotated[int | None, typer.Option(help="expert parallel")] = None,
    etp: Annotated[
        bool | None, typer.Option("--etp/--no-etp", help="expert tensor parallel")
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(help="none, optimizer, activations, optimizer+activations, weights, …"),
    ] = None,
    offload_device: Annotated[
        str | None, typer.Option(help="where optimizer and weights go: cpu, nvme")
    ] = None,
    secondary_ranks: Annotated[
        int | None, typer.Option(help="ZeRO++: neighbours that share a second copy of weights")
    ] = None,
    quantised_weights: Annotated[
        bool | None,
        typer.Option("--quantised-weights/--no-quantised-weights", help="ZeRO++: gathered in int8"),
    ] = None,
    quantised_gradients: Annotated[
        bool | None,
        typer.Option(
            "--quantised-gradients/--no-quantised-gradients", help="ZeRO++: exchanged in int4"
        ),
    ] = None,
    price: Price = None,
    tokens: Tokens = None,
    carbon: Carbon = None,
    failures: Failures = None,
    explain: Explain = False,
    output: Drawing = None,
    force: Force = False,
    inference: Inference = False,
    concurrency: Concurrency = None,
    context_len: ContextLen = None,
    prompt_len: PromptLen = None,
    prefill_chunk: PrefillChunk = None,
    kv_precision: KVPrecision = None,
    weight_precision: WeightPrecision = None,
    cuda_graphs: CudaGraphs = None,
    json: Json = False,
) -> None:
    """Will it fit? A verdict with a margin, the parts, and what to change."""
    from planner.answer.answers import FitAnswer, to_json
    from planner.api.fit import fit as ask
    from planner.cli.draw import check_drawing, refuse_drawings, write_drawing
    from planner.request.measure_here import cluster_or_measure
    from planner.request.module_trace import refuse_for_modules

    if inference:
        refuse_drawings(explain=explain, output=output)
    refuse_for_modules(model, output, explain=explain)
    if output is not None:
        check_drawing(output, force=force)  # before any work is done
    answer = ask(
        model,
        cluster_or_measure(cluster, say),
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
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
        data_parallel=dp,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        virtual_stages=virtual_stages,
        pipeline_schedule=schedule,
        zero_stage=zero,
        sequence_parallel=sp,
        recompute=recompute,
        recompute_layers=recompute_layers,
        num_microbatches=num_microbatches,
        dp_replicate=dp_replicate,
        context_parallel=cp,
        context_parallel_method=cp_method,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        offload=offload,
        offload_device=offload_device,
        secondary_ranks=secondary_ranks,
        quantised_weights=quantised_weights,
        quantised_gradients=quantised_gradients,
        price=price,
        tokens=tokens,
        carbon=carbon,
        failures=failures,
        inference=inference,
        concurrency=concurrency,
        context_len=context_len,
        prompt_len=prompt_len,
        prefill_chunk=prefill_chunk,
        kv_precision=kv_precision,
        weight_precision=weight_precision,
        cuda_graphs=cuda_graphs,
    )
    trained = answer if isinstance(answer, FitAnswer) else None
    if output is not None and trained is not None:
        write_drawing(output, trained, force=force)
    print(to_json(answer.to_dict()) if json else answer)
    if explain and not json and trained is not None:
        print(f"\n{trained.explain()}")
    if output is not None:
        say(f"{'':<11}wrote {output}")
    raise typer.Exit(EXIT_VERDICT[answer.verdict])
