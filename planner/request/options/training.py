"""Options of training, in groups: every model, models whose layers are known, adapters, modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, get_args

from cost_models.plan.plan import PARALLELISM, TRAINING
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
from hardware_profiles.fields import names_in
from hardware_profiles.options import Option
from hardware_profiles.software.trainer import OPTIMIZER_KERNELS, software_names

TUNING: Final = "adapters and frozen parts"
training = partial(Option, group=TRAINING)
tuning = partial(Option, group=TUNING)
BATCH_NAMES: Final = ("batch_size", "gbs", "train_batch_size", "batch", "bs")  # of other tools


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MachineOptions:
    """How the machine is run."""

    power: Annotated[
        float | None,
        training(
            metavar="WATTS",
            help="power limit of every board; the same as CLUSTER@500W",
            elsewhere=("power_limit", "power_cap", "tdp", "watts"),
            default="the board's own",
            why="matmuls of long runs slow down under a limit, memory does not "
            "([step_time_compute.md](../explanation/step_time_compute.md))",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CommonOptions:
    """Training options of every model."""

    global_batch_size: Annotated[
        Batch | None,
        training(
            common=True,
            help="sequences of one optimizer step",
            elsewhere=BATCH_NAMES,
            default="`plan`: one sequence for each accelerator; for several clusters and whole "
            "runs the best batch for the run's FLOP; `fit`: micro-batch × data parallel × "
            "(pipeline parallel)",
            why="the smallest that keeps every rank and stage busy; clusters are compared with one "
            "that hides their communication ([plan.md](../how-to/plan.md))",
        ),
    ] = None
    precision: Annotated[
        str | None,
        training(
            metavar="NAME",
            common=True,
            values=get_args(Precision),
            elsewhere=names_in("""
                dtype mixed_precision torch_dtype amp bfloat16=bf16 float16=fp16 half=fp16
            """),
            help="{values} (plan: bf16,fp8 takes the better)",
            default="bf16 if the accelerator has it, else fp16, else fp32; fp32 on a CPU",
            why="16-bit compute with fp32 master weights. tf32, in memory as fp32, is priced only; "
            "fp8 is trained where matrices are whole, and as in Transformer Engine with "
            "`--software megatron`",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        training(
            metavar="NAME",
            values=get_args(Optimizer),
            elsewhere=("optim", "adam8bit=adamw_8bit", "adamw8bit=adamw_8bit", "8bit=adamw_8bit"),
            help="{values}",
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


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LayerOptions:
    """Training options of models whose layers are known."""

    seq_len: Annotated[
        SeqLen | None,
        training(
            common=True,
            help="tokens of a sequence: 4096, 8k",
            elsewhere=names_in("""
                sequence_length seq_length max_length max_seq_length max_seq_len block_size
                cutoff_len context context_length ctx ctx_len n_ctx
            """),
            default="the model's longest, at most 4096",
            why="a common training length",
        ),
    ] = None
    target_seq_len: Annotated[
        SeqLen | None,
        training(
            help="tokens of an encoder-decoder's targets (T5), where --seq-len is of its inputs",
            elsewhere=names_in("""
                target_length max_target_length target_max_length decoder_seq_length
                decoder_seq_len max_output_length output_length
            """),
            default="as many as of inputs",
            why="shorter targets are padded to that",
        ),
    ] = None
    optimizer_rank: Annotated[
        int | None,
        training(
            metavar="N",
            elsewhere=("galore_rank", "apollo_rank"),
            help="rank of the gradients that galore and apollo keep states of (APOLLO-Mini: 1)",
            default="128",
            why="transformers' default of GaLore",
        ),
    ] = None
    optimizer_state_precision: Annotated[
        str | None,
        training(
            "--optimizer-precision",
            metavar="NAME",
            values=get_args(KeptPrecision),
            help="optimizer states: {values} (auto: as the updated weights)",
            default="auto: as the updated weights",
            why="fp32 states, or 16-bit ones without master weights",
        ),
    ] = None
    gradient_precision: Annotated[
        str | None,
        training(
            metavar="NAME",
            values=get_args(KeptPrecision),
            help="gradients: {values} (auto: the trainer's)",
            default="auto: the trainer's precision (its software profile)",
        ),
    ] = None
    optimizer_kernel: Annotated[
        str | None,
        training(
            metavar="NAME",
            values=OPTIMIZER_KERNELS,
            help="the update: one kernel, lists of tensors, or tensor by tensor: {values}",
            default="the trainer's (its software profile)",
            why="copies of states that live during the update; torch's default is foreach",
        ),
    ] = None
    gradient_copy: Annotated[
        bool | None,
        training(
            "--gradient-copy/--no-gradient-copy",
            help="16-bit gradients are copied to fp32 for the update, or not",
            default="the trainer's (its software profile)",
        ),
    ] = None
    master_weights: Annotated[
        bool | None,
        training(
            "--master-weights/--no-master-weights",
            help="fp32 weights in addition to 16-bit ones, or none",
            default="on in 16-bit precision",
            why="mixed precision; `--no-master-weights` is pure 16-bit training",
        ),
    ] = None
    attention_kernel: Annotated[
        str | None,
        training(
            "--attention",
            metavar="NAME",
            values=get_args(AttentionKernel),
            elsewhere=("flash_attention=flash", "flash_attn=flash", "sdpa=flash"),
            help="attention kernel: {values}",
            default="flash",
            why="torch's scaled_dot_product_attention",
        ),
    ] = None
    software: Annotated[
        str | None,
        training(
            metavar="NAME",
            values=software_names,
            elsewhere=("trainer", "framework"),
            help="trainer that is priced, such as torchtitan, or parts with + between them: "
            "hf-trainer+fsdp2 (shardplan software lists all)",
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
        tuning(
            metavar="PART[,PART…]",
            values=NAMED,
            help="frozen parts: {values}, layers:0-15",
            default="nothing",
            why="all weights are trained. Frozen parts (`head`: its norm too) stay in the "
            "computation's precision without gradients and states; priced and trained under every "
            "axis; a stage of a pipeline needs something to train",
        ),
    ] = None
    layers: Annotated[str | Sequence[int] | None, layers_in(PARALLELISM)] = None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AdapterOptions:
    """LoRA and QLoRA."""

    lora: Annotated[
        int | None,
        tuning(
            metavar="RANK",
            common=True,
            elsewhere=("lora_r", "lora_rank", "rank", "r"),
            help="train adapters of this rank on a frozen base",
        ),
    ] = None
    qlora: Annotated[
        int | None,
        tuning(
            metavar="RANK",
            help="as --lora, the frozen base in 4 bits",
            elsewhere=("load_in_4bit=16", "4bit=16"),
        ),
    ] = None
    adapter_method: Annotated[
        str | None,
        tuning(
            metavar="NAME",
            values=get_args(AdapterMethod),
            help="what --lora and --qlora train: {values} (rslora, pissa, olora: as lora)",
            elsewhere=("use_dora=dora", "dora=dora"),
            default="lora",
            why="RANK is the rank of each but of ia3, which has none, and of oft: its block size",
        ),
    ] = None
    lora_alpha: Annotated[
        float | None,
        tuning(help="scale of the adapters (default: twice the rank)", default="twice the rank"),
    ] = None
    lora_targets: Annotated[
        str | None,
        tuning(
            metavar="NAMES",
            values=(*get_args(AdapterTargets), *TARGET_NAMES),
            help="matrices with adapters: {values}",
            default="all; mixtures of experts: attention",
            why="the matrices of attention and MLP; those of routed experts are one tensor, which "
            "takes no adapter",
        ),
    ] = None
    quantisation: Annotated[
        str | None,
        tuning(
            metavar="NAME",
            values=get_args(Quantisation),
            help="frozen matrices of --qlora: {values}",
            default="nf4: 4 bits and an fp32 scale for each block of 64",
            why="as the executor trains; nf4_double, int8, int4 (groups of 128, GPTQ) and int2 (of "
            "64, HQQ) are priced only",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ModuleOptions:
    """Options of a traced nn.Module alone."""

    inputs: Annotated[
        Sequence[str] | None,
        training(
            "--input",
            metavar="NAME=DTYPE[B,…]",
            help="of a module:…:factory: an argument, such as x=float32[B,3,224,224] (may be "
            "repeated)",
            default="`example_inputs(batch_size)` next to the factory; of a transformers module a "
            "guess from its config, which the answer names",
            why="`docs/how-to/any_module.md`",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ConfigOptions:
    """The configuration of another trainer."""

    source: Annotated[
        str | None,
        training(
            "--from",
            metavar="FILE",
            help="take options from a trainer's file, such as ds_config.json",
            default="none: only the options that are given",
            why="`docs/how-to/exchange.md`; options that are given win over those of the file",
        ),
    ] = None
