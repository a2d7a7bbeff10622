"""Requests as given: every option of ``fit`` and ``plan``, declared once.

The Python functions take these fields as arguments and the command line as options; None means
that an option was left out and takes its documented default. A field of a plan is declared by
:class:`~cost_models.plan.plan.Plan` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    get_args,
)

from msgspec import Meta

from cost_models.plan.plan import PARALLELISM, TRAINING, Plan
from cost_models.plan.workload import (
    NAMED,
    TARGET_NAMES,
    AdapterMethod,
    AdapterTargets,
    AttentionKernel,
    Batch,
    KeptPrecision,
    Optimizer,
    Precision,
    Quantisation,
    SeqLen,
)
from cost_models.serving.number_formats import KV_PRECISIONS, WEIGHT_PRECISIONS
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.options import Declared, Option, declared, optional
from hardware_profiles.software.trainer import OPTIMIZER_KERNELS, software_names
from planner.exchange.names import target_names
from planner.request import proposals
from planner.request.choices import ALLOWED, FINDS, OBJECTIVES, ClusterLike
from planner.request.model import ModelLike

TUNING: Final = "adapters and frozen parts"
WHOLE_RUN: Final = "whole run"
SEARCH: Final = "search"
INFERENCE: Final = "serving"

if TYPE_CHECKING:

    @dataclass(frozen=True)
    class PlanOptions(Plan):
        """The fields of a plan, each of which may be left out, in their longer notations too."""

        recompute_layers: int | str | Sequence[int] = 0  # type: ignore[assignment]
else:
    PlanOptions = optional(Plan, "PlanOptions", "The fields of a plan; None: left out.")


@dataclass(frozen=True)
class Subject:
    """The model and the cluster."""

    CHECKS_ITSELF: ClassVar = True  # values are checked by the functions, not by the command line

    model: Annotated[
        ModelLike,
        Option(
            "MODEL",
            as_text=True,
            complete=proposals.models,
            help="preset, config.json, folder, hub id, size such as 7b, or "
            "module:package.path:factory",
            elsewhere=("model", "model_name", "model_name_or_path"),
        ),
    ]
    cluster: Annotated[
        ClusterLike,
        Option(
            "CLUSTER",
            as_text=True,
            complete=proposals.clusters,
            help="8xA100-80GB, 16x8xH100-SXM, FILE.toml, here:8",
            elsewhere=(
                "accelerator",
                "cluster",
                "devices",
                "gpu",
                "gpus",
                "hardware",
                "nnodes",
                "nodes",
                "nproc_per_node",
                "num_gpus",
                "num_nodes",
            ),
            replaceable=True,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """How the machine is run."""

    power: Annotated[
        float | None,
        Option(
            metavar="WATTS",
            help="power limit of every board; the same as CLUSTER@500W",
            elsewhere=("power_limit", "power_cap", "tdp", "watts"),
            group=TRAINING,
            default="the board's own",
            why="matmuls of long runs slow down under a limit, memory does not "
            "([step_time.md](../explanation/step_time.md))",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Training options of every model."""

    global_batch_size: Annotated[
        Batch | None,
        Option(
            common=True,
            help="sequences of one optimizer step",
            elsewhere=("batch_size", "gbs", "train_batch_size", "batch", "bs"),
            group=TRAINING,
            default="`plan`: one sequence for each accelerator; for several clusters and whole "
            "runs the best batch for the run's FLOP; `fit`: micro-batch × data parallel × "
            "(pipeline parallel)",
            why="the smallest that keeps every rank and stage busy; clusters are compared with one "
            "that hides their communication ([plan.md](../how-to/plan.md))",
        ),
    ] = None
    precision: Annotated[
        str | None,
        Option(
            metavar="NAME",
            common=True,
            values=get_args(Precision),
            elsewhere=(
                "dtype",
                "mixed_precision",
                "torch_dtype",
                "amp",
                "bfloat16=bf16",
                "float16=fp16",
                "half=fp16",
            ),
            help="{values} (plan: bf16,fp8 takes the better)",
            group=TRAINING,
            default="bf16 if the accelerator has it, else fp16, else fp32; fp32 on a CPU",
            why="16-bit compute with fp32 master weights. tf32, in memory as fp32, is priced only; "
            "fp8 is trained where matrices are whole, and as in Transformer Engine with "
            "`--software megatron`",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=get_args(Optimizer),
            elsewhere=("optim", "adam8bit=adamw_8bit", "adamw8bit=adamw_8bit", "8bit=adamw_8bit"),
            help="{values}",
            group=TRAINING,
            default="adamw",
            why="two fp32 states a parameter "
            "(`cost_models/memory/optimizer_states.py` lists the states of each, with its source)",
        ),
    ] = None


def layers_in(group: str) -> Option:
    """Return the option that gives the layers of every stage."""
    return Option(
        metavar="N[,N…]",
        as_text=True,
        help="layers of every stage in order: 3,5,5,3 (default: even)",
        group=group,
        default="as even as possible",
        why="extra layers go to the middle stages: the first stage holds the embedding, "
        "the last the head",
    )


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Training options of models whose layers are known."""

    seq_len: Annotated[
        SeqLen | None,
        Option(
            common=True,
            help="tokens of a sequence: 4096, 8k",
            elsewhere=(
                "sequence_length",
                "seq_length",
                "max_length",
                "max_seq_length",
                "max_seq_len",
                "block_size",
                "cutoff_len",
                "context",
                "context_length",
                "ctx",
                "ctx_len",
                "n_ctx",
            ),
            group=TRAINING,
            default="the model's longest, at most 4096",
            why="a common training length",
        ),
    ] = None
    optimizer_rank: Annotated[
        int | None,
        Option(
            metavar="N",
            elsewhere=("galore_rank", "apollo_rank"),
            help="rank of the gradients that galore and apollo keep states of (APOLLO-Mini: 1)",
            group=TRAINING,
            default="128",
            why="transformers' default of GaLore",
        ),
    ] = None
    optimizer_state_precision: Annotated[
        str | None,
        Option(
            "--optimizer-precision",
            metavar="NAME",
            values=get_args(KeptPrecision),
            help="optimizer states: {values} (auto: as the updated weights)",
            group=TRAINING,
            default="auto: as the updated weights",
            why="fp32 states, or 16-bit ones without master weights",
        ),
    ] = None
    gradient_precision: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=get_args(KeptPrecision),
            help="gradients: {values} (auto: the trainer's)",
            group=TRAINING,
            default="auto: the trainer's precision (its software profile)",
        ),
    ] = None
    optimizer_kernel: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=OPTIMIZER_KERNELS,
            help="the update: one kernel, lists of tensors, or tensor by tensor: {values}",
            group=TRAINING,
            default="the trainer's (its software profile)",
            why="copies of states that live during the update; torch's default is foreach",
        ),
    ] = None
    gradient_copy: Annotated[
        bool | None,
        Option(
            "--gradient-copy/--no-gradient-copy",
            help="16-bit gradients are copied to fp32 for the update, or not",
            group=TRAINING,
            default="the trainer's (its software profile)",
        ),
    ] = None
    master_weights: Annotated[
        bool | None,
        Option(
            "--master-weights/--no-master-weights",
            help="fp32 weights in addition to 16-bit ones, or none",
            group=TRAINING,
            default="on in 16-bit precision",
            why="mixed precision; `--no-master-weights` is pure 16-bit training",
        ),
    ] = None
    attention_kernel: Annotated[
        str | None,
        Option(
            "--attention",
            metavar="NAME",
            values=get_args(AttentionKernel),
            elsewhere=("flash_attention=flash", "flash_attn=flash", "sdpa=flash"),
            help="attention kernel: {values}",
            group=TRAINING,
            default="flash",
            why="torch's scaled_dot_product_attention",
        ),
    ] = None
    software: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=software_names,
            elsewhere=("trainer", "framework"),
            help="trainer that is priced, such as torchtitan, or parts with + between them: "
            "hf-trainer+fsdp2 (shardplan software lists all)",
            group=TRAINING,
            default="shardplan",
            why="the bundled executor. `megatron` is Megatron-LM of 2021–22; "
            "`megatron-deepspeed`, `hf-trainer` (weights in 16 bits, or FSDP1; "
            "`hf-trainer-autocast`: fp32 weights with `bf16=True`, no FSDP; and `-early`, "
            "`-foak`, `-liger`), `peft`, `litgpt`, `lit-gpt-nf4`, `torchtune` (and `-compiled`, "
            "`-chunked`), `torchtitan`, `torch-compile` (a model compiled whole, such as nanoGPT) "
            "are other trainers; every number with its source in `hardware_profiles/software/`. "
            "A target of `--to` or its usual name (`axolotl`, `TRL`, `LLaMA-Factory`) has the "
            "profile of each ZeRO stage. The trainer's release limits plans and defaults "
            "(`docs/how-to/exchange.md`); `+any-plan` does not",
        ),
    ] = None
    freeze: Annotated[
        str | None,
        Option(
            metavar="PART[,PART…]",
            values=NAMED,
            help="frozen parts: {values}, layers:0-15",
            group=TUNING,
            default="nothing",
            why="all weights are trained. Frozen parts (`head`: its norm too) stay in the "
            "computation's precision without gradients and states; priced and trained under every "
            "axis; a stage of a pipeline needs something to train",
        ),
    ] = None
    layers: Annotated[str | Sequence[int] | None, layers_in(PARALLELISM)] = None


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """LoRA and QLoRA."""

    lora: Annotated[
        int | None,
        Option(
            metavar="RANK",
            common=True,
            elsewhere=("lora_r", "lora_rank", "rank", "r"),
            help="train adapters of this rank on a frozen base",
            group=TUNING,
        ),
    ] = None
    qlora: Annotated[
        int | None,
        Option(
            metavar="RANK",
            help="as --lora, the frozen base in 4 bits",
            elsewhere=("load_in_4bit=16", "4bit=16"),
            group=TUNING,
        ),
    ] = None
    adapter_method: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=get_args(AdapterMethod),
            help="what --lora and --qlora train: {values} (rslora, pissa, olora: as lora)",
            elsewhere=("use_dora=dora", "dora=dora"),
            group=TUNING,
            default="lora",
            why="RANK is the rank of each but of ia3, which has none, and of oft: its block size",
        ),
    ] = None
    lora_alpha: Annotated[
        float | None,
        Option(
            help="scale of the adapters (default: twice the rank)",
            group=TUNING,
            default="twice the rank",
        ),
    ] = None
    lora_targets: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            values=(*get_args(AdapterTargets), *TARGET_NAMES),
            help="matrices with adapters: {values}",
            group=TUNING,
            default="all; mixtures of experts: attention",
            why="the matrices of attention and MLP; those of routed experts are one tensor, which "
            "takes no adapter",
        ),
    ] = None
    quantisation: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=get_args(Quantisation),
            help="frozen matrices of --qlora: {values}",
            group=TUNING,
            default="nf4: 4 bits and an fp32 scale for each block of 64",
            why="as the executor trains; nf4_double, int8 and int4 (groups of 128, GPTQ) are "
            "priced only",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModuleOptions:
    """Options of a traced nn.Module alone."""

    inputs: Annotated[
        Sequence[str] | None,
        Option(
            "--input",
            metavar="NAME=DTYPE[B,…]",
            help="of a module:…:factory: an argument, such as x=float32[B,3,224,224] (may be "
            "repeated)",
            group=TRAINING,
            default="`example_inputs(batch_size)` next to the factory; of a transformers module a "
            "guess from its config, which the answer names",
            why="`docs/how-to/any_module.md`",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WholeRunOptions:
    """Cost of a whole training run."""

    price: Annotated[
        str | float | None,
        Option(
            metavar="DOLLARS",
            complete=proposals.prices,
            help="an accelerator's hour; of each: H100-SXM-80GB=3,…",
            elsewhere=("cost", "hourly", "price_per_hour"),
            group=WHOLE_RUN,
        ),
    ] = None
    tokens: Annotated[
        str | float | None,
        Option(
            metavar="COUNT",
            help="tokens of the whole run, such as 300B or 1.5T",
            elsewhere=("num_tokens", "total_tokens", "train_tokens", "max_tokens"),
            group=WHOLE_RUN,
        ),
    ] = None
    compute_optimal: Annotated[
        bool | None,
        Option(
            "--compute-optimal",
            help="tokens = 20 for each parameter that a token uses (Chinchilla)",
            elsewhere=("chinchilla",),
            group=WHOLE_RUN,
            default="off",
            why="the most of a training run's FLOP; models that serve long are trained on more "
            "([goodput.md](../how-to/goodput.md))",
        ),
    ] = None
    carbon: Annotated[
        str | float | None,
        Option(
            metavar="GRAMS",
            help="CO2 of a kilowatt hour at the place of the run",
            group=WHOLE_RUN,
            default="none: no CO₂ in the answer",
            why="grams a kilowatt hour differ by place tenfold",
        ),
    ] = None
    failures: Annotated[
        str | None,
        Option(
            metavar="FIGURES",
            complete=proposals.failures,
            help="mtbf=HOURS of one accelerator, restart=MINUTES, stall=SECONDS of a checkpoint, "
            "storage=GB/s of a node (commas)",
            group=WHOLE_RUN,
            default="mtbf 50,677 h of one accelerator, restart 11 min, stall 5 s, storage "
            "0.98 GB/s a node",
            why="published figures ([goodput.md](../how-to/goodput.md)); the answer lists them",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The configuration of another trainer."""

    source: Annotated[
        str | None,
        Option(
            "--from",
            metavar="FILE",
            help="take options from a trainer's file, such as ds_config.json",
            group=TRAINING,
            default="none: only the options that are given",
            why="`docs/how-to/exchange.md`; options that are given win over those of the file",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of inference alone."""

    concurrency: Annotated[
        int | None,
        Option(
            help="sequences at once",
            elsewhere=("max_num_seqs", "num_requests"),
            group=INFERENCE,
            default="one sequence for each replica",
            why="the answer gives the largest number",
        ),
    ] = None
    context_len: Annotated[
        int | None,
        Option(
            help="tokens of a sequence, prompt and answer",
            elsewhere=("max_model_len",),
            group=INFERENCE,
            default="`--seq-len`, else the model's longest; 4096 where it has none",
            why="as vLLM's `--max-model-len`",
        ),
    ] = None
    prompt_len: Annotated[
        int | None,
        Option(
            help="tokens of a prompt (default: half of the context)",
            group=INFERENCE,
            default="half of the context; all of it for an encoder",
            why="the rest of the context is the answer; times alone depend on it",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        Option(
            help="tokens of prompts computed in one step",
            group=INFERENCE,
            default="8192 tokens of all prompts in one step",
            why="as vLLM's `--max-num-batched-tokens` on large GPUs; the context length: one whole "
            "prompt",
        ),
    ] = None
    kv_precision: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=KV_PRECISIONS,
            help="precision of the cache: {values}",
            group=INFERENCE,
            default="as `--precision`",
            why="vLLM's `--kv-cache-dtype auto`",
        ),
    ] = None
    weight_precision: Annotated[
        str | None,
        Option(
            metavar="NAME",
            values=WEIGHT_PRECISIONS,
            help="format of the weights: {values}",
            group=INFERENCE,
            default="the format in which the weights are published (`quantization_config`: fp8, "
            "mxfp4, gptq, awq), else `--precision`",
            why="what an engine loads",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="steps started as one graph, or eagerly",
            group=INFERENCE,
            default="on",
            why="as vLLM; `--no-cuda-graphs` is its `--enforce-eager`",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FitRequest(
    ConfigOptions,
    ServingOptions,
    WholeRunOptions,
    ModuleOptions,
    AdapterOptions,
    PlanOptions,
    LayerOptions,
    CommonOptions,
    MachineOptions,
    Subject,
):
    """Whether a plan of a model fits a cluster."""

    inference: Annotated[
        bool,
        Option("--inference", common=True, help="serve it, instead of training", group=INFERENCE),
    ] = False


@dataclass(frozen=True, kw_only=True)
class StatedRun(
    ConfigOptions, AdapterOptions, PlanOptions, LayerOptions, CommonOptions, MachineOptions
):
    """A run as it was started, of a model on a cluster."""

    CHECKS_ITSELF: ClassVar = True

    model: Annotated[
        str | None,
        Option("--model", metavar="MODEL", common=True, help="price fixes: the model of the run"),
    ] = None
    cluster: Annotated[
        str | None, Option("--cluster", metavar="CLUSTER", common=True, help="and its cluster")
    ] = None


def pinnable() -> list[str]:
    """Return the names of the parts of a plan in ``--fix``."""
    return [one.short for one in declared(Plan).values() if one.option is not None]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Freedom and objective of a search."""

    fix: Annotated[
        str | Mapping[str, Any] | None,
        Option(
            metavar="NAME=VALUE,…",
            as_text=True,
            common=True,
            values=pinnable,
            complete=proposals.plan_parts,
            help="pin parts of the plan, such as tp=2,zero=1: {values}",
            group=SEARCH,
            collects=Plan,
        ),
    ] = None
    objective: Annotated[
        str,
        Option(
            metavar="NAME",
            common=True,
            values=OBJECTIVES,
            help="the least {values} (default: {default})",
            group=SEARCH,
        ),
    ] = "time"
    top: Annotated[
        int | None,
        Meta(ge=1, le=1000),
        Option(
            common=True,
            help="plans to show (default: as many as the answer has room for, 10 with -v)",
            group=SEARCH,
            default="10, in a short answer as many as it has room for",
            why="an answer of at most 15 lines",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SurveyOptions:
    """Constraints, several clusters, and inverse questions: of models whose layers are known."""

    require: Annotated[
        Sequence[str] | str | None,
        Option(
            metavar="CONSTRAINT",
            common=True,
            help="tp<=8, zero!=3, schedule==1f1b, memory<=70GiB, step<=10s, mfu>=0.4 (several: "
            "commas)",
            group=SEARCH,
        ),
    ] = None
    pareto: Annotated[
        str | Sequence[str] | None,
        Option(
            metavar="A,B",
            as_text=True,
            values=OBJECTIVES,
            help="the exact front of two of {values}",
            group=SEARCH,
        ),
    ] = None
    allow: Annotated[
        str | Sequence[str] | None,
        Option(
            metavar="WHAT",
            as_text=True,
            values=ALLOWED,
            help="plans that are left out otherwise: {values}",
            group=SEARCH,
        ),
    ] = None
    gpus_at_most: Annotated[
        int | None,
        Option(help="try parts of the cluster, up to this number of accelerators", group=SEARCH),
    ] = None
    budget: Annotated[
        str | float | None, Option(metavar="DOLLARS", help="of the whole run", group=WHOLE_RUN)
    ] = None
    days: Annotated[
        str | float | None, Option(metavar="COUNT", help="of the whole run", group=WHOLE_RUN)
    ] = None
    to: Annotated[
        str | None,
        Option(
            metavar="TARGET",
            values=target_names,
            help="only plans that this trainer runs, which `export` writes: {values}",
            group=SEARCH,
        ),
    ] = None
    find: Annotated[
        str | None,
        Option(
            metavar="WHAT",
            values=FINDS,
            help="an inverse question: {values}; largest-model: MODEL lists them with commas",
            group=SEARCH,
        ),
    ] = None


@dataclass(frozen=True)
class PlanRequest(
    SurveyOptions,
    WholeRunOptions,
    SearchOptions,
    ConfigOptions,
    ModuleOptions,
    AdapterOptions,
    LayerOptions,
    CommonOptions,
    MachineOptions,
    Subject,
):
    """The best plan of a model on one cluster or several."""

    cluster: Annotated[  # type: ignore[assignment]
        str | Path | Cluster | Sequence[str | Path | Cluster],
        Option(
            "CLUSTER[,…]",
            as_text=True,
            complete=proposals.clusters,
            help="8xA100-80GB, 16x8xH100-SXM, FILE.toml, here:8; several with commas, "
            "1..4x8xH100-SXM",
        ),
    ]
    layers: Annotated[str | Sequence[int] | None, layers_in(SEARCH)] = field(
        default=None, kw_only=True
    )
    global_batch_size: Annotated[
        Batch | str | None,
        Option(
            metavar="N[..N]",
            as_text=True,
            common=True,
            help="sequences of one optimizer step; 512..2048: the most tokens/s of 512, 1024 and "
            "2048",
            elsewhere=("batch_size", "gbs", "train_batch_size", "batch", "bs"),
            group=TRAINING,
        ),
    ] = field(default=None, kw_only=True)  # type: ignore[assignment]


_MICRO_BATCH = declared(Plan)["micro_batch_size"].option


@dataclass(frozen=True)
class TechniquesRequest(AdapterOptions, LayerOptions, CommonOptions, MachineOptions, Subject):
    """Techniques of training compared for one model on one cluster."""

    micro_batch_size: Annotated[int | None, _MICRO_BATCH] = field(default=None, kw_only=True)


def option(request: type, name: str) -> Declared:
    """Return how a field of a request is declared."""
    return declared(request)[name]


def part(request: object, group: type) -> dict[str, Any]:
    """Return the values of a request that a group of options declares, by name."""
    return {name: getattr(request, name) for name in declared(group)}


def plan_fields(request: FitRequest) -> dict[str, Any]:
    """Return the fields of a plan that a request gives."""
    return {name: value for name, value in part(request, Plan).items() if value is not None}
